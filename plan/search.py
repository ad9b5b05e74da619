"""Every legal layout of a recipe on a number of ranks, with memory and time, best first.

    parallel.legal.candidates x micro-batches x recomputation  ->  Option  ->  ranking

Rule: `parallel.legal` alone says what is legal, and the DeepSpeed JSON of the winner is made by the
code that makes it for a run, so nothing is proposed that a start would refuse. Options within
TIE of each other are ties: the one with fewer kinds of parallelism and more free memory is first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from base.errors import UserError
from base.units import GIB
from base.values import counted
from parallel.layout import Layout, solve
from parallel.legal import candidates, divisors, overrides, problems
from parallel.stages import stage_bounds
from plan.machine import Machine
from plan.memory_use import (
    AT_EDGE,
    FITS,
    TOO_LARGE,
    StageMemory,
    fits_host,
    host_bytes,
    verdict,
    worst,
)
from plan.recipe_jobs import job_of
from plan.step_time import StepTime, step_time
from plan.workload import Job
from recipes.schema import Parallel, Recipe
from runtime.ds_config.merge import EngineConfig
from runtime.resolve import json_for

TIE = 0.03
RECOMPUTE = ("none", "selective", "full")
MOST_SEQUENCES = 64  # of a micro-batch


@dataclass(frozen=True)
class Option:
    """One way to run a recipe on a machine."""

    recipe: Recipe
    layout: Layout
    job: Job
    machine: Machine
    memory: StageMemory  # of the fullest stage
    state: str  # fits, at the edge, does not fit (the card, or the memory of a host)

    @cached_property
    def time(self) -> StepTime:
        """Seconds of one step by kind; worked out only where somebody asks."""
        return step_time(self.job, self.machine)

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory on the fullest host."""
        return host_bytes(self.job, self.machine)

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.job.tokens / self.time.total

    @property
    def knobs(self) -> str:
        """What to give `make pretrain`."""
        layout, recipe = self.layout, self.recipe
        words = [overrides(recipe.parallel, layout.stage)]
        if isinstance(recipe.zero, str):
            words = [words[0].rsplit("zero=", 1)[0] + f"zero={recipe.zero}"]
        return " ".join([*words, f"micro_batch={recipe.micro_batch}",
                         f"recompute={recipe.recompute}"])  # fmt: skip

    @property
    def axes(self) -> int:
        """Kinds of parallelism besides data."""
        job = self.job
        return sum(size > 1 for size in (job.tensor, job.pipeline, job.context))


@dataclass(frozen=True)
class Ranking:
    """All options of a recipe on a number of ranks."""

    best: list[Option]  # that fit, fastest first
    edge: list[Option]  # that may run out of memory
    large: list[Option]  # that do not fit, nearest first
    illegal: int  # combinations of axes and ZeRO stage that a rule refuses
    refused: dict[str, int]  # first rule -> how many

    @property
    def winner(self) -> Option | None:
        """The proposal: the simplest of those within TIE of the fastest that fits."""
        pool = self.best or self.edge
        if not pool:
            return None
        ties = [
            option for option in pool if option.tokens_per_s >= (1 - TIE) * pool[0].tokens_per_s
        ]
        return min(ties, key=lambda option: (option.axes, option.memory.peak))


def search(
    recipe: Recipe,
    world: int,
    machine: Machine,
    free: Sequence[str] = ("parallel", "zero", "micro_batch", "recompute"),
) -> Ranking:
    """Every legal option; knobs that are not in `free` keep the recipe's values."""
    legal, refused = [], {}
    for candidate, stage in chosen_axes(recipe, world, free):
        first = dataclasses.replace(candidate, micro_batch=1)
        broken = problems(first if "micro_batch" in free else candidate, world, stage)
        if broken:
            refused[broken[0]] = refused.get(broken[0], 0) + 1
        else:
            legal.append((candidate, stage))
    options: dict[str, list[Option]] = {FITS: [], AT_EDGE: [], TOO_LARGE: []}
    for candidate, stage in legal:
        for option in options_of(candidate, world, stage, machine, free):
            options[option.state].append(option)
    for state in (FITS, AT_EDGE):
        options[state].sort(key=lambda option: -option.tokens_per_s)
    options[TOO_LARGE].sort(key=lambda option: option.memory.peak)
    return Ranking(
        options[FITS], options[AT_EDGE], options[TOO_LARGE], sum(refused.values()), refused
    )


def chosen_axes(recipe: Recipe, world: int, free: Sequence[str]) -> Iterator[tuple[Recipe, int]]:
    """(recipe, ZeRO stage) of every choice of axes and stage that `free` leaves open."""
    own_stage = None if "zero" in free else stage_of(recipe)
    for plain, stage in candidates(recipe, world):
        if own_stage not in (None, stage):
            continue
        zero = recipe.zero if own_stage else plain.zero
        if own_stage is None and plain.parallel.pipeline > 1 and stage == 1:
            zero = "pipeline"
        axes = plain.parallel
        if "parallel" not in free:
            if sizes(axes) != sizes(recipe.parallel):
                continue
            axes = recipe.parallel
        yield dataclasses.replace(plain, zero=zero, parallel=axes), stage


def options_of(
    candidate: Recipe, world: int, stage: int, machine: Machine, free: Sequence[str]
) -> list[Option]:
    """Options of one choice of axes and ZeRO stage: micro-batches and recomputation."""
    found = []
    micro_batches = micro_batches_of(candidate, world) if "micro_batch" in free else None
    for micro_batch in micro_batches or [candidate.micro_batch]:
        ways = RECOMPUTE if "recompute" in free else (candidate.recompute,)
        for recompute in ways:
            recipe = dataclasses.replace(candidate, micro_batch=micro_batch, recompute=recompute)
            try:
                found.append(option_of(recipe, world, stage, machine))
            except UserError:
                continue  # the engine's own rules refuse this JSON
            if found[-1].state == FITS:
                break  # more recomputation costs time and gains nothing
    return found


def option_of(recipe: Recipe, world: int, stage: int, machine: Machine) -> Option:
    """Memory and time of one legal choice. Raises UserError where it is refused."""
    layout = layout_of(recipe, world, stage)
    engine = engine_of(recipe, layout)
    job = job_of(recipe, layout, engine)
    memory = worst(job)
    state = verdict(memory.peak, machine) if fits_host(job, machine) else TOO_LARGE
    return Option(recipe, layout, job, machine, memory, state)


def layout_of(recipe: Recipe, world: int, stage: int) -> Layout:
    """What `parallel.layout.solve` gives for a choice that was found legal, without its checks."""
    axes = recipe.parallel
    data = world // axes.model_ranks
    quantum = data * recipe.micro_batch * recipe.seq_len
    pieces = recipe.batch_tokens
    pieces = [(0, pieces)] if isinstance(pieces, int) else pieces
    return Layout(
        world=world,
        pipeline=axes.pipeline,
        data=data,
        context=axes.context,
        tensor=axes.tensor,
        stage=stage,
        micro_batch=recipe.micro_batch,
        accumulation=tuple((step, tokens // quantum) for step, tokens in pieces),
        bounds=bounds_of(recipe) if axes.pipeline > 1 else (),
    )


def bounds_of(recipe: Recipe) -> tuple[int, ...]:
    """First block of each pipeline stage; the same for all choices of one size."""
    if recipe.parallel.bounds is not None:
        return stage_bounds(recipe)
    return _balanced(recipe.model, recipe.seq_len, recipe.parallel.pipeline)


@lru_cache(maxsize=256)
def _balanced(model, seq_len: int, pipeline: int) -> tuple[int, ...]:
    from parallel.stages import balanced_bounds

    return balanced_bounds(model, seq_len, pipeline)


ENGINE_CACHE: dict[tuple, EngineConfig] = {}


def engine_of(recipe: Recipe, layout: Layout) -> EngineConfig:
    """The DeepSpeed JSON; one for all choices that differ only in sizes that it does not read."""
    key = (
        str(recipe.zero), layout.pipeline > 1, layout.tensor > 1, layout.context > 1,
        layout.accumulates, layout.zero_ranks > 1, recipe.precision, recipe.optim.name,
        repr(recipe.ds),
    )  # fmt: skip
    if key not in ENGINE_CACHE:
        ENGINE_CACHE[key] = json_for(recipe, layout)
    return ENGINE_CACHE[key]


def micro_batches_of(recipe: Recipe, world: int) -> list[int]:
    """Sequences per pass that divide every batch of the run, up to MOST_SEQUENCES."""
    data = world // recipe.parallel.model_ranks
    pieces = recipe.batch_tokens
    pieces = [(0, pieces)] if isinstance(pieces, int) else pieces
    shares = [tokens // (data * recipe.seq_len) for _, tokens in pieces]
    return [
        size
        for size in divisors(shares[0], MOST_SEQUENCES)
        if all(share % size == 0 for share in shares)
    ]


def stage_of(recipe: Recipe) -> int:
    """ZeRO stage that the recipe's own file of DeepSpeed keys names."""
    from runtime.ds_config.merge import load_preset

    return load_preset(recipe.zero).stage


def sizes(axes: Parallel) -> tuple[int, int, int]:
    """Tensor, context, pipeline."""
    return axes.tensor, axes.context, axes.pipeline


def confirmed(option: Option, world: int) -> Option:
    """The same, through the checks of a start. Raises UserError where a start would refuse it."""
    layout = solve(option.recipe, world, option.layout.stage)
    json_for(option.recipe, layout)
    assert layout == option.layout, (layout, option.layout)
    return option


def why_slower(option: Option, winner: Option) -> str:
    """One clause: what an option loses against the winner, or why it cannot run."""
    if option.state == TOO_LARGE:
        if option.host_bytes > option.machine.usable_host_bytes:
            return f"needs {option.host_bytes / GIB:.0f} GiB of host memory"
        return f"needs {option.memory.peak / GIB:.1f} GiB"
    losses = {
        name: getattr(option.time, name) / option.job.tokens
        - getattr(winner.time, name) / winner.job.tokens
        for name in option.time.__dataclass_fields__
    }
    name = max(losses, key=lambda key: losses[key])
    seconds = losses[name] * winner.job.tokens
    return f"+{seconds:.2f} s {name.replace('_', '-')}" if seconds > 0 else "-"


def summary(found: Ranking, world: int) -> str:
    """One line: how many options there are."""
    legal = len(found.best) + len(found.edge) + len(found.large)
    return (
        f"{counted(legal, 'option')} on {counted(world, 'rank')}: {len(found.best)} fit,"
        f" {len(found.edge)} at the edge, {len(found.large)} too large; {found.illegal} choices of"
        " axes and ZeRO stage are illegal (make layouts shows why)"
    )
