"""Standard output and error of a process that outlives whoever reads them.

The one rule: what a closed terminal, a broken pipe or a full disk does not take is lost, and costs
neither the run nor its save nor its exit status. It holds for every print, also of libraries, of
tracebacks and of the interpreter's end, because it is done where the bytes leave.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys


class Lossy(io.FileIO):
    """A file that takes everything, and keeps what it can."""

    def write(self, data) -> int:
        """Write; all counts as written."""
        try:
            taken = super().write(data)
        except OSError:
            taken = None
        # None also where nobody reads and somebody (ssh does) made the file one that never waits.
        return memoryview(data).nbytes if taken is None else taken


def make_lossy() -> None:
    """Replace `sys.stdout` and `sys.stderr` of this process. One that was closed leads nowhere."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:
            number = os.open(os.devnull, os.O_WRONLY)
        else:
            number = old.fileno()
            with contextlib.suppress(OSError):
                old.flush()
        new = io.TextIOWrapper(
            io.BufferedWriter(Lossy(number, "w", closefd=False)),
            encoding=old.encoding if old else "utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, new)
