"""`make merge`: averages checkpoints of a run, as a new run that exports, evaluates and trains on.

    make merge RUN=tiny STEPS=160:200:20 TO=tiny-merged          160, 180, 200, in equal parts
    make merge RUN=tiny STEPS=160,200 DECAY=0.8 TO=tiny-merged   each older one counts 0.8 as much

The new run stands at the newest of the steps, with the averages of weights and of optimizer states
(checkpoint/merging.py). Its record holds the parent's lines up to that step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from base.command_line import Parser, add_overrides, arguments_of, count_of, refuse
from base.errors import UserError
from base.exits import FINISHED
from base.paths import ROOT
from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import read_manifest
from checkpoint.lineage import run_folder
from checkpoint.load.choosing import Found
from record.run_status import start_command
from runtime.branching import branched, make_run, name_problems, whole_checkpoint
from runtime.resolve import attempt

MOST = 1000  # checkpoints of one average


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.merge RUN --steps A:B:C --to NAME`; returns the exit status."""
    parser = Parser(prog="make merge", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--steps", default="", help="first:last:every, or a list: 160,180,200")
    parser.add_argument("--decay", default="", help="share of a checkpoint in that of the next one")
    parser.add_argument("--to", default="", help="name of the new run")
    parser.add_argument("--why", default="", help="for the record")
    add_overrides(parser, "*", "overrides of the new run")
    options = parser.parse_args(arguments)
    try:
        parent = run_folder(options.run, ROOT)
        problems: list[str] = []
        steps = attempt(problems, lambda: read_steps(options.steps))
        decay = attempt(problems, lambda: read_decay(options.decay))
        problems += name_problems(options.to)
        if problems:
            raise UserError(*problems)
        merge(parent, steps, decay, options.to, arguments_of(options), options.why)
    except UserError as error:
        return refuse(error)
    return FINISHED


def read_steps(text: str) -> list[int]:
    """The steps of STEPS, ascending: first:last:every, or a list. Raises UserError."""
    if not text:
        raise UserError("STEPS=: name the checkpoints to average, such as STEPS=160:200:20")
    if ":" in text:
        fields = text.split(":")
        if len(fields) != 3:
            raise UserError(f"STEPS={text}: give first:last:every, such as STEPS=160:200:20")
        first, last, every = (count_of("STEPS", field, least=1) for field in fields)
        if first > last:
            raise UserError(f"STEPS={text}: its first step is behind its last one")
        steps = range(first, last + 1, every)
        if steps[-1] != last:
            raise UserError(
                f"STEPS={text}: {last} is not among {first}, {first + every}, ...;"
                f" end at {steps[-1]}, or at {steps[-1] + every}"
            )
    else:
        steps = sorted(count_of("STEPS", field, least=1) for field in text.split(","))
    if len(steps) > MOST:
        raise UserError(f"STEPS={text}: {len(steps):,} checkpoints; at most {MOST:,} are averaged")
    return list(steps)


def read_decay(text: str) -> float:
    """The number of DECAY, 1 where none is given. Raises UserError."""
    try:
        decay = float(text or 1)
    except ValueError:
        decay = math.nan
    if not 0 < decay <= 1:
        raise UserError(f"DECAY={text} is not a number above 0 and at most 1")
    return decay


def merge(
    parent: Path, steps: Sequence[int], decay: float, to: str, overrides: Sequence[str], why: str
) -> None:
    """Average the checkpoints of `steps` into the new run `to`. Raises UserError."""
    found, problems = [], []
    for step in steps:
        one = attempt(problems, lambda step=step: whole_checkpoint(parent, step, None))
        found.append(one)
    if problems:
        raise UserError(*problems)
    target, newest = found[-1]
    recipe, changes = branched(parent, target, newest, to, overrides)
    shares = [decay ** (len(found) - 1 - number) for number in range(len(found))]

    def put(checkpoints: Path) -> None:
        from checkpoint.load.restoring import open_checkpoint  # torch: only when nothing is wrong
        from checkpoint.merging import average

        try:
            readers = [
                open_checkpoint(Found(one.step, path, read_manifest(path))) for one, path in found
            ]
            average(list(zip(readers, shares, strict=True)), checkpoints / newest.name)
        except Damaged as damage:
            raise UserError(*damage.problems) from None

    facts = {"why": why, "merged": {"steps": list(steps), "decay": decay}}
    make_run(parent, target, put, recipe, changes, facts)
    print(
        f"runs/{to} stands at step {target.step} with the average of steps"
        f" {', '.join(map(str, steps))} of {parent.name}"
    )
    for change in changes:
        print(
            f"changed from step {target.step + 1} on: {change.key} {change.stored} -> {change.now}"
        )
    print(f"start it with: {start_command(ROOT / 'runs' / to, parent)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
