"""How many cores this process may use: those it is bound to, and the quota of its control groups.

A container of two cores on a machine of 64 sees 64 of them, and a thread for each would be slowed
down by the kernel. The one rule: the smallest limit on the way up counts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable(root: Path = ROOT) -> int:
    """At least 1; a share of a core counts as one."""
    bound = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas(root))]))


def quotas(root: Path) -> Iterator[float]:
    """Cores that each control group above this process allows."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)  # number:controllers:/path
            top = groups / "cpu" if "cpu" in controllers.split(",") else groups
            if controllers and top == groups:
                continue
            here = top / place.lstrip("/")
            for folder in (here, *here.parents):
                yield from quota_of(folder)
                if folder == top:
                    break


def quota_of(folder: Path) -> Iterator[float]:
    """The quota of one group of version 2 or 1, where it has one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" is none
    with contextlib.suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        if quota > 0:  # -1 is none
            yield quota / int((folder / "cpu.cfs_period_us").read_text())
