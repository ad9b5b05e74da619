"""`make plan`: which layout, will it fit, how long, how much - before a GPU is rented.

    python -m commands.plan --cluster h100 --nodes 128 [--json] -- 70b
    python -m commands.plan --nodes 4 --overrides "parallel.tensor=2 zero=2" -- 7b   # one layout
    python -m commands.plan --nodes 4 --versus "zero=3|parallel.tensor=2 zero=1" -- 7b

Without overrides of axes, ZeRO stage, micro-batch and recomputation all legal layouts are ranked
and the first is explained, with the command that runs it. With some of them given, only the others
are chosen. Starts nothing, needs no GPU and no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from base.command_line import Parser, add_overrides, arguments_of, refuse
from base.errors import UserError
from base.values import read_ranks
from plan.choose import AXES, FREE, compose_free, given_knobs, losers_of, tokens_of
from plan.drawings import draw_plan
from plan.explanation import explained, plain, report, versus
from plan.recipe_jobs import machine_for
from plan.search import Option, confirmed, search


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.plan`; returns the exit status."""
    parser = Parser(prog="make plan", description=__doc__)
    parser.add_argument("--cluster", default="", help="a file of recipes/cluster/")
    parser.add_argument("--nodes", default="", help="hosts")
    parser.add_argument("--world", default="", help="ranks, instead of hosts")
    parser.add_argument("--versus", default="", help="two sets of overrides with | between")
    parser.add_argument("--shown", default="10", help="rows of the ranking")
    parser.add_argument("--picture", default="", help="write an SVG picture to this file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_overrides(parser, "+", "recipe, then overrides")
    options = parser.parse_args(arguments)
    try:
        name, *overrides = arguments_of(options)
        overrides += [f"cluster={options.cluster}"] if options.cluster else []
        print("\n".join(answer(name, overrides, options)))
    except UserError as error:
        return refuse(error)
    return 0


def answer(name: str, overrides: list[str], options) -> list[str]:
    """The lines to print. Raises UserError."""
    recipe = compose_free(name, overrides).recipe
    machine, assumed = machine_for(recipe)
    world = ranks(options, recipe)
    if options.versus:
        sides = options.versus.split("|")
        if len(sides) != 2:
            raise UserError(
                f"VERSUS={options.versus!r}: give two sets of overrides with one | between them,"
                ' such as VERSUS="zero=3|parallel.tensor=2 zero=1"'
            )
        pair = [best_of(name, [*overrides, *side.split()], world) for side in sides]
        if options.json:
            sides = [plain(side, tokens_of(side.recipe)) for side in pair]
            return [json.dumps({"one": sides[0], "other": sides[1], "assumed": assumed})]
        return versus(*pair)
    fixed = given_knobs(overrides)
    free = [knob for knob in FREE if knob not in fixed]
    found = search(recipe, world, machine, free)
    winner = found.winner
    tokens = tokens_of(recipe)
    if winner is None:
        raise UserError(*nothing_fits(found, recipe, world))
    winner = confirmed(winner, world)
    if options.picture:
        draw_plan(winner, Path(options.picture))
    run = run_command(name, overrides, winner, world)
    if options.json:
        shown = [plain(option, tokens) for option in found.best[: int(options.shown)]]
        answer = {"winner": plain(winner, tokens), "options": shown, "assumed": assumed}
        counts = {"fit": len(found.best), "at_edge": len(found.edge), "illegal": found.illegal}
        return [json.dumps(answer | counts | losers_of(found, winner) | {"run": run})]
    if not free:
        return explained(winner, assumed, tokens)
    lines = report(found, winner, assumed, tokens, int(options.shown))
    return [*lines, "", "run it", f"  {run}"]


def run_command(name: str, overrides: list[str], winner: Option, world: int) -> str:
    """The command that trains the proposal."""
    machine = winner.machine
    hosts = -(-world // machine.gpus_per_node)
    place = f"NPROC={world}" if hosts == 1 else f"HOSTFILE=hosts NPROC={machine.gpus_per_node}"
    # The proposal names these itself.
    named = {*FREE, *(f"parallel.{axis}" for axis in AXES)}
    other = " ".join(word for word in overrides if word.partition("=")[0] not in named)
    return f'make pretrain RECIPE={name} {place} OVERRIDES="{f"{other} {winner.knobs}".strip()}"'


def best_of(name: str, overrides: list[str], world: int):
    """The best option under some overrides. Raises UserError where none fits."""
    recipe = compose_free(name, overrides).recipe
    machine, _ = machine_for(recipe)
    fixed = given_knobs(overrides)
    found = search(recipe, world, machine, [knob for knob in FREE if knob not in fixed])
    winner = found.winner or (found.large[0] if found.large else None)
    if winner is None:
        raise UserError(*nothing_fits(found, recipe, world))
    return winner


def ranks(options, recipe) -> int:
    """Ranks from NODES or WORLD; the fewest of the recipe without both."""
    if options.world:
        return read_ranks("WORLD", options.world)
    if options.nodes:
        return read_ranks("NODES", options.nodes) * recipe.cluster.gpus_per_node
    return recipe.parallel.model_ranks


def nothing_fits(found, recipe, world: int) -> list[str]:
    """Why there is no proposal, and what is nearest."""
    from base.units import GIB

    if found.large:
        least = found.large[0]
        if least.host_bytes > least.machine.usable_host_bytes:
            return [
                f"no layout of {world} ranks fits: the leanest needs"
                f" {least.host_bytes / GIB:.0f} GiB of a host's memory, of which"
                f" {least.machine.usable_host_bytes / GIB:.0f} GiB are usable ({least.knobs}); use"
                " more ranks, checkpoint.mode=sync, no offload, or set cluster.host_memory_gib"
            ]
        return [
            f"no layout of {world} ranks fits: the leanest needs {least.memory.peak / GIB:.1f} GiB"
            f" of {least.machine.memory_gib:g} GiB ({least.knobs}); use more ranks, a GPU with more"
            " memory, or a smaller micro_batch"
        ]
    rules = sorted(found.refused.items(), key=lambda item: -item[1])
    return [f"no layout of {world} ranks is legal", *(rule for rule, _ in rules[:3])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
