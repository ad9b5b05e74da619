"""The CPU cores and the number of open files that this process may use.

A container of two cores on a machine of 64 sees 64 of them, and the kernel would slow down a thread
for each. So the cores that the process is bound to and the quota of each control group above it are
read, and the smallest limit counts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
OPEN_FILES = 2**16


def allow_open_files() -> None:
    """Raise the limit of open files of this process and of those that it starts.

    The usual 1,024 are not enough: gloo holds a socket to every other rank in each of the three
    groups that span all ranks, and the launcher has three pipes to each host.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox that allows no change
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def usable(root: Path = ROOT) -> int:
    """Number of CPU cores, at least 1; a part of a core counts as one."""
    bound = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas(root))]))


def quotas(root: Path) -> Iterator[float]:
    """The number of cores that each control group above this process allows."""
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
    """The quota of one control group (version 2 or 1), in cores; nothing where it has none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" is none
    with contextlib.suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        if quota > 0:  # -1 is none
            yield quota / int((folder / "cpu.cfs_period_us").read_text())
