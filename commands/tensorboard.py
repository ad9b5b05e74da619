"""`make tensorboard`: starts TensorBoard on all runs, or on one run or comparison."""

from __future__ import annotations

import os
import sys

from base.command_line import Parser, refuse
from base.errors import UserError
from base.paths import ROOT


def main(arguments: list[str]) -> int:
    """Replace this process by TensorBoard, or return the exit status of a refusal."""
    parser = Parser(prog="make tensorboard", description=__doc__)
    parser.add_argument("--run", default="", help="a run under runs/; without it all of them")
    parser.add_argument("--port", default="6006")
    options = parser.parse_args(arguments)
    folder = ROOT / "runs"
    if options.run:
        folder = folder / options.run / "tensorboard"
        if not folder.is_dir():
            shown = folder.relative_to(ROOT)
            return refuse(UserError(f"RUN={options.run}: there is no folder {shown}"))
    arguments = ["-m", "tensorboard.main", "--logdir", str(folder), "--port", options.port]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
