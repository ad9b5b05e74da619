"""Log files of ranks in a run's folder.

Rule: a refused run leaves no log. Lines wait in memory until the run has made its folder.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from pathlib import Path

MOST_WAITING = 10_000  # lines of one log that wait for the folder


class RunLogs:
    """Log files that are opened when the run has made its folder.

    The folder belongs to this run as soon as its file `mark` has been written anew.
    """

    def __init__(self, folder: Path | None, mark: str = "recipe.yaml"):
        self._folder, self._mark = folder, mark
        self._before = self._stamp()
        self._files: dict[str, object] = {}
        self._waiting: dict[str, deque[bytes]] = {}
        self._lock = threading.Lock()

    def path(self, name: str) -> str | None:
        """The path of the log `name`; None where it was never opened."""
        return str(self._folder / "logs" / name) if name in self._files else None

    def write(self, name: str, line: bytes) -> None:
        """Add a line to the log `name`; a full disk costs the log, not the run."""
        with self._lock:
            self._waiting.setdefault(name, deque(maxlen=MOST_WAITING)).append(line)
        self.flush(name)

    def flush(self, *names: str) -> None:
        """Write the lines that wait, of all logs or of some, if the folder is there."""
        with self._lock:
            for name in names or tuple(self._waiting):
                waiting = self._waiting.get(name)
                with contextlib.suppress(OSError):
                    if waiting and (file := self._files.get(name) or self._open(name)):
                        file.write(b"".join(waiting))
                        waiting.clear()

    def close(self) -> None:
        """Write what waits and close all files."""
        self.flush()
        for file in self._files.values():
            file.close()

    def _open(self, name: str):
        if self._folder is None or self._stamp() in (None, self._before):
            return None
        (self._folder / "logs").mkdir(exist_ok=True)
        self._files[name] = open(self._folder / "logs" / name, "ab", buffering=0)  # noqa: SIM115
        return self._files[name]

    def _stamp(self) -> tuple[int, int] | None:
        """Identity and time of the mark; None where there is none."""
        if self._folder is None:
            return None
        try:
            found = os.stat(self._folder / self._mark)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def log_name(rank: int) -> str:
    """File name of a rank's log; all attempts of a run append to it."""
    return f"rank-{rank:05d}.log"
