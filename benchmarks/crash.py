"""`make crash`: SIGKILL at every moment of a save; the run must end as if nothing had happened.

    python -m benchmarks.crash [--find "async torn"] [--sample 100]

Moments are recorded in a run that nothing stops (tests/crash.py): what the save announces, and
every call by which a rank opens, writes, syncs, renames or removes a file or waits for the others.
Each is met again x rank 0, 1, last or all at once, x in the middle of a write, x a run's first save
and one that removes an old checkpoint, x saves in the step and beside it. Exit status 1 where one
fails.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "workers"))

import torch  # noqa: E402
from crash import Case, cases, crash  # noqa: E402

SAVES = [(mode, step) for mode in ("sync", "async") for step in (2, 4)]


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m benchmarks.crash`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--find", default="", help="only cases whose description has these words")
    parser.add_argument("--sample", type=int, help="so many cases, chosen by chance")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the ranks are forked
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="crash-") as name:
        folder = Path(name)
        found = [case for save in SAVES for case in cases(folder, *save)]
        words = set(options.find.split())
        chosen = [case for case in found if words <= set(re.findall(r"\w+", str(case)))]
        if options.sample is not None and options.sample < len(chosen):
            chosen = random.sample(chosen, options.sample)
        began = time.monotonic()
        problems, outcomes = run(chosen, folder)
        seconds = time.monotonic() - began
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    kinds = collections.Counter((case.mode, case.how) for case in chosen)
    print(", ".join(f"{mode} {how}: {count}" for (mode, how), count in sorted(kinds.items())))
    went_on = ", ".join(f"step {step} {count} times" for step, count in sorted(outcomes.items()))
    print(
        f"{len(chosen) - len(problems)} of {len(chosen)} kills left a run that ends as if nothing"
        f" had happened ({len(found)} moments enumerated, {seconds:.0f} s); went on from {went_on}"
    )
    return int(bool(problems) or not chosen)


def run(chosen: Sequence[Case], folder: Path) -> tuple[list[str], collections.Counter]:
    """(problems, how often each step was gone on from) of all cases, on all cores."""
    problems, outcomes = [], collections.Counter()
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
        waiting = {pool.submit(one, case, folder): case for case in chosen}
        for number, done in enumerate(concurrent.futures.as_completed(waiting), start=1):
            if done.exception():
                problems.append(f"{waiting[done]}: {done.exception()}")
            else:
                outcomes[done.result()] += 1
            if number % 50 == 0:
                print(f"{number} of {len(chosen)}, {len(problems)} failed", flush=True)
    return problems, outcomes


def one(case: Case, folder: Path) -> int:
    """A case in a folder of this worker's own; the step that the run went on from."""
    own = folder / f"worker-{os.getpid()}"
    own.mkdir(exist_ok=True)
    return crash(own, case)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
