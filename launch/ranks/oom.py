"""Counts the processes that the kernel has killed out of memory: they end with SIGKILL alone.

    memory.events of the control group (version 2), memory.oom_control (version 1), /proc/vmstat

Rule: a counter that rose while a rank was killed is the reason. The counter of the control group
comes first; that of the whole machine counts processes of other people, too.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")


def kills(root: Path = ROOT) -> int:
    """The counter that applies to this process and its children; 0 where there is none."""
    for path in counters(root):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found.group(1))
    return 0


def counters(root: Path) -> list[Path]:
    """Files that may hold the counter, the narrowest first."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = []
    for line in lines:  # number:controllers:/path
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(groups / "memory" / place.lstrip("/") / "memory.oom_control")
        elif not controllers and place != "/":
            found += [
                groups / place.lstrip("/") / "memory.events",
                groups / "unified" / place.lstrip("/") / "memory.events",
            ]
    # In a container with a namespace of its own the group is the root of what is seen.
    return [*found, groups / "memory.events", root / "proc/vmstat"]
