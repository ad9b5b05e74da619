"""`make rewind`: takes a run back to one of its checkpoints, and leaves out data steps from there
on.

    make rewind RUN=tiny STEP=80 SKIP="86:91 120:125" WHY="loss spike"
    make rewind RUN=tiny STEP=100 SEGMENT=0          go back to an abandoned checkpoint

SKIP gives steps as the console counts them, from 1, without the end of each range; the history
records the data steps that they trained on. EFFECT=advance (the default) goes on with the
next batch; EFFECT=no_update counts the step without training. Rule: it either reports all problems
at once and changes nothing, or it appends one line to history.jsonl. The next start of the run goes
on from there. Nothing is removed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from base.command_line import Parser, count_of, refuse
from base.errors import UserError
from base.exits import FINISHED
from base.paths import ROOT
from checkpoint.format.manifest import committed
from checkpoint.lineage import Line, lineage, read, run_folder
from checkpoint.load.choosing import verify
from checkpoint.save.lease import refuse_held
from data.stream.schedule import schedule_of
from data.stream.skips import Skips
from model.cost import num_parameters
from recipes.compose import compose
from record import history
from record.run_folder import hold, refuse_busy
from record.run_status import start_command
from runtime.resolve import attempt, length_in_steps


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.rewind RUN --step N ...`; returns the exit status."""
    parser = Parser(prog="make rewind", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", default="", help="checkpoint to go back to; 0 = the start")
    parser.add_argument("--skip", default="", help="ranges of steps first:end")
    parser.add_argument("--effect", default="", help="advance or no_update")
    parser.add_argument("--segment", default="", help="take the checkpoint of this segment")
    parser.add_argument("--why", default="", help="for the record")
    options = parser.parse_args(arguments)
    try:
        folder = run_folder(options.run, ROOT)
        refuse_busy(folder)
        lock = hold(folder)
        try:
            refuse_held(folder, lock.inode)  # another host may be training the run
            line = rewind(folder, options)
        finally:
            lock.close()
    except UserError as error:
        return refuse(error)
    print("\n".join(summary(folder, line)))
    return FINISHED


def rewind(folder: Path, options: argparse.Namespace) -> Line:
    """Check all arguments, then append the line. Raises UserError with all problems."""
    problems: list[str] = []
    step = attempt(problems, lambda: count_of("STEP", options.step))
    segment = None
    if options.segment:
        segment = attempt(problems, lambda: count_of("SEGMENT", options.segment))
    named = data_ranges(folder, read_ranges(options.skip, problems), segment)
    ranges = list(named)
    effect = options.effect or history.EFFECTS[0]
    if effect not in history.EFFECTS:
        problems.append(f"EFFECT={effect}: one of {', '.join(history.EFFECTS)}")
    if step is not None:
        problems += beyond_the_end(folder, named) + damage(folder, step, segment)
    if problems:
        raise UserError(*problems)
    line = history.rewind(
        folder, step, ranges, options.why, "operator", effect=effect, segment=segment, names=named
    )
    for (first, end), name in named.items():
        print(f"{name}: data steps {first} to {end - 1} are left out")
    return line


def read_ranges(text: str, problems: list[str]) -> list[history.Range]:
    """Parse `86:91 120:125` (separated by blanks or commas) as ranges of steps."""
    ranges = []
    for word in re.split(r"[\s,]+", text.strip()):
        found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", word, re.ASCII)
        if found and 1 <= int(found[1]) < int(found[2]):
            ranges.append((int(found[1]), int(found[2])))
        elif found:
            problems.append(f"SKIP={word}: a range has 1 <= first < end; step `end` is not in it")
        elif word:
            problems.append(
                f"SKIP={word}: write first:end in steps as the console counts them, such as"
                " SKIP=86:91 for the steps 86 to 90"
            )
    return ranges


def data_ranges(
    folder: Path, ranges: list[history.Range], segment: int | None
) -> dict[history.Range, str]:
    """The data steps that ranges of steps trained on, or will: data range -> how it was given.

    Steps are those of the run as it stands, or of the abandoned `segment`.
    """
    if not ranges:
        return {}
    data = compose(str(folder / "recipe.yaml")).recipe.data
    skips = Skips(history.data_with_skips(data, history.in_force(read(folder), segment)).skip)
    return {
        (skips.data_step(first), skips.data_step(end - 1) + 1): f"SKIP={first}:{end}"
        for first, end in ranges
    }


def beyond_the_end(folder: Path, ranges: Mapping[history.Range, str]) -> list[str]:
    """Return a problem for each range that the run never reaches."""
    recipe = compose(str(folder / "recipe.yaml")).recipe
    schedule = schedule_of(recipe)
    steps = length_in_steps(recipe, schedule, num_parameters(recipe.model))
    skips = Skips(history.data_with_skips(recipe.data, history.in_force(read(folder))).skip)
    last = skips.data_step(steps) + sum(end - first for first, end in ranges)
    return [
        f"{name} lies past the end: the {steps} steps of {folder.name} end before it"
        for (first, _), name in ranges.items()
        if first > last
    ]


def damage(folder: Path, step: int, segment: int | None) -> list[str]:
    """Read every byte of the checkpoint of `step` and return its problems; none where there is no
    such checkpoint.
    """
    found = dict(committed(folder / "checkpoints", lineage(read(folder), segment)))
    return verify(found[step], "full") if step in found else []


def summary(folder: Path, line: Line) -> list[str]:
    """Describe what was done and what comes next, for a person."""
    lines = read(folder)
    left = lineage(lines, line["segment"] - 1)
    return [
        f"{folder.name} goes back from segment {left.segment} to step {line['parent']['step']} of"
        f" segment {line['parent']['segment']}; segment {line['segment']} begins with step"
        f" {line['first_step']}",
        *history.describe(lines)[1:],
        "nothing was removed: the abandoned steps stay on record, and their checkpoints stay until"
        " the run has reached the same step again",
        f"go on with: {start_command(folder)}, or the command that started it",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
