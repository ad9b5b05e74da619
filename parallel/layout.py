"""Layouts: the axes of ranks, their sizes, and the place of each rank on them.

Order of ranks, fastest axis first: tensor, context, data, pipeline. Tensor ranks are therefore
neighbours on one host, and only pipeline stages, which communicate least, are far apart.

Rule: everything here is arithmetic on a recipe and a number of ranks, without torch, process group
or clock, so any machine can compute any rank's place.

Units: ranks, sequences, tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple

from base.errors import UserError
from base.values import counted
from model.cost import parameters
from parallel.legal import nearest, problems
from parallel.stages import stage_bounds
from recipes.schema import Model, Recipe, batch_ramp


class Coordinates(NamedTuple):
    """Place of one rank on each axis, 0-based."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of `world` ranks, and the split of a global batch over the data axis."""

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

    def bubble(self, micro_batches: int) -> float:
        """Share of a step (0..1) that a pipeline stage idles, by micro-batches per rank and step.

        It is (p - 1) / (m + p - 1), as in any schedule of one forward and one backward in turn
        (Narayanan et al., 2019).
        """
        return (self.pipeline - 1) / (micro_batches + self.pipeline - 1)

    @property
    def accumulates(self) -> bool:
        """True where any step of the run sums gradients over several micro-batches."""
        return any(count > 1 for _, count in self.accumulation)

    def describe(self) -> str:
        """One line for people: every axis with its size, and the batch."""
        counts = " then ".join(str(count) for _, count in self.accumulation)
        ranks = counted(self.world, "rank")
        stages = [str(end - first) for first, end in pairwise(self.bounds)]
        blocks = f"; blocks per stage {' '.join(stages)}" if stages else ""
        return (
            f"{ranks} = pipeline {self.pipeline} x data {self.data} x context {self.context}"
            f" x tensor {self.tensor}, ZeRO-{self.stage}; micro-batch"
            f" {counted(self.micro_batch, 'sequence')},"
            f" accumulation {counts}{blocks}"
        )

    def as_dict(self) -> dict:
        """Plain values for layout.json."""
        accumulation = [list(piece) for piece in self.accumulation]
        return asdict(self) | {"accumulation": accumulation, "bounds": list(self.bounds)}


def solve(recipe: Recipe, world: int, stage: int) -> Layout:
    """The layout of `recipe` on `world` ranks under ZeRO `stage`.

    Raises UserError with every broken rule, its arithmetic, and the nearest legal layouts.
    """
    broken = problems(recipe, world, stage)
    if broken:
        raise UserError(*broken, *nearest(recipe, world, stage))
    axes = recipe.parallel
    data = world // axes.model_ranks
    quantum = data * recipe.micro_batch * recipe.seq_len
    return Layout(
        world=world,
        pipeline=axes.pipeline,
        data=data,
        context=axes.context,
        tensor=axes.tensor,
        stage=stage,
        micro_batch=recipe.micro_batch,
        accumulation=tuple(
            (step, tokens // quantum) for step, tokens in batch_ramp(recipe.batch_tokens)
        ),
        bounds=stage_bounds(recipe) if axes.pipeline > 1 else (),
    )


def share(number: int, size: int, index: int) -> range:
    """The indices out of `number` that rank `index` of `size` holds: as even as possible."""
    return range(number * index // size, number * (index + 1) // size)


def parameters_of(model: Model, layout: Layout, place: Coordinates) -> int:
    """Parameters of the rank at `place` before ZeRO: its shard of its pipeline stage."""
    counted, tensor = parameters(model), layout.tensor
    last = layout.pipeline - 1
    first, end = layout.bounds[place.pipeline :][:2] if last else (0, model.num_hidden_layers)
    norms = (counted.norms - model.hidden_size) // model.num_hidden_layers
    total = (end - first) * ((counted.block - norms) // tensor + norms)
    table = len(share(model.vocab_size, tensor, place.tensor)) * model.hidden_size
    if place.pipeline == 0:
        total += table
    if place.pipeline == last:
        # A tied head on another stage than the embedding is a second copy of it.
        total += model.hidden_size + (table if last or not model.tie_word_embeddings else 0)
    return total


def parameters_per_stage(model: Model, layout: Layout) -> list[int]:
    """Parameters on the most loaded rank of each pipeline stage, before ZeRO."""
    return [
        max(
            parameters_of(model, layout, Coordinates(stage, 0, 0, index))
            for index in range(layout.tensor)
        )
        for stage in range(layout.pipeline)
    ]


def most_parameters(model: Model, layout: Layout) -> int:
    """Parameters on the most loaded rank, before ZeRO."""
    return max(parameters_per_stage(model, layout))


def places(layout: Layout) -> list[list[int]]:
    """[pipeline, data, context, tensor] of every rank, for layout.json."""
    return [list(layout.coordinates(rank)) for rank in range(layout.world)]


def describe_places(layout: Layout, ranks_per_host: int) -> list[str]:
    """One line per axis: the ranks of rank 0's group, and how many hosts they are on."""
    strides = {"tensor": 1, "context": layout.tensor, "data": layout.tensor * layout.context}
    strides["pipeline"] = strides["data"] * layout.data
    lines = []
    for axis, stride in strides.items():
        size = getattr(layout, axis)
        if size == 1 or layout.world == layout.data:
            continue
        first = [stride * index for index in range(size)]
        hosts = len({rank // ranks_per_host for rank in first})
        shown = ", ".join(map(str, first[:4])) + (f", ... {first[-1]}" if size > 4 else "")
        where = "on one host" if hosts == 1 else f"over {hosts} hosts"
        lines.append(f"{axis} group of rank 0: ranks {shown} ({where})")
    return lines
