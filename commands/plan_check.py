"""`make plan-check`: the planner's predictions against published runs.

    python -m commands.plan_check                      # ours, each family predicted without itself
    python -m commands.plan_check --rows other.csv     # other published runs in the same columns
    python -m commands.plan_check --runs "a b"         # runs of this site, under runs/

Needs no network, no GPU and no torch. PICTURE=file.svg draws predicted against measured;
CURVES=file.svg draws the scaling of 7b and 70b.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from base.command_line import Parser, carry_out
from base.errors import UserError
from base.paths import ROOT
from plan.constants import FITTED, Constants
from plan.drawings import draw_scatter
from plan.scaling import draw_scaling
from plan.validation import validation_report

RUNS = ROOT / "runs"


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.plan_check`; returns the exit status."""
    parser = Parser(prog="make plan-check", description=__doc__)
    parser.add_argument("--rows", default="", help="a CSV file with the columns of our own")
    parser.add_argument("--runs", default="", help="names of runs under runs/")
    parser.add_argument("--picture", default="", help="write an SVG picture to this file")
    parser.add_argument("--curves", default="", help="write the scaling of 7b and 70b to this file")
    options = parser.parse_args(arguments)

    def act() -> int:
        if options.curves:
            draw_scaling(Path(options.curves))
            return 0
        if options.rows and options.runs:
            raise UserError("ROWS and RUNS are two tables; give one of them")
        folders = [RUNS / name for name in dict.fromkeys(options.runs.split())]
        rows = Path(options.rows) if options.rows else None
        lines, tests = validation_report(rows, folders=folders)
        print("\n".join([*lines, *constant_lines()]))
        if options.picture and tests:
            draw_scatter(tests, Path(options.picture))
        return 0

    return carry_out(act)


def constant_lines() -> list[str]:
    """How many constants there are, and which are fitted."""
    fields = Constants.__dataclass_fields__
    return [
        f"{len(fields)} constants, {len(FITTED)} of them fitted ({', '.join(FITTED)});"
        " value, unit, range and reason of each: plan/constants.py"
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
