"""Lets the plan choose knobs that say `auto`: parallel, zero, micro_batch, recompute.

    arguments with parallel=auto ...  ->  search  ->  arguments with values, why the others lost
    a recipe file with zero: auto ...

Rule: what is not `auto` is never changed, and the chosen values are plain overrides, so the recipe
of the run folder holds them. A run that exists keeps its choice on as many ranks; resume=fresh
chooses anew. What was chosen, the losers and the prediction are in the run folder's plan.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from base.errors import UserError
from base.units import GIB, MIB
from model.cost import num_parameters
from parallel.communication_volume import context_bytes, tensor_bytes
from plan.communication_time import gathers_of_pass, summed_bytes
from plan.explanation import TERMS, is_calibrated, speed_range
from plan.memory_use import RESERVE, stage_parameters
from plan.recipe_jobs import machine_for
from plan.search import (
    TIE,
    Option,
    Ranking,
    confirmed,
    option_of,
    search,
    stage_of,
    why_slower,
)
from plan.workload import WIDTH
from recipes.compose import AUTO, STAND_INS, Composed, compose
from recipes.schema import Recipe
from record.predictions import read_plan
from runtime.ds_config.merge import ds_problems
from runtime.resolve import CHINCHILLA

FREE = tuple(STAND_INS)
AXES = ("tensor", "context", "pipeline")
KEPT = 40  # losers of each kind in plan.json; the counts say how many there were


def given_knobs(words: Sequence[str]) -> set[str]:
    """Which of FREE some overrides set to a value, `parallel` also by one of its axes."""
    found = set()
    for word in words:
        name, _, value = word.partition("=")
        group = name.partition(".")[0]
        if group in FREE and value != AUTO and name != "parallel.sequence":
            found.add(group)
    return found


def compose_free(name: str, words: Sequence[str], free: list[str] | None = None) -> Composed:
    """A recipe whose `auto` knobs stand at values that are always legal to compose.

    Those that the file leaves to the plan are added to `free`.
    """
    found: list[str] = [] if free is None else free
    return compose(name, [word for word in words if not is_auto(word)], ds_problems, free=found)


def is_auto(word: str) -> bool:
    """Whether an override lets the plan choose."""
    name, _, value = word.partition("=")
    return name in FREE and value == AUTO


def with_choices(
    arguments: list[str], world: int, runs: Path
) -> tuple[list[str], list[str], dict[str, Any] | None]:
    """Arguments of `make pretrain` without `auto`, lines about what was chosen, and the choice.

    The choice is what plan.json keeps: the free knobs, their values, and why the others lost; None
    where nothing is `auto`. Raises UserError where nothing fits, or where one knob is both `auto`
    and given.
    """
    free = [word.partition("=")[0] for word in arguments if is_auto(word)]
    names = [word.partition("=")[2] for word in arguments if word.startswith("recipe=")]
    if len(names) != 1:
        return arguments, [], None  # refused with its own reason later, or chosen already
    others = [word for word in arguments if not is_auto(word)]
    if both := sorted(given_knobs(others) & set(free)):
        raise UserError(*(f"{knob}=auto contradicts the value that is also given" for knob in both))
    of_file: list[str] = []
    words = [word for word in others if not word.startswith("recipe=")]
    recipe = compose_free(names[0], words, of_file).recipe
    free += [knob for knob in of_file if knob not in free]
    if not free:
        return arguments, [], None
    kept = kept_choice(recipe, free, world, runs)
    if kept:
        choice = read_plan(runs / str(recipe.run)).get("choice") or {"chosen": kept}
        line = f"kept from this run's first attempt: {' '.join(kept)}"
        return [*others, *kept], [line], choice
    machine, _ = machine_for(recipe)
    ranking = search(recipe, world, machine, free)
    winner = ranking.winner
    if winner is None:
        raise UserError(
            f"{', '.join(f'{knob}=auto' for knob in free)}: no legal choice fits {world} ranks of"
            f" {machine.gpu}; `make plan RECIPE={names[0]} WORLD={world}` shows what is missing"
        )
    chosen = overrides_of(confirmed(winner, world), free)
    choice = {"free": free, "chosen": chosen, "ranks": world, **losers_of(ranking, winner)}
    return [*others, *chosen], [f"chosen by the plan: {' '.join(chosen)}"], choice


def kept_choice(recipe: Recipe, free: Sequence[str], world: int, runs: Path) -> list[str]:
    """The values that the run of this name recorded; [] where it is new or has other ranks."""
    folder = runs / str(recipe.run)
    if recipe.resume == "fresh":
        return []
    try:
        recorded = yaml.safe_load((folder / "recipe.yaml").read_text())
        ranks = json.loads((folder / "layout.json").read_text())["world"]
        if ranks != world:
            return []
        axes = recorded["parallel"]
        found = {knob: [f"{knob}={recorded[knob]}"] for knob in FREE if knob != "parallel"}
        found["parallel"] = [f"parallel.{axis}={axes[axis]}" for axis in AXES]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return []
    return [word for knob in free for word in found[knob]]


def overrides_of(option: Option, free: Sequence[str]) -> list[str]:
    """The chosen values of the free knobs, all axes named."""
    recipe = option.recipe
    found = {knob: [f"{knob}={getattr(recipe, knob)}"] for knob in FREE if knob != "parallel"}
    found["parallel"] = [f"parallel.{axis}={getattr(recipe.parallel, axis)}" for axis in AXES]
    return [word for knob in free for word in found[knob]]


def losers_of(found: Ranking, winner: Option) -> dict[str, Any]:
    """The losers of a search as plain values."""
    slower = [option for option in [*found.best, *found.edge] if option is not winner]
    rules = sorted(found.refused.items(), key=lambda item: -item[1])
    return {
        "considered": len(found.best) + len(found.edge) + len(found.large),
        "slower": [slower_than(option, winner) for option in slower[:KEPT]],
        "too_large": [too_large(option, found) for option in found.large[:KEPT]],
        "illegal": [{"rule": rule, "choices": count} for rule, count in rules],
    }


def slower_than(option: Option, winner: Option) -> dict[str, Any]:
    """One that could run: seconds that it loses for the tokens of a step of the winner."""
    seconds = option.time.total * winner.job.tokens / option.job.tokens - winner.time.total
    is_tie = abs(seconds) <= TIE * winner.time.total
    return {
        "knobs": option.knobs,
        "state": option.state,
        "loses_s": seconds,
        "why": "a tie: more kinds of parallelism, or more memory"
        if is_tie
        else why_slower(option, winner),
    }


def too_large(option: Option, found: Ranking) -> dict[str, Any]:
    """One that does not fit: GiB that it lacks, on the card or on a host, and what would help."""
    lacks = (option.memory.peak + RESERVE - option.machine.usable_bytes) / GIB
    lacks_host = (option.host_bytes - option.machine.usable_host_bytes) / GIB
    return {
        "knobs": option.knobs,
        "lacks_gib": max(0.0, lacks),
        "lacks_host_gib": max(0.0, lacks_host),
        "would_fit": nearest_change(option, found),
    }


def nearest_change(option: Option, found: Ranking) -> str:
    """The option that fits and shares most knobs with one that does not; "" where none fits."""
    best = max(found.best, key=lambda other: shared(option, other), default=None)
    if best is None:
        return ""
    words = set(option.knobs.split())
    changed = " ".join(word for word in best.knobs.split() if word not in words)
    return f"{changed} ({best.memory.peak / GIB:.1f} GiB)"


def shared(one: Option, other: Option) -> tuple[int, float]:
    """(knobs that two options share, speed of the other)."""
    return len(set(one.knobs.split()) & set(other.knobs.split())), other.tokens_per_s


def prediction(recipe: Recipe, world: int) -> tuple[dict[str, Any] | None, list[str]]:
    """(predicted terms of a run, as record.predictions names them; lines for a person).

    (None, [why]) where the cluster's GPU is not known, and so nothing is predicted.
    """
    try:
        option = own_option(recipe, world)
    except UserError as error:
        return None, list(error.problems)
    return predicted_terms(option), [predicted_line(option)]


def predicted_terms(option: Option) -> dict[str, Any]:
    """What a run will be compared with: seconds of a step, speed, MFU, memory."""
    time, job = option.time, option.job
    low, high = speed_range(option)
    rate = option.tokens_per_s
    peak = job.world * option.machine.peak_tflops * 1e12
    return {
        "step_s": time.total,
        "compute_s": time.total - time.optimizer,
        "optimizer_s": time.optimizer,
        "tokens_per_s": rate,
        "tokens_per_s_low": low,
        "tokens_per_s_high": high,
        "mfu": rate * job.shape.flops_per_token(job.seq_len) / peak,
        "bubble": time.bubble / time.total if job.pipeline > 1 else None,
        "communication_mib": communication_mib(option),
        "peak_memory_gib": option.memory.peak / GIB,
        "host_memory_gib_per_host": option.host_bytes / GIB,
        "state": option.state,
        "seconds": {shown: getattr(time, name) for name, shown in TERMS.items()},
        "gpu": option.machine.gpu,
        "is_calibrated": is_calibrated(option),
    }


def communication_mib(option: Option) -> float | None:
    """MiB of a step on rank 0, counted as runs count it (log.communication): a collective as the
    bytes of its larger side. None with pipeline stages, whose ends differ.

    DeepSpeed 0.19.8, counted: stage 0 reduces once; 1 reduces once and gathers the weights; 2
    reduces every micro-batch and gathers once; 3 gathers and reduces every micro-batch.
    """
    layout, recipe, job = option.layout, option.recipe, option.job
    if layout.pipeline > 1:
        return None
    many = job.micro_batches
    bytes_ = tensor_bytes(recipe, layout, many) + context_bytes(recipe, layout, many)
    total = float(sum(bytes_.values()))
    if job.data * job.context > 1:
        own, passes = stage_parameters(job, 0), many if job.stage >= 2 else 1
        gathers = {0: 0, 3: many * gathers_of_pass(job, own)}.get(job.stage, 1)
        total += own * (passes * summed_bytes(job) + gathers * WIDTH[job.precision])
    return total / MIB


def own_option(recipe: Recipe, world: int) -> Option:
    """Memory and time of a recipe as it stands. Raises UserError where its GPU is not known."""
    machine, _ = machine_for(recipe)
    return option_of(recipe, world, stage_of(recipe), machine)


def predicted_line(option: Option) -> str:
    """Predicted speed and memory of one layout."""
    low, high = (speed / option.job.world for speed in speed_range(option))
    mark = "" if is_calibrated(option) else " (not calibrated)"
    return (
        f"predicted: {low:,.0f} to {high:,.0f} tokens/s per GPU{mark},"
        f" {option.memory.peak / GIB:.1f} GiB of {option.machine.memory_gib:g} ({option.state});"
        " make plan explains it"
    )


def tokens_of(recipe: Recipe) -> float:
    """Tokens of the whole run, as far as the recipe says it in plain numbers."""
    if recipe.steps is not None:
        pieces = recipe.batch_tokens
        last = pieces if isinstance(pieces, int) else pieces[-1][1]
        return float(recipe.steps * last)
    if recipe.tokens == "chinchilla":
        return float(CHINCHILLA * num_parameters(recipe.model))
    return float(recipe.tokens)
