"""The lock of a build: one process builds a corpus, the others wait and know for whom.

    .<name>.lock    {"pid": 4711, "host": "node3", "since": 1790000000.0}; its time of change is the
                    holder's last sign of life

Rule: the lock belongs to an open file, so it ends with its process in any case. The holder removes
the file while it still holds the lock. Who gets a lock therefore checks that the file is still the
one at the path, and starts again where it is not.

Units: seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from base.errors import UserError
from base.units import duration

POLL_S = 0.2
LOG_EVERY_S = 60.0
SILENT_S = 600.0  # a built-in corpus reports every few seconds while it is built


@contextmanager
def locked(
    path: Path, log: Callable[[str], None], silent_s: float | None = None
) -> Iterator[Callable[[], None]]:
    """Hold the lock of a build; yields a function that gives a sign of life to those who wait.

    While another process holds it, log that process, again every minute. silent_s: raise UserError
    where it has given no sign of life for so long; None = wait as long as it takes.
    """
    file = _acquire(path, log, silent_s)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        file.truncate(0)
        file.write(json.dumps(holder))
        file.flush()
        yield lambda: os.utime(file.fileno())
    finally:
        with suppress(OSError):  # another user's file in a folder of all: it stays
            path.unlink()
        file.close()


def _acquire(path: Path, log: Callable[[str], None], silent_s: float | None) -> TextIO:
    shown = -LOG_EVERY_S
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed by the caller
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
            file.close()  # the holder has removed it since
            continue
        except BlockingIOError:
            pass
        except BaseException:
            file.close()
            raise
        silent = time.time() - os.fstat(file.fileno()).st_mtime
        holder = _described(file)
        file.close()
        if silent_s is not None and silent > silent_s:
            raise UserError(
                f"{path}: held by {holder}, which has reported nothing for"
                f" {duration(silent)}; end that process, which frees the lock, and start again"
            )
        if time.monotonic() - shown >= LOG_EVERY_S:
            shown = time.monotonic()
            log(
                f"another process is building it; waiting for {holder} (its lock is {path}); if"
                " that process hangs, end it: the lock goes with it"
            )
        time.sleep(POLL_S)


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _described(file: TextIO) -> str:
    """The holder of a lock, for a person: process, host, since when, and whether it is stopped."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        pid, host, since = int(found["pid"]), str(found["host"]), float(found["since"])
    except (ValueError, KeyError, TypeError):
        return "a process that has not said who it is"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    stopped = ", a stopped process" if host == socket.gethostname() and _is_stopped(pid) else ""
    return f"pid {pid} on {host}{stopped}, since {at} ({duration(max(0.0, time.time() - since))})"


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
