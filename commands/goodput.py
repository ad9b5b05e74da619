"""`make goodput`: useful and lost seconds of a run, and the best checkpoint.interval for it.

Imports no torch.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from base.command_line import Parser, carry_out
from base.errors import UserError
from base.exits import FINISHED
from base.table import table
from base.values import as_float
from checkpoint.lineage import run_folder
from record import goodput
from record.records import notes


def main(arguments: list[str]) -> int:
    """Entry of `make goodput`; returns the exit status."""
    parser = Parser(prog="make goodput", description=__doc__)
    parser.add_argument("run", help="name of a run under runs/, or its folder")
    parser.add_argument("--mtbf", default="", help="hours between two failures")
    options = parser.parse_args(arguments)
    return carry_out(lambda: show(run_folder(options.run, Path()), options.mtbf))


def show(folder: Path, mtbf: str) -> int:
    """Print the account of the run's time. Raises UserError where no attempt is on record."""
    mtbf_s = hours("MTBF", mtbf) if mtbf else None
    attempts = goodput.read_attempts(folder)
    if not attempts:
        raise UserError(f"RUN={folder.name}: no attempt is on record yet")
    interval = goodput.interval_of(folder)
    for head, rows in (
        goodput.report(folder.name, attempts),
        goodput.advice(attempts, mtbf_s, interval),
    ):
        print(head)
        if rows:
            print(table(rows))
    print(*(f"{line}\n" for line in notes(folder, math.inf)), sep="", end="")
    return FINISHED


def hours(variable: str, text: str) -> float:
    """Seconds of a text: a number of hours, or a number with s, min, h or d. Raises UserError."""
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    unit = next((unit for unit in ("min", "s", "h", "d") if text.endswith(unit)), "")
    try:
        seconds = as_float(text.removesuffix(unit).strip()) * sizes[unit or "h"]
    except ValueError as problem:
        raise UserError(f"{variable}={text} {problem}; give hours, or 90min, 2.8h, 3d") from None
    if seconds <= 0:
        raise UserError(f"{variable}={text} is not above 0; give hours between two failures")
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
