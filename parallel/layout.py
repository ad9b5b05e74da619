"""Which rank does what: the axes of ranks, their sizes, and which combinations are legal.

Rank order, fastest first: tensor, context, data, pipeline. Tensor ranks are therefore neighbours on
one host, and only pipeline stages (the least traffic) are far apart. The one rule: everything here
is arithmetic on a recipe and a number of ranks - no torch, no process group, no clock - so any
machine can work out any rank's place.

Units: ranks, sequences, tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple

from model.cost import BYTES
from parallel.stages import bounds_problem, stage_bounds
from recipes.schema import Recipe, UserError


class Coordinates(NamedTuple):
    """Place of one rank on each axis, 0-based."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of `world` ranks and how a global batch is cut over the data axis."""

    world: int
    pipeline: int
    data: int
    context: int
    tensor: int
    stage: int  # ZeRO stage
    micro_batch: int  # sequences per rank and forward pass
    accumulation: tuple[tuple[int, int], ...]  # (first data step, micro-batches per rank and step)
    bounds: tuple[int, ...] = ()  # first block of each pipeline stage, number of blocks; () = one

    def coordinates(self, rank: int) -> Coordinates:
        """Axis coordinates of a global rank; the inverse of `rank`."""
        assert 0 <= rank < self.world, rank
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, context, tensor)

    def rank(self, place: Coordinates) -> int:
        """Global rank at axis coordinates."""
        outer = place.pipeline * self.data + place.data
        return (outer * self.context + place.context) * self.tensor + place.tensor

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO shards: context ranks hold the same weights, like data ranks."""
        return self.data * self.context

    @property
    def accumulates(self) -> bool:
        """Whether any step of the run sums gradients over several micro-batches."""
        return any(count > 1 for _, count in self.accumulation)

    def describe(self) -> str:
        """One line for people: every axis with its size, and the batch."""
        counts = " then ".join(str(count) for _, count in self.accumulation)
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        stages = [str(end - first) for first, end in pairwise(self.bounds)]
        blocks = f"; blocks per stage {' '.join(stages)}" if stages else ""
        return (
            f"{ranks} = pipeline {self.pipeline} x data {self.data} x context {self.context}"
            f" x tensor {self.tensor}, ZeRO-{self.stage}; micro-batch {self.micro_batch} sequences,"
            f" accumulation {counts}{blocks}"
        )

    def as_dict(self) -> dict:
        """Plain values for layout.json."""
        accumulation = [list(piece) for piece in self.accumulation]
        return asdict(self) | {"accumulation": accumulation, "bounds": list(self.bounds)}


def solve(recipe: Recipe, world: int, stage: int) -> Layout:
    """The layout of `recipe` on `world` ranks under ZeRO `stage`.

    Raises UserError with every broken rule: the arithmetic, and the nearest legal values.
    """
    problems = [rule(recipe, world, stage) for rule in RULES]
    problems = [problem for problem in problems if problem]
    if problems:
        raise UserError(*problems)
    axes = recipe.parallel
    data = world // (axes.tensor * axes.pipeline * axes.context)
    quantum = data * recipe.micro_batch * recipe.seq_len
    broken = [
        line for line in (_batch_problem(recipe, data, *p) for p in batch_pieces(recipe)) if line
    ]
    if broken:
        raise UserError(*broken)
    return Layout(
        world=world,
        pipeline=axes.pipeline,
        data=data,
        context=axes.context,
        tensor=axes.tensor,
        stage=stage,
        micro_batch=recipe.micro_batch,
        accumulation=tuple((step, tokens // quantum) for step, tokens in batch_pieces(recipe)),
        bounds=stage_bounds(recipe) if axes.pipeline > 1 else (),
    )


def batch_pieces(recipe: Recipe) -> list[tuple[int, int]]:
    """[(first data step, tokens per step), ...] of a constant batch or a ramp."""
    if isinstance(recipe.batch_tokens, int):
        return [(0, recipe.batch_tokens)]
    return [(step, tokens) for step, tokens in recipe.batch_tokens]


def _axes_divide_world(recipe: Recipe, world: int, stage: int) -> str | None:
    axes = recipe.parallel
    product = axes.tensor * axes.pipeline * axes.context
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


def _pipeline_needs_stage_1(recipe: Recipe, world: int, stage: int) -> str | None:
    if recipe.parallel.pipeline == 1 or stage not in (2, 3):
        return None
    return (
        f"parallel.pipeline={recipe.parallel.pipeline} with zero={recipe.zero}: a pipeline keeps"
        f" gradients of several micro-batches, which ZeRO-{stage} shards away; use zero=pipeline"
        " (stage 1), or parallel.pipeline=1 with zero=1, 2 or 3"
    )


def _pipeline_has_no_context(recipe: Recipe, world: int, stage: int) -> str | None:
    if recipe.parallel.pipeline == 1 or recipe.parallel.context == 1:
        return None
    return (
        f"parallel.context={recipe.parallel.context} does not combine with"
        f" parallel.pipeline={recipe.parallel.pipeline}; set one of them to 1"
    )


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
    """Key-value heads are never split over tensor ranks; context ranks may each hold a copy."""
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
    words, tensor = recipe.model.vocab_size, recipe.parallel.tensor
    if words >= tensor:
        return None
    return (
        f"parallel.tensor={tensor} is more than model.vocab_size={words}: every tensor rank needs a"
        f" word; use at most {words}"
    )


def _tensor_stays_on_a_host(recipe: Recipe, world: int, stage: int) -> str | None:
    tensor, per_node = recipe.parallel.tensor, recipe.cluster.gpus_per_node
    if per_node % tensor == 0 or world <= per_node:
        return None
    legal = divisors(per_node)
    return (
        f"parallel.tensor={tensor} would cross hosts of cluster.gpus_per_node={per_node} ranks:"
        f" it must divide {per_node}; legal: {_listed(legal)}"
    )


def _sequence_divides(recipe: Recipe, world: int, stage: int) -> str | None:
    axes, seq_len = recipe.parallel, recipe.seq_len
    if seq_len % axes.context:
        return (
            f"seq_len={seq_len} is not a multiple of parallel.context={axes.context}; nearest: "
            + nearest_multiples(seq_len, axes.context)
        )
    parts = axes.context * axes.tensor
    if axes.sequence and seq_len % parts:
        return (
            f"seq_len={seq_len} is not a multiple of parallel.context {axes.context} x"
            f" parallel.tensor {axes.tensor} = {parts}, over which parallel.sequence=true splits"
            f" tokens; nearest: {nearest_multiples(seq_len, parts)}, or parallel.sequence=false"
        )
    return None


def _bounds_fit(recipe: Recipe, world: int, stage: int) -> str | None:
    return bounds_problem(recipe)


RULES: Sequence[Callable[[Recipe, int, int], str | None]] = (
    _axes_divide_world,
    _stage_is_known,
    _pipeline_needs_stage_1,
    _pipeline_has_no_context,
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
    """The legal neighbours of `value`, as text: `458752 or 524288`."""
    below = value // quantum * quantum
    return f"{below} or {below + quantum}" if below > 0 else f"{quantum}"


def divisors(number: int, most: int = 2**12) -> list[int]:
    """Divisors of `number` up to `most`, ascending: more would help nobody choose."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _listed(values: Sequence[int]) -> str:
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown) + (", ..." if len(values) > 8 else "")


def pipeline_bytes(recipe: Recipe, layout: Layout, micro_batches: int) -> int:
    """Bytes that a rank sends to the next stage in one step, and gets back as their gradient.

    Hidden states of every micro-batch, tokens x hidden_size; with sequence parallelism only those
    of the rank's own tokens.
    """
    tokens = micro_batches * layout.micro_batch * recipe.seq_len
    if recipe.parallel.sequence:
        tokens //= layout.tensor
    return tokens * recipe.model.hidden_size * BYTES[recipe.precision]
