"""`make runs`: all runs under runs/, one line each, the one that was active last at the end.

Imports no torch. Units: seconds, steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from base.command_line import Parser, carry_out
from base.errors import UserError
from base.exits import FINISHED
from base.table import table
from base.units import duration
from checkpoint.lineage import MARK
from record.run_status import RunStatus, status_of
from runtime.log.console import number

HEAD = ["run", "state", "step", "loss", "val loss", "checkpoint", "last active"]


def main(arguments: list[str]) -> int:
    """Entry of `make runs`; returns the exit status."""
    parser = Parser(prog="make runs", description=__doc__)
    parser.parse_args(arguments)
    return carry_out(lambda: show(Path("runs")))


def show(runs: Path) -> int:
    """Print a table of all runs in the folder `runs`; returns the exit status."""
    rows, damaged = [], []
    for mark in sorted(path for path in runs.glob(f"*/{MARK}") if path.is_file()):
        try:
            found = status_of(mark.parent)
            rows.append((found.active_s, row(found)))
        except (UserError, OSError) as error:
            damaged.append(f"{mark.parent.name} cannot be read: {error}")
    if rows:
        print(table([HEAD, *(cells for _, cells in sorted(rows))], indent=""))
    elif not damaged:
        print("there is no run under runs/ yet; make pretrain starts one")
    print("".join(f"{line}\n" for line in damaged), end="")
    return FINISHED


def row(state: RunStatus) -> list[str]:
    """The cells of one run."""
    of = f"/{state.total_steps}" if state.total_steps else ""
    last = state.lines[-1] if state.lines else None
    val = ""
    if state.evaluated:
        step, loss = state.evaluated
        val = number(loss, ".4f") + (f" (step {step})" if step != state.step else "")
    return [
        state.folder.name,
        state.word,
        f"{state.step}{of}",
        number(last["loss"], ".4f") if last else "",
        val,
        f"step {state.saved[0]}" if state.saved else "none",
        f"{duration(max(0.0, time.time() - state.active_s))} ago",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
