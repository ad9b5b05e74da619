"""`make branch`: makes a new run that goes on from a checkpoint of another, without copying its
data.

    make branch RUN=tiny STEP=80 TO=tiny-b OVERRIDES="optim.lr=1e-4" WHY="lower rate"

The new folder holds links to the checkpoint's files, and copies of the record up to that step
(runtime/branching.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from base.command_line import Parser, add_overrides, arguments_of, count_of, refuse
from base.errors import UserError
from base.exits import FINISHED
from base.paths import ROOT
from checkpoint.lineage import run_folder
from record import history
from record.run_status import start_command
from runtime.branching import branched, link, make_run, name_problems, whole_checkpoint
from runtime.resolve import attempt


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.branch RUN --step N --to NAME`; returns the exit status."""
    parser = Parser(prog="make branch", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", default="", help="checkpoint to go on from")
    parser.add_argument("--segment", default="", help="take the checkpoint of this segment")
    parser.add_argument("--to", default="", help="name of the new run")
    parser.add_argument("--why", default="", help="for the record")
    add_overrides(parser, "*", "overrides of the new run")
    options = parser.parse_args(arguments)
    try:
        parent = run_folder(options.run, ROOT)
        target, checkpoint = find(parent, options)
        overrides = arguments_of(options)
        recipe, changes = branched(parent, target, checkpoint, options.to, overrides)

        def put(checkpoints: Path) -> None:
            link(checkpoint, checkpoints / checkpoint.name)

        make_run(parent, target, put, recipe, changes, {"why": options.why})
    except UserError as error:
        return refuse(error)
    print(
        f"runs/{recipe.run} goes on from step {target.step} of {parent.name} (segment"
        f" {target.segment}); its checkpoint is linked, not copied"
    )
    for change in changes:
        print(
            f"changed from step {target.step + 1} on: {change.key} {change.stored} -> {change.now}"
        )
    print(f"start it with: {start_command(ROOT / 'runs' / recipe.run, parent)}")
    return FINISHED


def find(parent: Path, options: argparse.Namespace) -> tuple[history.Target, Path]:
    """Find the checkpoint to go on from, and read every byte of it. Raises UserError."""
    problems: list[str] = []
    step = attempt(problems, lambda: count_of("STEP", options.step, least=1))
    segment = None
    if options.segment:
        segment = attempt(problems, lambda: count_of("SEGMENT", options.segment))
    problems += name_problems(options.to)
    if problems:
        raise UserError(*problems)
    return whole_checkpoint(parent, step, segment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
