"""Which rank is slow, from the own times of all ranks (runtime.monitor.own_time): pure functions.

    window     WINDOW_STEPS steps; a rank's value is the lower quartile of its own times in them
    sudden     SUDDEN_WINDOWS in a row, and at least SUDDEN_S seconds, above 4/3 of its peers
    creeping   over LASTING_S seconds the median of its ratios is above 1.05 and far from the others

The one rule: a rank is held against its peers, the other ranks of its pipeline stage, whose work is
equal; their median is what a healthy rank needs. The median and not the best one: with many ranks
and batches of unequal cost the best is an extreme value, and everybody else would look slow. Half
of the ranks may be slow (a whole host of two) and are still found.

Robust against noise: noise only adds time, and seldom to three of four steps of twelve in a row; a
rank must stand out of the spread of its peers (their median absolute deviation), unless it needs
twice their time; and a few milliseconds are never anybody's fault. A stage with one rank has no
peer: it is held against its own past, as a share of what the other ranks need, which a batch of
another size changes for all alike. Units: seconds; ratios to the (lower) median of the peers; NaN =
not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WINDOW_STEPS = 4
SUDDEN_WINDOWS = 3
SUDDEN_S = 2.0  # of quick steps many windows pass in the blink of an eye
SUDDEN_RATIO = 1 / 0.75
CERTAIN_RATIO = 2.0  # whatever the spread
LEAST_S = 0.05  # per step; less is logging, memory, luck
LASTING_S = 600.0
LASTING_WINDOWS = 20
LASTING_RATIO = 1.05
LASTING_EVERY = 5  # windows between two looks
WELL_RATIO = (1 + SUDDEN_RATIO) / 2
MOST_KEPT = 2000  # windows
PAST_WINDOWS, LEAST_PAST = 25, 5  # what a rank without peers is held against
SPREADS = 4.0
FEW_PEERS = 4  # below this a spread says nothing
TO_DEVIATION = 1.4826  # of a normal distribution, from the median absolute deviation


@dataclass(frozen=True)
class Slow:
    """A rank that is slow since `since_step`; `own_s` and `peers_s` are of the last window."""

    rank: int
    own_s: float
    peers_s: float
    ratio: float
    since_step: int
    is_lasting: bool = False


class Window(NamedTuple):
    """What all ranks needed in a window that ended with `step` and took `seconds`; arrays (ranks,).

    `peers_s` is the median of each rank's peers; of one without peers, what it would need as it
    used to be.
    """

    step: int
    seconds: float
    own_s: np.ndarray
    peers_s: np.ndarray
    is_slow: np.ndarray


def quartile(values: Sequence[float]) -> float:
    """The value that a quarter of them, rounded down, do not reach: of four the lowest but one."""
    return sorted(values)[len(values) // 4]


class Judge:
    """Windows of all ranks, in order; `stages` has the pipeline stage of each rank."""

    def __init__(self, stages: Sequence[int]):
        self.stages = np.array(stages)
        _, place, count = np.unique(self.stages, return_inverse=True, return_counts=True)
        self.alone = frozenset(map(int, np.flatnonzero(count[place] == 1)))  # in their stages
        self._shares: deque[dict[int, float]] = deque(maxlen=PAST_WINDOWS)  # of `alone`
        self.slow: set[int] = set()  # named, and not well again since
        self._windows: deque[Window] = deque(maxlen=MOST_KEPT)
        self._creeping: dict[int, Slow] = {}
        self._added = 0

    def add(self, step: int, seconds: float, own_s: Sequence[float | None]) -> list[Slow]:
        """The ranks that are newly slow after a window that ended with `step` and took `seconds`.

        A rank whose time is not known (None) is neither judged nor anybody's peer.
        """
        own = np.array(own_s, dtype=float)
        peers_s, is_slow = against_peers(own, self.stages)
        self._against_past(own, peers_s, is_slow)
        self._windows.append(Window(step, seconds, own, peers_s, is_slow))
        self._added += 1
        if self._added % LASTING_EVERY == 0:
            self._creeping = creeping(self._since(LASTING_WINDOWS, LASTING_S), self.stages)
        found = {**self._creeping, **sudden(self._since(SUDDEN_WINDOWS, SUDDEN_S))}
        new = [verdict for rank, verdict in sorted(found.items()) if rank not in self.slow]
        self.slow |= found.keys()
        return new

    def recovered(self) -> list[int]:
        """The ranks that were slow and have been like their peers for as long as it takes."""
        recent = self._since(SUDDEN_WINDOWS, SUDDEN_S)
        well = [
            rank
            for rank in sorted(self.slow - self._creeping.keys())
            if recent
            and all(window.own_s[rank] < WELL_RATIO * window.peers_s[rank] for window in recent)
        ]
        self.slow -= set(well)
        return well

    def _against_past(self, own: np.ndarray, peers_s: np.ndarray, is_slow: np.ndarray) -> None:
        """Fill in what is known of ranks without peers."""
        shares = {rank: share(own, rank) for rank in self.alone}
        for rank, now in shares.items():
            past = [one[rank] for one in self._shares if not np.isnan(one[rank])]
            if len(past) >= LEAST_PAST and not np.isnan(now):
                peers_s[rank] = np.median(past) / now * own[rank]
                more_s = own[rank] - peers_s[rank]
                is_slow[rank] = more_s >= LEAST_S and own[rank] > SUDDEN_RATIO * peers_s[rank]
        if not is_slow.any():  # else shares tell nothing of the others
            self._shares.append(shares)

    def _since(self, windows: int, seconds: float) -> list[Window]:
        """The last windows: at least so many, and so long; empty where there are not enough."""
        taken: list[Window] = []
        total = 0.0
        for window in reversed(self._windows):
            taken.append(window)
            total += window.seconds
            if len(taken) >= windows and total >= seconds:
                return taken[::-1]
        return []


def against_peers(own_s: np.ndarray, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median of each rank's peers, and whether the rank is slow against it."""
    peers_s = np.full(len(own_s), np.nan)
    is_slow = np.zeros(len(own_s), dtype=bool)
    for stage in np.unique(stages):
        ranks = np.flatnonzero((stages == stage) & ~np.isnan(own_s))
        if len(ranks) < 2:
            continue
        order = ranks[np.argsort(own_s[ranks], kind="stable")]
        ordered = own_s[order]
        middle = (len(order) - 2) // 2  # place of the lower median among all but one
        peers_s[order] = np.where(
            np.arange(len(order)) > middle, ordered[middle], ordered[middle + 1]
        )
        for place, rank in enumerate(order):
            own, peer = own_s[rank], peers_s[rank]
            if own - peer < LEAST_S or own <= SUDDEN_RATIO * peer:
                continue
            is_spread = len(order) > FEW_PEERS and own <= CERTAIN_RATIO * peer
            if is_spread and own - peer <= SPREADS * spread(np.delete(ordered, place)):
                continue
            is_slow[rank] = True
    return peers_s, is_slow


def share(own_s: np.ndarray, rank: int) -> float:
    """A rank's time over the median of all others; NaN where that is not known."""
    others = np.delete(own_s, rank)
    others = others[~np.isnan(others)]
    return float(own_s[rank] / np.median(others)) if len(others) else float("nan")


def sudden(windows: Sequence[Window]) -> dict[int, Slow]:
    """Ranks that were slow in every one of these windows."""
    if not windows:
        return {}
    last, since = windows[-1], windows[0].step - WINDOW_STEPS + 1
    ranks = np.flatnonzero(np.all([window.is_slow for window in windows], axis=0))
    return {
        int(rank): Slow(
            rank=int(rank),
            own_s=float(last.own_s[rank]),
            peers_s=float(last.peers_s[rank]),
            ratio=float(last.own_s[rank] / last.peers_s[rank]),
            since_step=since,
        )
        for rank in ranks
    }


def creeping(windows: Sequence[Window], stages: np.ndarray) -> dict[int, Slow]:
    """Ranks whose median over these many windows stands out of the spread of their stage."""
    found: dict[int, Slow] = {}
    if not windows:
        return found
    last, since = windows[-1], windows[0].step - WINDOW_STEPS + 1
    # Medians over time first: what varies from batch to batch is gone.
    ratios = np.median([window.own_s / window.peers_s for window in windows], axis=0)
    for stage in np.unique(stages):
        ranks = np.flatnonzero((stages == stage) & ~np.isnan(ratios))
        if len(ranks) <= FEW_PEERS:
            continue
        limit = LASTING_RATIO * np.median(ratios[ranks]) + SPREADS * spread(ratios[ranks])
        for rank in map(int, ranks[ratios[ranks] > limit]):
            own, peer = float(last.own_s[rank]), float(last.peers_s[rank])
            if own * (1 - 1 / ratios[rank]) >= LEAST_S:
                found[rank] = Slow(rank, own, peer, float(ratios[rank]), since, is_lasting=True)
    return found


def spread(values: np.ndarray) -> float:
    """A standard deviation that half of the values cannot spoil."""
    return TO_DEVIATION * float(np.median(np.abs(values - np.median(values))))
