"""Whether a run lives now, and what its first rank is doing.

The one rule: a run lives where somebody holds its lock; where locks do not reach another host, a
recent sign of life counts. For the verbs that look at a run from outside; imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import time
from pathlib import Path
from typing import Any

from runtime.heartbeat import SHOWN, SHOWN_EVERY_S

LOCK = ".lock"
# Of a rank on a host that shares no locks with this one.
FRESH_S = 12 * SHOWN_EVERY_S


def is_living(folder: Path) -> bool:
    """Whether ranks of the run live now."""
    if is_locked(folder):
        return True
    seen = shown(folder)
    if not seen or seen["host"] == socket.gethostname() or seen["phase"] == "end":
        return False
    return time.time() - seen["unix_s"] < FRESH_S


def is_locked(folder: Path) -> bool:
    """Whether a process holds the run's lock, as far as this host can see."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def shown(folder: Path) -> dict[str, Any]:
    """What rank 0 showed last: phase, step, unix_s, host, pid; empty where it showed nothing."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / SHOWN).read_text())
        if isinstance(found, dict) and {"phase", "step", "unix_s", "host", "pid"} <= found.keys():
            return found
    return {}
