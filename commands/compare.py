"""`make compare`: run the variants of a recipe side by side, or put runs that exist side by side.

    python -m commands.compare --recipe tiny --nproc 2 --sweep "zero=1,2,3" --steps 20 [--repeats 3]
    python -m commands.compare --sweep "optim.lr=1e-3,2e-3" --steps 200 --rank val_loss --seeds 3
    python -m commands.compare --runs "a b c"

Rule: nothing starts before all variants have been checked; all problems are reported at once. The
same command continues an interrupted comparison.

Exit status: 0 the report is written; 1 no variant finished, or losses that must agree do not; 93
refused; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from base.command_line import Parser, add_overrides, arguments_of, refuse
from base.errors import UserError
from base.values import counted
from compare import pictures, runner, tensorboard_pages
from compare.folder import (
    RUNS,
    loads,
    open_comparison,
    reasons,
    refuse_another,
    refuse_strangers,
)
from compare.ranking import LEARNED, RANKS, SPEED
from compare.report import Comparison, markdown, terminal
from compare.results import Side, read_run
from compare.variants import (
    FEWEST_STEPS,
    MOST_REPEATS,
    MOST_STEPS,
    ComparisonPlan,
    checked_name,
    plan,
    read_count,
)
from data.stream.schedule import schedule_of
from launch.hosts.own_gpus import count_gpus
from launch.hosts.place import add_place, place_variables, planned_world
from record.records import notes
from runtime.resolve import resolve

FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog="make compare", description=__doc__)
    parser.add_argument("--name", help="folder of the report under runs/")
    parser.add_argument("--runs", help="names of runs that exist")
    parser.add_argument("--recipe", default="tiny")
    add_place(parser)
    parser.add_argument("--sweep", default="", help="knob=value,value ...")
    parser.add_argument("--steps", default="20")
    parser.add_argument("--repeats", help="rounds; default 3, or 1 where runs are ranked by loss")
    parser.add_argument("--rank", default=SPEED, help=" or ".join(RANKS))
    parser.add_argument("--seeds", help="rounds, each with another seed")
    add_overrides(parser, "*", "overrides of every variant")
    options = parser.parse_args(arguments)
    try:
        options.arguments = arguments_of(options)
        if options.rank not in RANKS:
            raise UserError(f"RANK={options.rank}: give one of {', '.join(RANKS)}")
        if options.runs is not None:
            return compare_runs(options)
        return compare_variants(options)
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a folder that this user may not write, a full disk
        print(f"failed: {error}", file=sys.stderr)
        return FAILED


def compare_variants(options: argparse.Namespace) -> int:
    """Run a sweep and write its report; returns the exit status."""
    # Check everything, then enter the folder.
    wanted = read_plan(options)
    folder = RUNS / wanted.name
    refuse_another(folder, wanted.as_dict())
    refuse_strangers(folder, wanted.by_round())
    print(announcement(wanted), flush=True)
    runner.check(wanted)
    lock = open_comparison(folder, wanted.as_dict())
    # Train.
    try:
        runner.run_all(wanted, folder)
    except KeyboardInterrupt:
        print("interrupted; the same command continues with this run", file=sys.stderr)
        return INTERRUPTED
    # Read the records of the runs and report.
    failures = reasons(folder)
    sides = [Side(variant.label) for variant in wanted.variants]
    for turn in wanted.turns():
        side = sides[wanted.variants.index(turn.variant)]
        if runner.is_finished(RUNS / turn.run, wanted.steps):
            side.runs.append(read_run(RUNS / turn.run, turn.round))
        elif turn.run in failures:
            side.reason = failures[turn.run]
    shown = Comparison(
        wanted.name, shown_command(wanted), sides, True, loads=loads(folder), rank=wanted.rank
    )
    status = report(shown, folder)
    lock.close()
    return status


def read_plan(options: argparse.Namespace) -> ComparisonPlan:
    """Plan the comparison of a command line. Raises UserError with all problems."""
    problems: list[str] = []

    def attempt(read, *given):
        try:
            return read(*given)
        except (UserError, ValueError) as error:
            problems.extend(getattr(error, "problems", [str(error)]))
            return 0

    ranks = attempt(planned_world, options) or max(1, attempt(count_gpus))
    steps = attempt(read_count, "STEPS", options.steps, FEWEST_STEPS, MOST_STEPS)
    if options.seeds and options.repeats:
        problems.append("SEEDS and REPEATS both set the rounds; keep one of them")
    rounds = options.repeats or ("1" if options.rank in LEARNED else "3")
    variable, rounds = ("SEEDS", options.seeds) if options.seeds else ("REPEATS", rounds)
    repeats = attempt(read_count, variable, rounds, 1, MOST_REPEATS)
    sweep = attempt(shlex.split, options.sweep)

    def resolved(recipe):
        return resolve(recipe, ranks, schedule_of(recipe))

    if problems:
        raise UserError(*problems)
    return plan(
        options.name, options.recipe, ranks, options.arguments, sweep, steps, repeats, resolved,
        options.rank, bool(options.seeds), place_variables(options),
    )  # fmt: skip


def announcement(wanted: ComparisonPlan) -> str:
    """Text on what will be checked and run."""
    runs, ranks = len(wanted.turns()), wanted.ranks
    labels = "; ".join(variant.label for variant in wanted.variants)
    rounds = counted(wanted.repeats, "round" if wanted.first_seed is None else "seed")
    return (
        f"{wanted.name}: {counted(len(wanted.variants), 'variant')} x {rounds} ="
        f" {counted(runs, 'run')} of {counted(wanted.steps, 'step')} on"
        f" {counted(ranks, 'rank')}\n{labels}"
    )


def shown_command(wanted: ComparisonPlan) -> str:
    """Command that makes this comparison, for the report."""
    ranks = f"{'WORLD' if wanted.place else 'NPROC'}={wanted.ranks}"
    variables = [ranks, *map(shlex.quote, wanted.place)]
    parts = [
        f"make compare RECIPE={wanted.recipe} {' '.join(variables)}",
        f'SWEEP="{" ".join(wanted.sweep)}" STEPS={wanted.steps}',
        f"{'REPEATS' if wanted.first_seed is None else 'SEEDS'}={wanted.repeats}",
    ]
    if wanted.rank != SPEED:
        parts.append(f"RANK={wanted.rank}")
    if wanted.overrides:
        parts.append(f'OVERRIDES="{" ".join(wanted.overrides)}"')
    return " ".join([*parts, f"NAME={wanted.name}"])


def compare_runs(options: argparse.Namespace) -> int:
    """Write a report of runs that exist; returns the exit status."""
    names = options.runs.split()
    problems = [
        f"RUNS: {name} is given twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if options.sweep:
        problems.append("RUNS takes runs that exist, SWEEP makes new ones; give one of the two")
    if len(names) < 2:
        problems.append(
            f'RUNS="{options.runs}" names {counted(len(names), "run")}; give two or more'
        )
    read = []
    for name in dict.fromkeys(names):
        try:
            read.append(read_run(RUNS / name))
            print(*(f"{line}\n" for line in notes(RUNS / name)), sep="", end="", file=sys.stderr)
        except UserError as error:
            problems += [f"RUNS: {line}" for line in error.problems]
    if problems:
        raise UserError(*problems)
    name = checked_name(options.name or "-vs-".join(names), 1)
    wanted = {"kind": "runs", "runs": names}
    folder = RUNS / name
    lock = open_comparison(folder, wanted)
    sides = [Side(run.name, [run]) for run in read]
    command = f'make compare RUNS="{" ".join(names)}" NAME={name}'
    if options.rank != SPEED:
        command += f" RANK={options.rank}"
    status = report(Comparison(name, command, sides, False, rank=options.rank), folder)
    lock.close()
    return status


def report(shown: Comparison, folder: Path) -> int:
    """Write report, pictures and TensorBoard files, print the table; returns the exit status."""
    if not shown.runs:
        for side in shown.sides:
            print(f"{side.label}: {side.reason}", file=sys.stderr)
        print(f"no variant finished; their output is in runs/{shown.name}/logs/", file=sys.stderr)
        return FAILED
    names = pictures.draw(shown, folder)
    shown = dataclasses.replace(shown, pictures=names)
    (folder / "report.md").write_text(markdown(shown), encoding="utf-8")
    tensorboard_pages.write(shown, folder)
    print(f"\n{terminal(shown)}")
    print(f"report in runs/{shown.name}/report.md; charts: make tensorboard RUN={shown.name}")
    result = shown.agreement()
    return FAILED if result and result.is_broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
