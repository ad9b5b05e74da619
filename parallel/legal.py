"""Legal layouts, as rules and tables, and the nearest legal ones to a layout that is not.

`make layouts` prints the result for every layout; `layout.solve` refuses by the same rules. No
torch.

Rule: a rule is a pure function of (recipe, ranks, ZeRO stage) that returns None, or one line with
the knob, the value, the rule and the way out.

Units: ranks, sequences, tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from base.values import counted
from parallel.stages import bounds_problem
from recipes.schema import Parallel, Recipe, batch_ramp


def problems(recipe: Recipe, world: int, stage: int) -> list[str]:
    """One line for every rule that `recipe` breaks on `world` ranks; [] where it is legal."""
    broken = [line for rule in RULES if (line := rule(recipe, world, stage))]
    shown = features(recipe, stage)
    broken += [
        f"{shown[one]} with {shown[other]}: {REFUSED[one, other]}"
        for one, other in refused_pairs(recipe, stage)
    ]
    if broken:
        return broken
    data = world // recipe.parallel.model_ranks
    pieces = batch_ramp(recipe.batch_tokens)
    return [line for piece in pieces if (line := _batch_problem(recipe, data, *piece))]


def candidates(recipe: Recipe, world: int) -> Iterator[tuple[Recipe, int]]:
    """(recipe, ZeRO stage) for all sizes of the axes that divide `world`.

    Pipeline stages are balanced by cost, except with as many stages as the recipe has, whose own
    bounds are kept.
    """
    own = recipe.parallel
    for tensor in divisors(world):
        for context in divisors(world // tensor):
            for pipeline in divisors(world // tensor // context):
                bounds = own.bounds if pipeline == own.pipeline else None
                axes = dataclasses.replace(
                    own, tensor=tensor, context=context, pipeline=pipeline, bounds=bounds
                )
                for stage in (1, 2, 3):
                    yield dataclasses.replace(recipe, parallel=axes, zero=stage), stage


def nearest(recipe: Recipe, world: int, stage: int, most: int = 3) -> list[str]:
    """One line with the legal layouts nearest to the recipe's, as overrides.

    [] where there is none, or where the recipe uses no axis but data.
    """
    own = recipe.parallel
    if own.model_ranks == 1 or world < 1:
        return []

    def distance(axes: Parallel, zero: int) -> float:
        asked = (own.tensor, own.context, own.pipeline)
        sizes = zip((axes.tensor, axes.context, axes.pipeline), asked, strict=True)
        return sum(abs(math.log2(size / wanted)) for size, wanted in sizes) + 0.5 * (zero != stage)

    ordered = sorted(candidates(recipe, world), key=lambda c: distance(c[0].parallel, c[1]))
    found = []
    for candidate, zero in ordered:
        if not problems(candidate, world, zero):
            found.append(overrides(candidate.parallel, zero))
        if len(found) == most:
            break
    return (
        [f"nearest legal layouts of {counted(world, 'rank')}: " + "; ".join(found)] if found else []
    )


def overrides(axes: Parallel, stage: int) -> str:
    """The overrides that give these sizes."""
    sizes = {axis: getattr(axes, axis) for axis in ("tensor", "context", "pipeline")}
    given = [f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1]
    return " ".join([*given, f"zero={stage}"])


def _axes_divide_world(recipe: Recipe, world: int, stage: int) -> str | None:
    axes = recipe.parallel
    product = axes.model_ranks
    if world >= 1 and world % product == 0:
        return None
    below, above = world // product * product, (world // product + 1) * product
    nearest = f"{below} or {above}" if below else f"{above}"
    return (
        f"world={world} ranks is not a multiple of tensor {axes.tensor} x pipeline {axes.pipeline}"
        f" x context {axes.context} = {product}; nearest: {nearest} ranks"
    )


def _stage_is_known(recipe: Recipe, world: int, stage: int) -> str | None:
    if stage in (1, 2, 3):
        return None
    return f"zero={recipe.zero} means ZeRO stage {stage}; legal stages: 1, 2, 3"


# Pairs that do not combine, and why. All other pairs of these features are legal, and trained.
FEATURES = ("tensor", "context", "pipeline", "zero 1", "zero 2", "zero 3")
REFUSED = {
    ("pipeline", "zero 2"): "a pipeline keeps gradients of several micro-batches, which ZeRO-2"
    " shards away; use zero=pipeline (stage 1), or parallel.pipeline=1 with zero=1, 2 or 3",
    ("pipeline", "zero 3"): "a pipeline keeps gradients of several micro-batches, which ZeRO-3"
    " shards away; use zero=pipeline (stage 1), or parallel.pipeline=1 with zero=1, 2 or 3",
    ("context", "pipeline"): "all stages would need each window's documents on other ranks than its"
    " tokens; the two do not combine: set one of them to 1",
}


def features(recipe: Recipe, stage: int) -> dict[str, str]:
    """Those of FEATURES that a recipe uses, with the knob that sets each."""
    sizes = {axis: getattr(recipe.parallel, axis) for axis in ("tensor", "context", "pipeline")}
    shown = {axis: f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1}
    return shown | {f"zero {stage}": f"zero={recipe.zero}"}


def refused_pairs(recipe: Recipe, stage: int) -> list[tuple[str, str]]:
    """Every two features of the recipe that do not combine."""
    has = features(recipe, stage)
    return [(one, other) for one, other in REFUSED if one in has and other in has]


def _every_stage_has_a_block(recipe: Recipe, world: int, stage: int) -> str | None:
    layers, stages = recipe.model.num_hidden_layers, recipe.parallel.pipeline
    if stages <= layers:
        return None
    return (
        f"parallel.pipeline={stages} is more than model.num_hidden_layers={layers}: every stage"
        f" needs at least one block; use at most {layers}"
    )


def _heads_divide(recipe: Recipe, world: int, stage: int) -> str | None:
    model, axes = recipe.model, recipe.parallel
    if _splits_heads(model.num_attention_heads, model.num_key_value_heads, axes.tensor, 1):
        return None
    legal = divisors(model.num_key_value_heads)
    return (
        f"parallel.tensor={axes.tensor}: the {model.num_attention_heads} query and"
        f" {model.num_key_value_heads} key-value heads must split evenly;"
        f" legal tensor sizes: {_listed(legal)}"
    )


def _context_divides_heads(recipe: Recipe, world: int, stage: int) -> str | None:
    model, axes = recipe.model, recipe.parallel
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if _heads_divide(recipe, world, stage) or _splits_heads(
        heads, kv_heads, axes.tensor, axes.context
    ):
        return None
    legal = [c for c in divisors(heads) if _splits_heads(heads, kv_heads, axes.tensor, c)]
    return (
        f"parallel.context={axes.context} shares the {heads // axes.tensor} query and"
        f" {kv_heads // axes.tensor} key-value heads of a tensor rank (parallel.tensor="
        f"{axes.tensor}), which must split or repeat evenly; legal context sizes: {_listed(legal)}"
    )


def _splits_heads(heads: int, kv_heads: int, tensor: int, context: int) -> bool:
    """True where heads divide over the ranks.

    Key-value heads are never split over tensor ranks; several context ranks may hold a copy.
    """
    if heads % (tensor * context) or kv_heads % tensor:
        return False
    own = kv_heads // tensor
    return own % context == 0 or context % own == 0


def _features_divide(recipe: Recipe, world: int, stage: int) -> str | None:
    size, tensor = recipe.model.intermediate_size, recipe.parallel.tensor
    if size % tensor == 0:
        return None
    return (
        f"model.intermediate_size={size} is not a multiple of parallel.tensor={tensor};"
        f" nearest: {nearest_multiples(size, tensor)}"
    )


def _vocabulary_suffices(recipe: Recipe, world: int, stage: int) -> str | None:
    rows, tensor = recipe.model.vocab_size, recipe.parallel.tensor
    if rows >= tensor:
        return None
    return (
        f"parallel.tensor={tensor} is more than model.vocab_size={rows}: every tensor rank needs a"
        f" row of the embedding; use at most {rows}"
    )


def _tensor_stays_on_a_host(recipe: Recipe, world: int, stage: int) -> str | None:
    per_node = recipe.cluster.gpus_per_node
    if world <= per_node:
        return None
    return split_group_problem(recipe, per_node, "cluster.gpus_per_node")


def split_group_problem(recipe: Recipe, per_host: int, knob: str) -> str | None:
    """The refusal of tensor groups that span hosts of `per_host` ranks, given by `knob`."""
    tensor = recipe.parallel.tensor
    if per_host % tensor == 0 or recipe.parallel.across_hosts:
        return None
    return (
        f"parallel.tensor={tensor} would cross hosts of {knob}={per_host} ranks: it must divide"
        f" {per_host}; legal: {_listed(divisors(per_host))}; or parallel.across_hosts=true"
    )


def _sequence_divides(recipe: Recipe, world: int, stage: int) -> str | None:
    lengths = [("seq_len=", recipe.seq_len)]
    lengths += [("seq_len_warmup: ", length) for _, length in recipe.seq_len_warmup or ()]
    return next((line for one in lengths if (line := _length_problem(recipe, *one))), None)


def _length_problem(recipe: Recipe, name: str, length: int) -> str | None:
    axes = recipe.parallel
    if length % axes.context:
        return (
            f"{name}{length} is not a multiple of parallel.context={axes.context}; nearest: "
            + nearest_multiples(length, axes.context)
        )
    parts = axes.context * axes.tensor
    if axes.sequence and length % parts:
        return (
            f"{name}{length} is not a multiple of parallel.context {axes.context} x"
            f" parallel.tensor {axes.tensor} = {parts}, over which parallel.sequence=true splits"
            f" tokens; nearest: {nearest_multiples(length, parts)}, or parallel.sequence=false"
        )
    return None


def _bounds_fit(recipe: Recipe, world: int, stage: int) -> str | None:
    return bounds_problem(recipe)


RULES: Sequence[Callable[[Recipe, int, int], str | None]] = (
    _axes_divide_world,
    _stage_is_known,
    _every_stage_has_a_block,
    _heads_divide,
    _context_divides_heads,
    _features_divide,
    _vocabulary_suffices,
    _tensor_stays_on_a_host,
    _sequence_divides,
    _bounds_fit,
)


def _batch_problem(recipe: Recipe, data: int, step: int, tokens: int) -> str | None:
    quantum = data * recipe.micro_batch * recipe.seq_len
    if tokens > 0 and tokens % quantum == 0:
        return None
    where = "" if step == 0 else f" (from step {step})"
    message = (
        f"batch_tokens={tokens}{where} is not a multiple of {data} data-parallel ranks x"
        f" micro_batch {recipe.micro_batch} x seq_len {recipe.seq_len} = {quantum};"
        f" nearest: {nearest_multiples(tokens, quantum)}"
    )
    per_rank, uneven = divmod(tokens, data * recipe.seq_len)
    if per_rank and not uneven:
        fits = divisors(per_rank)
        message += f"; or micro_batch {_listed(fits)}"
    return message


def nearest_multiples(value: int, quantum: int) -> str:
    """The legal values next to `value`, as text: `458752 or 524288`."""
    below = value // quantum * quantum
    return f"{below} or {below + quantum}" if below > 0 else f"{quantum}"


def divisors(number: int, most: int = 2**12) -> list[int]:
    """Divisors of `number` up to `most`, ascending; larger ones are of no use in a message."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _listed(values: Sequence[int]) -> str:
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown) + (", ..." if len(values) > 8 else "")
