"""Signs of life of a run, for commands that look at it from outside.

Rule: a run is alive while a process holds its lock. Where locks do not reach another host, a recent
heartbeat of rank 0 counts. The launcher holds a second lock, also while no rank lives: before the
first attempt and between two attempts. Imports no torch.
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
# Age of the last sign of life up to which a rank on a host without shared locks counts as alive.
FRESH_S = 12 * SHOWN_EVERY_S
FIELDS = {"phase", "step", "unix_s", "host", "pid"}


def is_living(folder: Path) -> bool:
    """Whether ranks of the run are alive now."""
    if is_locked(folder):
        return True
    seen = shown(folder)
    if not seen or seen["host"] == socket.gethostname() or seen["phase"] == "end":
        return False
    return time.time() - seen["unix_s"] < FRESH_S


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Whether a process holds the lock file `name` of the run, as far as this host can see."""
    try:
        with open(folder / name) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def launcher(folder: Path) -> str | None:
    """The supervisor of the run as `process N on HOST`; None where it has none."""
    if not is_locked(folder, LAUNCHER):
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / LAUNCHER).read_text().strip() or "a process"
    return "a process"


def attend(folder: Path) -> TextIO | None:
    """Hold the launcher's lock of a run for as long as the returned file is open.

    None where another launcher holds it, or where the file system has no locks.
    """
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
    """The last heartbeat of rank 0: phase, step, unix_s, host, pid; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = json.loads((folder / SHOWN).read_text())
        if isinstance(found, dict) and found.keys() >= FIELDS:
            return found | {"unix_s": float(found["unix_s"])}
    return {}
