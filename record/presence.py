"""Whether a run lives now, what its first rank is doing, and whether a launcher looks after it.

The one rule: a run lives where somebody holds its lock; where locks do not reach another host, a
recent sign of life counts. A launcher holds another one, also while no rank lives: before the first
and between two attempts. For the commands that look at a run from outside; imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

from record.heartbeat import SHOWN, SHOWN_EVERY_S

LOCK, LAUNCHER = ".lock", ".launcher"
# Of a rank on a host that shares no locks with this one.
FRESH_S = 12 * SHOWN_EVERY_S
FIELDS = {"phase", "step", "unix_s", "host", "pid"}


def is_living(folder: Path) -> bool:
    """Whether ranks of the run live now."""
    if is_locked(folder):
        return True
    seen = shown(folder)
    if not seen or seen["host"] == socket.gethostname() or seen["phase"] == "end":
        return False
    return time.time() - seen["unix_s"] < FRESH_S


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Whether a process holds a lock of the run, as far as this host can see."""
    try:
        with open(folder / name) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def launcher(folder: Path) -> str | None:
    """Who starts the run, and starts it again: `process N on HOST`; None where nobody does."""
    if not is_locked(folder, LAUNCHER):
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / LAUNCHER).read_text().strip() or "a process"
    return "a process"


def attend(folder: Path) -> TextIO | None:
    """Be the launcher of a run for as long as the file is open; None where another one is, or
    there are no locks."""
    file = None
    try:
        file = open(folder / LAUNCHER, "a+")  # noqa: SIM115  the lock is held by the open file
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        return None
    return file


def shown(folder: Path) -> dict[str, Any]:
    """What rank 0 showed last: phase, step, unix_s, host, pid; empty where it showed nothing."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = json.loads((folder / SHOWN).read_text())
        if isinstance(found, dict) and found.keys() >= FIELDS:
            return found | {"unix_s": float(found["unix_s"])}
    return {}
