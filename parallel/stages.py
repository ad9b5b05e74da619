"""Decoder blocks of each pipeline stage: balanced by cost, or the bounds that a recipe gives.

    embedding 0 1 2 | 3 4 5 6 | 7 8 9 | 10 11 norm head      12 blocks, bounds (0, 3, 7, 10, 12)

The slowest stage sets the pace of all stages. So the balance first minimises the most FLOPs of any
stage, with the head counted (an embedding is a lookup: no FLOPs). Among the bounds that reach this
minimum it then minimises the most parameters of any stage, with the embedding counted. Remaining
blocks go to late stages, because early stages hold more micro-batches at a time.

Rule: bounds are a pure function of the model's shape and the number of stages, so every rank, and a
machine without a GPU, computes the same ones. No torch. Units: blocks, FLOPs per token, parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from base.errors import UserError
from model.cost import exact, flops_per_token, parameters
from recipes.schema import Recipe


def stage_bounds(recipe: Recipe) -> tuple[int, ...]:
    """First block of each stage, and the number of blocks: stage s holds [bounds[s], bounds[s+1]).

    Raises UserError where `parallel.bounds` does not fit.
    """
    problem = bounds_problem(recipe)
    if problem:
        raise UserError(problem)
    layers, given = recipe.model.num_hidden_layers, recipe.parallel.bounds
    if given is not None:
        return (0, *given, layers)
    return balanced_bounds(recipe.model, recipe.seq_len, recipe.parallel.pipeline)


def bounds_problem(recipe: Recipe) -> str | None:
    """The refusal of a `parallel.bounds` that does not fit, with bounds that do; else None."""
    given, stages = recipe.parallel.bounds, recipe.parallel.pipeline
    layers = recipe.model.num_hidden_layers
    if given is None or stages > layers:  # the latter is another rule's
        return None
    shown = f"parallel.bounds={list(given)}"
    if stages == 1:
        return f"{shown} has no effect with parallel.pipeline=1; remove it, or set the latter"
    if len(given) == stages - 1 and given[-1] < layers:
        return None
    balanced = balanced_bounds(recipe.model, recipe.seq_len, stages)
    return (
        f"{shown}: {stages} stages of {layers} blocks need {stages - 1} bounds below {layers};"
        f" balanced: {list(balanced[1:-1])}"
    )


def balanced_bounds(shape, seq_len: int, stages: int) -> tuple[int, ...]:
    """The bounds with the smallest (most FLOPs, most parameters) of any stage.

    `shape` has the fields of `recipes.schema.Model`. Every stage gets at least one block.
    """
    shape = exact(shape)
    layers = shape.num_hidden_layers
    assert 1 <= stages <= layers, (stages, layers)
    block, extra = _costs(shape, seq_len, stages)

    def most_blocks(*limits: int) -> list[int]:
        """Blocks that fit into each stage under limits (FLOPs, parameters)."""
        limited = range(len(limits))
        return [min((limits[i] - own[i]) // block[i] for i in limited) for own in extra]

    def is_enough(*limits: int) -> bool:
        counts = most_blocks(*limits)
        return min(counts) >= 1 and sum(counts) >= layers

    flops = _smallest(is_enough)
    counts = most_blocks(flops, _smallest(lambda weights: is_enough(flops, weights)))
    stage = 0
    while sum(counts) > layers:
        if counts[stage] > 1:
            counts[stage] -= 1
        stage = (stage + 1) % stages
    return (0, *accumulate(counts))


def _costs(shape, seq_len: int, stages: int) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """(FLOPs, parameters) of one block, and of each stage's embedding, norm and head."""
    counted = parameters(shape)
    embedding = shape.vocab_size * shape.hidden_size
    head_flops = 6 * embedding
    block_flops = (flops_per_token(shape, seq_len) - head_flops) // shape.num_hidden_layers
    extra = [[0, 0] for _ in range(stages)]
    extra[0][1] += embedding
    # A tied head on another stage than the embedding is a second copy of it.
    has_head = stages > 1 or not shape.tie_word_embeddings
    extra[-1][0] += head_flops
    extra[-1][1] += shape.hidden_size + (embedding if has_head else 0)
    return (block_flops, counted.block), [(flops, weights) for flops, weights in extra]


def _smallest(is_enough: Callable[[int], bool]) -> int:
    """The smallest whole number that is enough, where all larger ones are too."""
    high = 1
    while not is_enough(high):
        high *= 2
    low = high // 2  # not enough, or 0
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
