"""Lets the plan choose knobs that say `auto`: parallel, zero, micro_batch, recompute.

    arguments with parallel=auto ...  ->  search  ->  arguments with values, and what they promise

Rule: what is not `auto` is never changed, and the chosen values are plain overrides, so the recipe
of the run folder holds them. A run that exists keeps its choice on as many ranks; resume=fresh
chooses anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from base.errors import UserError
from base.units import GIB
from model.cost import num_parameters
from plan.explanation import is_calibrated, speed_range
from plan.recipe_jobs import machine_for
from plan.search import Option, confirmed, option_of, search, stage_of
from recipes.compose import Composed, compose
from recipes.schema import Recipe
from runtime.ds_config.merge import ds_problems
from runtime.resolve import CHINCHILLA

FREE = ("parallel", "zero", "micro_batch", "recompute")
AUTO = "auto"
AXES = ("tensor", "context", "pipeline")


def given_knobs(words: Sequence[str]) -> set[str]:
    """Which of FREE some overrides set to a value, `parallel` also by one of its axes."""
    found = set()
    for word in words:
        name, _, value = word.partition("=")
        group = name.partition(".")[0]
        if group in FREE and value != AUTO and name != "parallel.sequence":
            found.add(group)
    return found


def compose_free(name: str, words: Sequence[str]) -> Composed:
    """A recipe whose `auto` knobs stand at values that are always legal to compose."""
    return compose(name, [word for word in words if not is_auto(word)], ds_problems)


def is_auto(word: str) -> bool:
    """Whether an override lets the plan choose."""
    name, _, value = word.partition("=")
    return name in FREE and value == AUTO


def with_choices(arguments: list[str], world: int, runs: Path) -> tuple[list[str], list[str]]:
    """Arguments of `make pretrain` without `auto`, and lines about what was chosen.

    Raises UserError where nothing fits, or where one knob is both `auto` and given.
    """
    free = [word.partition("=")[0] for word in arguments if is_auto(word)]
    if not free:
        return arguments, []
    names = [word.partition("=")[2] for word in arguments if word.startswith("recipe=")]
    if len(names) != 1:
        return arguments, []  # refused with its own reason later
    others = [word for word in arguments if not is_auto(word)]
    if both := sorted(given_knobs(others) & set(free)):
        raise UserError(*(f"{knob}=auto contradicts the value that is also given" for knob in both))
    recipe = compose_free(names[0], [word for word in others if not word.startswith("recipe=")])
    kept = kept_choice(recipe.recipe, free, world, runs)
    if kept:
        return [*others, *kept], [f"kept from this run's first attempt: {' '.join(kept)}"]
    machine, _ = machine_for(recipe.recipe)
    winner = search(recipe.recipe, world, machine, free).winner
    if winner is None:
        raise UserError(
            f"{', '.join(f'{knob}=auto' for knob in free)}: no legal choice fits {world} ranks of"
            f" {machine.gpu}; `make plan RECIPE={names[0]} WORLD={world}` shows what is missing"
        )
    chosen = overrides_of(confirmed(winner, world), free)
    return [*others, *chosen], [f"chosen by the plan: {' '.join(chosen)}"]


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


def prediction(recipe: Recipe, world: int) -> list[str]:
    """A line with the predicted speed and memory; [] where the cluster's GPU is not known."""
    try:
        return [predicted_line(own_option(recipe, world))]
    except UserError:
        return []


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
