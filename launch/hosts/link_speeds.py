"""Finds slow links between hosts, or the host that all slow links share: a pure function.

Rule: links are compared with each other, so no number of the hardware is needed. A single link is
reported and not judged. Units: MiB/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

SLOW = 3.0  # times slower than the median link


def slow_links(speeds: Mapping[tuple[int, int], float], names: list[str]) -> list[str]:
    """A line for each host whose links are all slow, and for each other slow link.

    `speeds` are MiB/s by pair of hosts (numbers into `names`).
    """
    if len(speeds) < 2:
        return []
    middle = statistics.median(speeds.values())
    slow = {pair for pair, speed in speeds.items() if speed * SLOW < middle}
    if len(names) == 3:
        # Two of three links share a host, so the median is one of the slow ones.
        fastest = max(speeds.values())
        slow = {pair for pair, speed in speeds.items() if speed * SLOW < fastest}
        middle = fastest
    lines = []
    for host, name in enumerate(names):
        own = {pair for pair in speeds if host in pair}
        if own and own <= slow and len(slow) < len(speeds):
            worst = min(speeds[pair] for pair in own)
            lines.append(
                f"{name}: every link to it is slow ({worst:.1f} MiB/s, the others"
                f" {middle:.1f}); look at its cable, switch port and interface"
            )
            slow -= own
    lines += [
        f"{names[a]} - {names[b]}: slow link, {speeds[a, b]:.1f} MiB/s (the others {middle:.1f})"
        for a, b in sorted(slow)
    ]
    return lines
