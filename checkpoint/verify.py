"""`python -m checkpoint.verify RUN [--step N]`: read every byte of checkpoints and compare digests.

Exit code 0 when all is whole, 1 when something is damaged, 2 when there is nothing to verify.
"""

from __future__ import annotations

import argparse
import sys
import time

from checkpoint.choose import DEPTHS, unnamed, verify
from checkpoint.manifest import committed, folder_with_checkpoints
from recipes.schema import UserError


def main(arguments: list[str]) -> int:
    """Verify and say so, one line per checkpoint and problem; exit code."""
    parser = argparse.ArgumentParser(prog="checkpoint.verify", description="check checkpoints")
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", type=int, help="only this step; without it all")
    parser.add_argument("--depth", choices=DEPTHS, default="full")
    options = parser.parse_args(arguments)
    run = folder_with_checkpoints(options.run)
    try:
        found = [] if run is None else committed(run / "checkpoints")
    except UserError as error:  # the run's history is damaged
        print(f"refused: {error}", file=sys.stderr)
        return 2
    if options.step is not None:
        found = [(step, folder) for step, folder in found if step == options.step]
    if not found:
        what = "checkpoint" if options.step is None else f"checkpoint of step {options.step}"
        print(f"{options.run}: no {what} to verify", file=sys.stderr)
        return 2
    is_whole = True
    for step, folder in found:
        began = time.perf_counter()
        problems = verify(folder, options.depth)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        seconds = time.perf_counter() - began
        verdict = "damaged" if problems else "whole"
        print(
            f"step {step}: {verdict}; {size / 2**20:.1f} MiB, depth {options.depth},"
            f" {seconds:.2f} s"
        )
        for problem in problems:
            print(f"  {problem.kind}: {problem}")
        if not problems and (extra := unnamed(folder)):
            print(f"  note: files that are none of the checkpoint's: {', '.join(extra)}")
        is_whole = is_whole and not problems
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
