"""Shows the output of many ranks to a person: rank 0 as it prints, then the first failure.

Rule: tracebacks wait until all ranks have ended, because most of them come from ranks that only
lost their connection. Then the first failure is shown, once; the rest is in the logs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from launch.ranks.outcome import RankEnd, exit_status, explain, first_failure

# What begins the end of a rank; its later error output waits.
LAST_WORDS = re.compile(
    r"Traceback \(most recent|refused: |failed on rank|interrupted; |\[rank\d+\]:"
)
INTERRUPTED = "interrupted; the same command goes on from the newest checkpoint"


class Screen:
    """Shows the output of the ranks. `line` may be called from any thread."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._held: dict[int, list[str]] = {}

    def line(self, rank: int, kind: str, text: str) -> None:
        """Take one line of output, with its end. `kind` is out or err."""
        if kind == "err" and (rank in self._held or LAST_WORDS.match(text)):
            self._held.setdefault(rank, []).append(text)
        elif rank == 0:
            _write(sys.stdout if kind == "out" else sys.stderr, text)

    def finish(self, ends: Sequence[RankEnd], stopped_by: int | None = None) -> int:
        """Print how the attempt ended; returns the exit status for the caller."""
        status = exit_status(ends, stopped_by)
        if stopped_by is not None:
            if status:
                _write(sys.stderr, INTERRUPTED + "\n")
            return status
        shown = explain(ends, self._num_ranks)
        if first_failure(ends) is None:
            shown = [line.rstrip("\n") for lines in self._held.values() for line in lines]
        for line in shown:
            _write(sys.stderr, line + "\n")
        return status


def _write(stream, text: str) -> None:
    stream.write(text)
    stream.flush()
