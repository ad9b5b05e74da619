"""`make crash`: kills a run at every moment of a save and checks that it ends unharmed.

    python -m benchmarks.crash [--find "async torn"] [--sample 100]

The moments are recorded in an uninterrupted run (tests/workers/crash.py): the points that the save
announces, and every call by which a rank opens, writes, syncs, renames or removes a file or waits
for the others. At each moment SIGKILL is sent to rank 0, rank 1, the last rank or all ranks; also
in the middle of a write; in the first save of a run and in one that removes an old checkpoint; in
synchronous and in asynchronous saves. Exit status 1 where a case fails.
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

from base.paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "workers"))

import torch
from crash import Case, cases, crash

SAVES = [(mode, step) for mode in ("sync", "async") for step in (2, 4)]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--find", default="", help="words that the description must have")
    parser.add_argument("--sample", type=int, help="number of cases, chosen at random")
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
    """Run all cases on all cores; returns the problems, and how often each step was resumed."""
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
    """Run one case in this worker's own folder; returns the step from which the run resumed."""
    own = folder / f"worker-{os.getpid()}"
    own.mkdir(exist_ok=True)
    return crash(own, case)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
