"""Asks Linux to signal this process when the process that started it dies (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded at import: a process between fork and exec must not load a library.
LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def signal_at_parent_death(number: int) -> None:
    """Let the kernel send signal `number` to this process when its parent dies.

    The request outlives an exec and is lost in a fork. A parent that died before the call sends
    nothing: compare os.getppid() afterwards where that matters. Without Linux nothing happens.
    """
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
