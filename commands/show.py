"""`make show`: what a recipe would do on a number of ranks. Starts nothing, needs no GPU.

    python -m commands.show [--world 64 | --nproc 8 --hostfile hosts] [--json] -- 7b zero=2

Prints the layout, memory, time and cost as the planner predicts them, the length of the run, the
knobs that differ from their defaults (`--all`: all, and the JSON itself) and the keys of the
DeepSpeed JSON, each with its origin. One rule: it computes nothing itself; the numbers are those
that the planner, the launcher and the run use.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from base.command_line import Parser
from base.errors import UserError
from base.paths import ROOT
from base.table import scaled, table
from base.units import GIB
from base.values import counted
from checkpoint.save.interval import risk
from data.stream.schedule import Schedule, schedule_of
from data.stream.sources import drawn
from data.stream.stream import open_stream
from launch.hosts.own_gpus import answer_about_recipe, ranks_or_own
from model.cost import flops_per_token
from parallel.layout import parameters_per_stage
from plan.choose import own_option
from plan.explanation import memory_lines, plain, run_lines
from plan.outlook import outlook
from recipes.check import knob_names
from recipes.compose import compose
from recipes.composed_file import Composed
from recipes.schema import Recipe
from runtime.ds_config.confirm import confirm
from runtime.ds_config.key_rules import kernel_problems
from runtime.ds_config.merge import ds_problems
from runtime.ds_config.state_bytes import ON_HOST, of_layout
from runtime.process.visible_gpus import visible_gpus
from runtime.resolve import Resolved, resolve


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.show`; returns the exit status."""
    parser = Parser(prog="make show", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all knobs, and the DeepSpeed JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return answer_about_recipe(parser, arguments, answer)


def answer(name: str, overrides: list[str], world: int | None, options: Namespace) -> str:
    """What is printed. Raises UserError."""
    shown = collect(name, overrides, world)
    return json.dumps(shown, indent=2) if options.json else text(shown, options.all)


def collect(recipe_name: str, overrides: Sequence[str], world: int | None = None) -> dict[str, Any]:
    """Everything that is shown, as plain values. Raises UserError with every problem."""
    composed = compose(recipe_name, overrides, ds_problems)
    recipe = composed.recipe
    world = ranks_or_own(recipe, world)
    schedule = schedule_of(recipe)
    resolved = resolve(recipe, world, schedule)
    if recipe.cluster.device == "auto" and not visible_gpus():
        problems = kernel_problems(resolved.config, "cpu: this machine shows no GPU")
        if problems:
            raise UserError(*problems)
    confirm(resolved.config)
    sources, refused = usage(recipe, schedule, resolved.last_step)
    run = length(recipe, resolved, schedule)
    return {
        "recipe": dataclasses.asdict(recipe),
        "recipe_origins": composed.origins,
        "layout": resolved.layout.as_dict(),
        "layout_text": resolved.layout.describe(),
        "run": run,
        "plan": predicted(recipe, world, run["tokens"]),
        "at_risk": risk(
            recipe.checkpoint.interval, recipe.checkpoint.minutes, recipe.cluster.mtbf_hours
        ),
        "ds_config": resolved.config,
        "ds_origins": ds_origins(composed, resolved),
        "optimizer_class": resolved.engine.optimizer_class,
        "state": state(recipe, resolved),
        "data": sources,
        "warnings": [*composed.warnings, *resolved.warnings, *refused],
    }


def predicted(recipe: Recipe, world: int, tokens: int) -> dict[str, Any]:
    """What the planner says of this layout: values and text, or why it says nothing."""
    try:
        option = own_option(recipe, world)
    except UserError as error:
        return {"problem": error.problems[0]}
    view = outlook(option.job, option.machine, option.time.total, tokens)
    texts = {"memory_text": memory_lines(option), "run_text": run_lines(option, view)}
    return plain(option, tokens) | texts


def length(recipe: Recipe, resolved: Resolved, schedule: Schedule) -> dict[str, Any]:
    """Size of the model and of the run."""
    by_length = schedule.tokens_by_length(resolved.total_steps)
    tokens = sum(by_length.values())
    return {
        "parameters": resolved.num_parameters,
        "steps": resolved.total_steps,
        "last_step": resolved.last_step,
        "rounding": resolved.rounding,
        "warmup_steps": resolved.warmup_steps,
        "tokens": tokens,
        "tokens_per_parameter": tokens / resolved.num_parameters,
        "flops": sum(
            flops_per_token(recipe.model, size) * tokens for size, tokens in by_length.items()
        ),
        "warmed_up": {str(size): tokens for size, tokens in by_length.items()},
    }


def ds_origins(composed: Composed, resolved: Resolved) -> dict[str, str]:
    """Origin of each key of the JSON; a `ds.` knob says where it was set."""
    known = composed.origins
    return {
        key: f"{origin} ({known[origin]})" if origin in known else origin
        for key, origin in resolved.engine.origins.items()
    }


def state(recipe: Recipe, resolved: Resolved) -> dict[str, Any]:
    """Bytes of training state per parameter of one rank's share, and in all."""
    layout, engine = resolved.layout, resolved.engine
    parts = of_layout(recipe, layout, engine)
    per_stage = parameters_per_stage(recipe.model, layout)
    share = max(per_stage)
    return {
        "bytes_per_parameter": parts,
        "parameters_of_rank": share,
        "parameters_per_stage": per_stage,
        "on_host": list(ON_HOST) if engine.is_offloaded else [],
        "gib": {name: value * share / GIB for name, value in parts.items()},
        # What a save beside training copies, in host memory.
        "copy_gib": (parts["master"] + parts["moments"]) * share / GIB if is_async(recipe) else 0.0,
    }


def is_async(recipe: Recipe) -> bool:
    """True where saves are written in a thread: chosen, or `auto` on GPUs."""
    mode, device = recipe.checkpoint.mode, recipe.cluster.device
    on_gpu = device == "cuda" or (device == "auto" and bool(visible_gpus()))
    return mode == "async" or (mode == "auto" and on_gpu)


def usage(recipe: Recipe, schedule: Any, last_step: int) -> tuple[list[dict[str, Any]], list[str]]:
    """How the run uses each source, where all corpora are there, else which are not; and what of it
    is worth a warning.
    """
    sources = recipe.data.sources
    if any(
        not (ROOT / sources[name].corpus / "manifest.json").is_file() for name in drawn(recipe.data)
    ):
        return [
            {"source": name, "corpus": source.corpus, "absent": True, "build": source.build}
            for name, source in sources.items()
        ], []
    vocabulary = recipe.model.vocab_size
    stream = open_stream(recipe.data, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)
    used = [
        {
            "source": use.uid,
            "corpus": use.corpus,
            "tokens": use.tokens,
            "epochs": use.epochs,
            "share": use.share,
            "stages": [list(stage) for stage in use.stages],
        }
        for use in stream.usage(last_step)
    ]
    try:
        return used, stream.check(last_step)
    except UserError as error:
        return used, [f"refused at start: {problem}" for problem in error.problems]


def text(shown: dict[str, Any], is_whole: bool = False) -> str:
    """The same for people; `is_whole` also prints knobs at their defaults, and the JSON itself."""
    plan, run = shown["plan"], shown["run"]
    keys = [[key, json.dumps(value)] for key, value in _leaves(shown["ds_config"])]
    lines = [
        "layout",
        f"  {shown['layout_text']}",
        "",
        *(line for line in plan.get("memory_text", [])),
        "training state of a rank, without activations and buckets (make dryrun RANK= adds them)",
        _state(shown["state"]),
        "",
        "time and cost, as the planner predicts them (make plan compares other layouts)",
        *plan.get("run_text", [f"  not predicted: {plan.get('problem')}"]),
        "",
        "run",
        f"  {run['parameters']:,} parameters, {counted(run['steps'], 'step')}, {run['tokens']:,}"
        " tokens"
        f" ({run['tokens_per_parameter']:.3g} per parameter), warm-up {run['warmup_steps']:,}"
        f" steps, {run['flops']:.3g} FLOPs",
        *(f"  {line}" for line in [run["rounding"]] if line),
        f"  a kill loses at most {shown['at_risk']}",
        *_warmed_up(run["warmed_up"]),
        *(_source(use) for use in shown["data"]),
        "",
        *_knobs(shown, is_whole),
        "",
        f"DeepSpeed JSON (builds {shown['optimizer_class']})",
        table([[key, value, shown["ds_origins"][key]] for key, value in keys]),
        *([json.dumps(shown["ds_config"], indent=2)] if is_whole else []),
    ]
    return "\n".join([*lines, *(f"\nwarning: {line}" for line in shown["warnings"])])


def _knobs(shown: dict[str, Any], is_whole: bool) -> list[str]:
    """The knobs with their origins: all, or those that do not stand at their defaults."""
    origins, known = shown["recipe_origins"], knob_names()
    rows = [
        [name, _plain(value), origins.get(name, "default")]
        for name, value in _leaves(shown["recipe"])
        if is_whole or (name in origins and (name not in known or value != known[name].default))
    ]
    what = "all knobs" if is_whole else "knobs that differ from their defaults (ALL=1: all)"
    return [what, table(rows)]


def _state(state_: dict[str, Any]) -> str:
    parts, gib = state_["bytes_per_parameter"], state_["gib"]
    rows = [
        [
            name,
            f"{value:.4g}",
            f"{gib[name]:.3f} GiB",
            "host memory" if name in state_["on_host"] else "",
        ]
        for name, value in parts.items()
    ]
    rows.append(["sum", f"{sum(parts.values()):.4g}", f"{sum(gib.values()):.3f} GiB", ""])
    share = f"x {scaled(state_['parameters_of_rank'])} parameters"
    shown = table([["", "bytes per parameter", share, ""], *rows])
    if len(state_["parameters_per_stage"]) > 1:
        per_gib = sum(parts.values()) / GIB
        stages = [f"{size * per_gib:.3f}" for size in state_["parameters_per_stage"]]
        shown += f"\n  that is the fullest pipeline stage; GiB of each: {' '.join(stages)}"
    if state_["copy_gib"]:
        shown += f"\n  saves in a thread: {state_['copy_gib']:.3f} GiB more of host memory"
    return shown


def _warmed_up(by_length: dict[str, int]) -> list[str]:
    if len(by_length) < 2:
        return []
    shown = ", ".join(
        f"{scaled(tokens)} in sequences of {size}" for size, tokens in by_length.items()
    )
    return [f"  tokens by length of what the model sees at once: {shown}"]


def _source(use: dict[str, Any]) -> str:
    if "epochs" in use:
        stages = [f"{share:.3g} from data step {step}" for step, share in use["stages"]]
        return (
            f"  source {use['source']}: {use['corpus']}, {use['tokens']:,} tokens,"
            f" {use['epochs']:.3g} epochs, {use['share']:.3g} of the run"
            + (f" ({', '.join(stages)})" if len(stages) > 1 else "")
        )
    made = "made at the first run" if use["build"] else "absent: make it, or point elsewhere"
    return f"  source {use['source']}: {use['corpus']}, {made}"


def _leaves(tree: dict[str, Any], prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
