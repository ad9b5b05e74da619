"""The number of ranks of a run where nobody gave one: all GPUs of this machine.

Rule: a GPU that stays idle is reported. Where the recipe cannot use all GPUs, it gets as many as it
can use.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from base.command_line import Parser, add_overrides, arguments_of, carry_out
from base.errors import UserError
from base.exits import FINISHED
from base.values import counted
from data.stream.schedule import schedule_of
from launch.hosts import facts
from launch.hosts.place import add_place, planned_world
from recipes.schema import Recipe
from runtime.resolve import resolve

DEVICES = "CUDA_VISIBLE_DEVICES"


def answer_about_recipe(
    parser: Parser,
    arguments: Sequence[str],
    answer: Callable[[str, list[str], int | None, argparse.Namespace], str],
) -> int:
    """A command that describes a recipe on some ranks and starts nothing; returns the exit status.

    It takes the options of the place besides those of `parser`, and prints what `answer` gives for
    the recipe's name, the overrides, the number of ranks (None = not given) and all options.
    """
    add_place(parser)
    add_overrides(parser, "+", "recipe, then overrides")
    options = parser.parse_args(arguments)

    def act() -> int:
        name, *overrides = arguments_of(options)
        print(answer(name, overrides, planned_world(options), options))
        return FINISHED

    return carry_out(act)


def ranks_or_own(recipe: Recipe, given: int | None) -> int:
    """The ranks that are given; else one for each GPU here; else the fewest it can have."""
    return given or ranks_of_gpus(recipe) or recipe.parallel.model_ranks


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that ranks started here can use: those of this machine that `environ` shows.

    0 where there are none. Raises UserError where there are some that cannot be counted.
    """
    shown = environ.get(DEVICES)
    if shown is not None and not visible(shown):
        return 0
    found = facts.gpus()
    if "problem" in found:
        raise UserError(f"GPUs: {found['problem']}; give the number of ranks: NPROC=")
    return num_visible(found["cards"], shown)


def num_visible(cards: Sequence[Mapping[str, Any]], shown: str | None) -> int:
    """How many of the `cards` a process sees with CUDA_VISIBLE_DEVICES=`shown`; None = not set.

    CUDA reads the list up to the first entry that is no GPU of the machine.
    """
    if shown is None:
        return len(cards)
    count = 0
    for name in visible(shown) if cards else []:
        if name.isdecimal() and int(name) >= len(cards):
            break
        count += 1
    return count


def visible(shown: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES; -1 ends the list."""
    names = [name.strip() for name in shown.split(",")]
    ends = [n for n, name in enumerate(names) if not name or name.startswith("-")]
    return names[: ends[0]] if ends else names


def ranks_of_gpus(recipe: Recipe, count: Callable[[], int] = count_gpus) -> int:
    """The most ranks that a recipe can have with a GPU of this machine each; 0 without a GPU.

    Where it cannot run on any such number, the number of GPUs, so that the caller refuses it.
    """
    gpus = 0 if recipe.cluster.device == "cpu" else count()
    possible = (ranks for ranks in range(gpus, 0, -1) if not refused(recipe, ranks))
    return next(possible, gpus)


def refused(recipe: Recipe, ranks: int) -> str | None:
    """The first reason why a recipe cannot run on so many ranks; None where it can."""
    try:
        resolve(recipe, ranks, schedule_of(recipe))
    except UserError as error:
        return error.problems[0]
    return None


def idle_gpus(gpus: int, ranks: int, where: str = "", why: str | None = None) -> list[str]:
    """A line where GPUs of a host stay idle; `why` tells why the recipe does not use them all."""
    if not 0 < ranks < gpus:
        return []
    line = f"{where}{ranks} of {counted(gpus, 'GPU')} are used, {gpus - ranks} idle"
    return [f"{line}: {why}" if why else f"{line} (NPROC={gpus} uses all)"]
