"""Measures how slow this machine is now. Time limits of tests are multiplied by the result.

    start of the suite -> two processes do fixed work at once -> PATIENCE -> all child processes

The limits in the tests are those of a machine with two idle cores. `PATIENCE=5 make test` sets the
factor without measuring. Rule: no test may depend on being fast; a limit only ends what hangs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

VARIABLE = "PATIENCE"
# Seconds of WORK on one of two idle cores (AMD EPYC, CPython 3.11).
IDLE_S = 0.7
WORK = """
import time
began, total = time.monotonic(), 0
for number in range(9_000_000):
    total += number * number % 7
print(time.monotonic() - began)
"""
SLOWER = 1.25  # a ratio below this is chance
MARGIN = 1.5  # the load may grow while the suite runs, and the suite itself adds to it
MOST = 30.0


def patience() -> float:
    """Factor for time limits, at least 1: from the environment, or measured and stored there."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = f"{factor(measured_s()):.1f}"
    return float(os.environ[VARIABLE])


def measured_s() -> float:
    """Wall seconds that WORK takes on each of two processes at once."""
    command = [sys.executable, "-c", WORK]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return statistics.mean(float(process.communicate()[0]) for process in both)


def factor(seconds: float) -> float:
    """Factor for time limits on a machine where WORK takes `seconds`."""
    ratio = seconds / IDLE_S
    return min(MOST, MARGIN * ratio) if ratio > SLOWER else 1.0
