"""`make layouts`: every layout of a recipe on a number of ranks. Starts nothing, needs no GPU.

    python -m commands.layouts [--world 1024] [--all] -- 70b micro_batch=1

Prints the combinations that are not allowed, the legal layouts with their cost, and for every
illegal layout the rule that it breaks. Rule: it decides nothing itself; `parallel.legal` refuses
here as it does when a run starts.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from base.command_line import Parser
from base.errors import UserError
from base.table import table
from base.units import GIB
from base.values import counted
from launch.hosts.own_gpus import answer_about_recipe, ranks_or_own
from parallel.communication_volume import context_bytes, pipeline_bytes, tensor_bytes
from parallel.layout import Layout, most_parameters, solve
from parallel.legal import FEATURES, REFUSED, candidates, overrides, problems, refused_pairs
from recipes.compose import compose
from recipes.schema import Recipe
from runtime.ds_config.merge import load_preset
from runtime.ds_config.state_bytes import of_layout
from runtime.resolve import json_for

SHOWN = 40


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.layouts`; returns the exit status."""
    parser = Parser(prog="make layouts", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all legal layouts, not the leanest")
    return answer_about_recipe(parser, arguments, answer)


def answer(name: str, overrides: list[str], world: int | None, options: Namespace) -> str:
    """What is printed. Raises UserError."""
    recipe = compose(name, overrides).recipe
    world, own = ranks_or_own(recipe, world), load_preset(recipe.zero).stage
    legal, illegal = sort(recipe, world, own)
    return "\n".join(text(recipe, world, own, legal, illegal, None if options.all else SHOWN))


def sort(
    recipe: Recipe, world: int, own: int
) -> tuple[list[tuple[Recipe, Layout, float]], dict[str, list[str]]]:
    """Legal layouts with their GiB of state per rank, leanest first; problem -> illegal ones.

    `own` is the ZeRO stage of the recipe, whose file of DeepSpeed keys is kept where it applies.
    """
    legal, illegal = [], defaultdict(list)
    for plain, stage in candidates(recipe, world):
        is_own = (plain.parallel.pipeline > 1) == (recipe.parallel.pipeline > 1) and stage == own
        candidate = replace(plain, zero=recipe.zero) if is_own else plain
        name = overrides(candidate.parallel, stage)
        pairs = refused_pairs(candidate, stage)
        # By kind, not once per size.
        broken = [f"{one} with {other}: {REFUSED[one, other]}" for one, other in pairs]
        broken = broken or problems(candidate, world, stage)
        if not broken:
            try:
                layout = solve(candidate, world, stage)
                legal.append((candidate, layout, state_gib(candidate, layout)))
            except UserError as error:
                broken = error.problems
        for problem in broken:
            illegal[problem].append(name)
    return sorted(legal, key=lambda entry: entry[2]), illegal


def state_gib(recipe: Recipe, layout: Layout) -> float:
    """GiB of training state on the most loaded rank. Raises UserError for a refused JSON."""
    parts = of_layout(recipe, layout, json_for(recipe, layout))
    return sum(parts.values()) * most_parameters(recipe.model, layout) / GIB


def text(
    recipe: Recipe,
    world: int,
    own: int,
    legal: list[tuple[Recipe, Layout, float]],
    illegal: dict[str, list[str]],
    most: int | None,
) -> list[str]:
    """The output for people, as lines."""
    rows = [_row(*entry) + [_mark(recipe, own, entry[1])] for entry in legal]
    shown = [row for number, row in enumerate(rows) if most is None or number < most or row[-1]]
    head = ["tensor", "context", "pipeline", "data", "zero", "accumulation", "state GiB/rank"]
    head += ["bubble", "GB sent per rank and step: tensor, context, pipeline", ""]
    lines = ["features that may be combined", table(combinations()), ""]
    lines += [
        f"{counted(len(legal), 'legal layout')} of {counted(world, 'rank')}, leanest state first"
    ]
    lines += [table([head, *shown])]
    if len(shown) < len(rows):
        lines += [f"  {len(rows) - len(shown)} more: ALL=1"]
    lines += ["", f"illegal: {len({name for names in illegal.values() for name in names})}"]
    for problem, names in by_rule(illegal).items():
        count = counted(len(names), "layout")
        lines += [
            f"  {problem}",
            f"    {count}: {'; '.join(names[:3])}{'; ...' * (len(names) > 3)}",
        ]
    return lines


def by_rule(illegal: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The first problem of each rule -> the layouts that break it, whatever the sizes."""
    rules: dict[str, tuple[str, dict[str, None]]] = {}
    for problem, names in illegal.items():
        _, broken = rules.setdefault(re.sub(r"[\d, ]+", "0", problem), (problem, {}))
        broken.update(dict.fromkeys(names))
    return {first: list(names) for first, names in rules.values()}


def combinations() -> list[list[str]]:
    """Rows of a table that shows which two features may be combined."""
    banned = {frozenset(pair) for pair in REFUSED}
    return [["", *FEATURES]] + [
        [one, *("-" if one == other or _both_stages(one, other) else
                "no" if frozenset((one, other)) in banned else "yes" for other in FEATURES)]
        for one in FEATURES
    ]  # fmt: skip


def _both_stages(one: str, other: str) -> bool:
    return one.startswith("zero") and other.startswith("zero")


def _row(recipe: Recipe, layout: Layout, gib: float) -> list[str]:
    micro_batches = layout.accumulation[-1][1]
    sent = [
        sum(tensor_bytes(recipe, layout, micro_batches).values()) // layout.pipeline,
        sum(context_bytes(recipe, layout, micro_batches).values()),
        2 * pipeline_bytes(recipe, layout, micro_batches) if layout.pipeline > 1 else 0,
    ]
    bubble = layout.bubble(micro_batches)
    return [
        *(str(getattr(layout, axis)) for axis in ("tensor", "context", "pipeline", "data")),
        str(layout.stage),
        str(micro_batches),
        f"{gib:.2f}",
        f"{bubble:.0%}" if layout.pipeline > 1 else "",
        ", ".join(f"{count / 1e9:,.1f}" for count in sent),
    ]


def _mark(recipe: Recipe, own: int, layout: Layout) -> str:
    axes = recipe.parallel
    asked = (axes.tensor, axes.context, axes.pipeline, own)
    is_own = asked == (layout.tensor, layout.context, layout.pipeline, layout.stage)
    return "<- the recipe's" if is_own else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
