"""Runs checks of benchmarks.gpu in a separate process; their names come on stdin, one a line.

    check(bench) -> rows, sent one by one, so that a check that is stopped keeps its rows

Rule: no failure of a check ends the worker; only the parent ends it. Answers are JSON lines on the
first stdout; output of libraries goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_bench import Bench, Row
from benchmarks.gpu_numbers import attention_kernels, parity
from benchmarks.gpu_speed import host_syncs, step_clock, utilisation, zero_stages
from runtime.process import process

CHECKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "parity": parity,
    "attention": attention_kernels,
    "clock": step_clock,
    "syncs": host_syncs,
    "zero": zero_stages,
    "mfu": utilisation,
}


def main(device_type: str) -> int:
    """Run the checks named on stdin; answers one JSON line for each row, then a last one."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench(device_type)

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    for line in sys.stdin:
        try:
            for row in CHECKS[line.strip()](bench):
                send({"row": asdict(row)})
            send({"done": True})
        except Exception as error:
            traceback.print_exc()
            send({"done": True, "error": f"{type(error).__name__}: {error}"})
    process.finish()
    return 0


if __name__ == "__main__":
    process.leave(main(*sys.argv[1:]))
