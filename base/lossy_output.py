"""Standard output and error of a process that outlives its reader.

Rule: output that a closed terminal, a broken pipe or a full disk refuses is lost, and the run goes
on: neither a save nor the exit status depends on it. This is done below the text layer, where the
bytes are written, so it holds for every print of libraries, tracebacks and the interpreter's end.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys


class Lossy(io.FileIO):
    """A file that accepts every write and drops what cannot be written."""

    def write(self, data) -> int:
        """Write what can be written; returns the full length."""
        try:
            taken = super().write(data)
        except OSError:
            taken = None
        # None also where nobody reads a file that another process (ssh does) made non-blocking.
        return memoryview(data).nbytes if taken is None else taken


def make_lossy() -> None:
    """Replace `sys.stdout` and `sys.stderr` of this process; a closed one writes to /dev/null."""
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
