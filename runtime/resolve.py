"""Resolves a recipe: everything that follows from it, a number of ranks and the batch schedule.

    recipe x world x schedule -> layout, DeepSpeed JSON, length of the run, warm-up, warnings

Rule: `resolve` is a pure function without torch. The launcher calls it to refuse, every rank calls
it to run, `make show` calls it to print; all three get the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from base.errors import UserError
from base.units import MIB
from base.values import as_int, counted
from data.stream.schedule import Schedule
from model.cost import flops_per_token, num_parameters
from model.families import export_problem
from parallel.communication_volume import gathers
from parallel.layout import Layout, solve
from recipes.schema import Recipe
from runtime.ds_config.key_rules import kernel_problems
from runtime.ds_config.merge import (
    EngineConfig,
    ds_problems,
    engine_config,
    file_problems,
    load_preset,
)
from runtime.engine.learning_rate import warmup_steps

# Compute-optimal tokens per parameter (Hoffmann et al. 2022, table A3, about 20 at every size), and
# how far from it a run is worth a warning.
CHINCHILLA = 20
FAR_BELOW, FAR_ABOVE = 4, 100


@dataclass(frozen=True)
class Resolved:
    """The plan of a run: the schedules span `total_steps`, the run ends after `last_step`."""

    layout: Layout
    engine: EngineConfig
    total_steps: int
    last_step: int
    warmup_steps: int
    num_parameters: int
    flops_per_token: float
    warnings: list[str]
    rounding: str = ""  # for a person: how a length in tokens became whole steps

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        return self.engine.json


def resolve(recipe: Recipe, world: int, schedule: Schedule) -> Resolved:
    """The plan of `recipe` on `world` ranks. Raises UserError with every problem."""
    problems: list[str] = []
    parameters = num_parameters(recipe.model)
    total_steps = attempt(problems, lambda: length_in_steps(recipe, schedule, parameters))
    warmup = attempt(problems, lambda: warmup_steps(recipe.warmup, total_steps or 2**62))
    preset = attempt(problems, lambda: load_preset(recipe.zero))
    layout = engine = None
    if preset:
        layout = attempt(problems, lambda: solve(recipe, world, preset.stage))
    if layout:
        engine = attempt(problems, lambda: json_for(recipe, layout))
        if engine and recipe.cluster.device == "cpu":
            problems += kernel_problems(engine.json, "cpu")
    else:
        problems += [] if preset else file_problems(recipe)
        problems += ds_problems(recipe.ds)
    if problems:
        raise UserError(*problems)
    return Resolved(
        layout=layout,
        engine=engine,
        total_steps=total_steps,
        last_step=min(total_steps, recipe.stop_after or total_steps),
        warmup_steps=warmup,
        num_parameters=parameters,
        flops_per_token=flops_per_token(recipe.model, recipe.seq_len),
        warnings=[
            *budget_warnings(schedule.tokens_after(total_steps), parameters),
            *layout_warnings(recipe, layout, engine.json),
            *export_warnings(recipe),
            *engine.notes,
        ],
        rounding=rounding(recipe, schedule, total_steps, parameters),
    )


def attempt(problems: list[str], action):
    """Return the value of `action`; where it raises UserError, add its problems and return None."""
    try:
        return action()
    except UserError as error:
        problems += error.problems
        return None


def json_for(recipe: Recipe, layout: Layout) -> EngineConfig:
    """The DeepSpeed JSON under a layout."""
    return engine_config(
        recipe,
        data_size=layout.zero_ranks,
        accumulation=layout.accumulation[0][1],
        accumulates=layout.accumulates,
    )


def length_in_steps(recipe: Recipe, schedule: Schedule, parameters: int) -> int:
    """Steps of the whole run, from `steps` or from `tokens`. Raises UserError."""
    if recipe.steps is not None:
        return recipe.steps
    if recipe.tokens == "chinchilla":
        return schedule.steps_for(CHINCHILLA * parameters)
    tokens = as_int(recipe.tokens)
    if tokens < 1:
        raise UserError(f"tokens={recipe.tokens} is not a length; give a number above 0")
    return schedule.steps_for(tokens)


def rounding(recipe: Recipe, schedule: Schedule, steps: int, parameters: int) -> str:
    """A line on the rounding of `tokens` to whole steps; "" where nothing was rounded."""
    if recipe.tokens is None:
        return ""
    wanted = CHINCHILLA * parameters if recipe.tokens == "chinchilla" else as_int(recipe.tokens)
    trained = schedule.tokens_after(steps)
    if trained == wanted:
        return ""
    return (
        f"tokens={recipe.tokens} is {wanted:,}, rounded up to {counted(steps, 'whole step')}:"
        f" {trained:,} tokens"
    )


def layout_warnings(recipe: Recipe, layout: Layout, json: dict[str, Any]) -> list[str]:
    """Warnings about a legal layout that costs more than a reader may expect."""
    lines = []
    if layout.stage == 3 and layout.tensor > 1:
        count, size = gathers(recipe, layout, json)
        if count:
            lines.append(
                f"zero={recipe.zero} with parallel.tensor={layout.tensor}: up to {count} gathers"
                f" of {size / MIB:,.1f} MiB in all in every micro-batch, besides those of tensor"
                " parallelism; zero=1 gathers weights once per step, if their state fits"
            )
    fewest = min(count for _, count in layout.accumulation)
    if fewest < layout.pipeline:
        given = counted(fewest, "micro-batch", "micro-batches")
        smaller = f", or a micro_batch below {layout.micro_batch}" if layout.micro_batch > 1 else ""
        lines.append(
            f"parallel.pipeline={layout.pipeline} with {given} per rank and step: each stage idles"
            f" {layout.bubble(fewest):.0%} of a step; give at least {layout.pipeline}"
            f" micro-batches, by a larger batch_tokens{smaller}"
        )
    return lines


def export_warnings(recipe: Recipe) -> list[str]:
    """A warning where the trained model could not be exported to a Hugging Face family."""
    problem = export_problem(recipe.model)
    return [f"model: this shape trains and cannot be exported: {problem}"] if problem else []


def budget_warnings(tokens: int, parameters: int) -> list[str]:
    """A warning where the run is far from the compute-optimal number of tokens."""
    ratio = tokens / parameters
    if FAR_BELOW <= ratio <= FAR_ABOVE:
        return []
    side = "below" if ratio < CHINCHILLA else "above"
    return [
        f"{ratio:.3g} tokens per parameter, far {side} the compute-optimal {CHINCHILLA}"
        f" (tokens=chinchilla: {CHINCHILLA * parameters:,} tokens)"
    ]
