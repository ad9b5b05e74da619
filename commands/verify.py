"""`make verify RUN=`: read every byte of checkpoints and compare digests.

    make verify RUN=tiny            those of the current lineage, which a start could go on from
    make verify RUN=tiny ALL=1      also abandoned ones, and those that were set aside as damaged

Rule: it changes nothing. The exit status is 0 when all checkpoints are whole, 1 when one is damaged
(those set aside do not count, because they are known to be damaged), 93 when there is nothing to
verify.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from base.units import MIB
from checkpoint.format.manifest import all_committed, run_with_checkpoints
from checkpoint.lineage import lineage_of
from checkpoint.load.choosing import ASIDE, DEPTHS, unnamed, verify


def main(arguments: list[str]) -> int:
    """Verify, and print one line per checkpoint and problem; returns the exit status."""
    parser = Parser(prog="make verify", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", type=int, help="only this step; default: all")
    parser.add_argument("--all", action="store_true", help="also abandoned and set aside ones")
    parser.add_argument("--depth", choices=DEPTHS, default="full")
    options = parser.parse_args(arguments)
    try:
        found = list(chosen(options))
    except UserError as error:
        return refuse(error)
    is_whole = True
    for name, folder, is_aside in found:
        began = time.perf_counter()
        problems = verify(folder, options.depth)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        seconds = time.perf_counter() - began
        verdict = "damaged" if problems else "whole"
        print(f"{name}: {verdict}; {size / MIB:.1f} MiB, depth {options.depth}, {seconds:.2f} s")
        for problem in problems:
            print(f"  {problem.kind}: {problem}")
        if not problems and (extra := unnamed(folder)):
            print(f"  note: files that do not belong to the checkpoint: {', '.join(extra)}")
        is_whole = is_whole and (is_aside or not problems)
    return FINISHED if is_whole else FAILED


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Path, bool]]:
    """Give (name, folder, whether it was set aside) of the chosen checkpoints, by step. Raises
    UserError where there is none, or the run's history is damaged.
    """
    run = run_with_checkpoints(options.run)
    current, is_none = lineage_of(run), True
    places = [(*place, False) for place in all_committed(run / "checkpoints")]
    if options.all:
        places = sorted([*places, *((*place, True) for place in set_aside(run / "checkpoints"))])
    for step, segment, folder, is_aside in places:
        is_ours = current.holds(segment, step)
        if options.step not in (None, step) or not (is_ours or options.all):
            continue
        is_none = False
        name = f"step {step}" + (f" of segment {segment}" if segment else "")
        state = "" if is_ours else " (abandoned)"
        yield name + (f" (set aside, {folder.name})" if is_aside else state), folder, is_aside
    if is_none:
        step = "" if options.step is None else f" of step {options.step}"
        rest = "" if options.all else "; ALL=1 also looks at abandoned ones"
        raise UserError(f"RUN={options.run}: there is no checkpoint{step} to verify{rest}")


def set_aside(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """List (step, segment, folder) of damaged checkpoints that a start has renamed and kept."""
    matches = [(ASIDE.fullmatch(path.name), path) for path in checkpoints.iterdir()]
    return [
        (int(match[1]), int(match[2] or 0), path)
        for match, path in matches
        if match and path.is_dir() and not path.is_symlink()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
