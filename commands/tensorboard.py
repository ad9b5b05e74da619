"""`make tensorboard`: TensorBoard on all runs, or on one run or comparison.

Curves have short names (compare.tensorboard_names). The fast data loader of TensorBoard is off,
because it drops the descriptions and units of series.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.paths import ROOT
from compare.tensorboard_names import link, named, new_place

REFRESH_S = 5.0  # how soon a new run or segment appears


def main(arguments: list[str]) -> int:
    """Entry of `make tensorboard`; serves until it is interrupted; returns the exit status."""
    parser = Parser(prog="make tensorboard", description=__doc__)
    parser.add_argument("--run", default="", help="a run under runs/; without it all of them")
    parser.add_argument("--port", default="6006")
    options = parser.parse_args(arguments)
    runs = ROOT / "runs"
    folder = runs / options.run / "tensorboard"
    if options.run and not folder.is_dir():
        shown = folder.relative_to(ROOT)
        return refuse(UserError(f"RUN={options.run}: there is no folder {shown}"))
    place = new_place()
    try:
        runs.mkdir(exist_ok=True)
        link(place, named(runs, options.run))
        threading.Thread(target=refresh, args=(place, runs, options.run), daemon=True).start()
        return serve(place, options.port)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def refresh(place: Path, runs: Path, run: str) -> None:
    """Keep the links up to date, for ever."""
    pause = threading.Event()
    while not pause.wait(REFRESH_S):
        with contextlib.suppress(OSError):  # a run that was removed meanwhile
            link(place, named(runs, run))


def serve(folder: Path, port: str) -> int:
    """Run TensorBoard on `folder` in this process; returns its exit status."""
    from tensorboard import default, program

    server = program.TensorBoard(plugins=default.get_plugins())
    server.configure(["tensorboard", "--logdir", str(folder), "--port", port, "--load_fast=false"])
    with contextlib.suppress(KeyboardInterrupt):
        return server.main() or 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
