"""Decides which rank is slow, from the own times of all ranks (runtime.monitor.own_time).

    window     WINDOW_STEPS steps; a rank's value is the lower quartile of its own times in them
    sudden     SUDDEN_WINDOWS in a row, and at least SUDDEN_S seconds, above 4/3 of its peers
    creeping   over LASTING_S seconds the median of its ratios is above 1.05 and far from the others

Rule: a rank is compared with its peers, the other ranks of its pipeline stage, whose work is equal;
their median is the time of a healthy rank. The median and not the best: with many ranks and batches
of unequal cost the best is an extreme value, and all other ranks would look slow. Half of the ranks
may be slow (one whole host of two) and are still found.

Noise only adds time, and rarely to three of four steps in three windows in a row. A rank must also
stand out of the spread of its peers (their median absolute deviation), unless it needs twice their
time, and a few milliseconds are never reported. A stage with one rank has no peers: the rank is
compared with its own past, as a share of the time of the other ranks, which a batch of another size
changes for all alike. All functions are pure. Units: seconds; ratios to the (lower) median of the
peers; NaN = not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WINDOW_STEPS = 4
SUDDEN_WINDOWS = 3
SUDDEN_S = 2.0  # with quick steps three windows would be too short a time
SUDDEN_RATIO = 1 / 0.75
CERTAIN_RATIO = 2.0  # whatever the spread
LEAST_S = 0.05  # per step; a smaller difference is logging, memory or chance
LASTING_S = 600.0
LASTING_WINDOWS = 20
LASTING_RATIO = 1.05
LASTING_EVERY = 5  # windows between two looks
WELL_RATIO = (1 + SUDDEN_RATIO) / 2
MOST_KEPT = 2000  # windows
PAST_WINDOWS, LEAST_PAST = 25, 5  # the past that a rank without peers is compared with
SPREADS = 4.0
FEW_PEERS = 4  # a spread of so few values has no meaning
TO_DEVIATION = 1.4826  # of a normal distribution, from the median absolute deviation


@dataclass(frozen=True)
class Slow:
    """A rank that is slow since `since_step`; `own_s` and `peers_s` belong to the last window."""

    rank: int
    own_s: float
    peers_s: float
    ratio: float
    since_step: int
    is_lasting: bool = False


class Window(NamedTuple):
    """Times of all ranks in a window that ended with `step` and took `seconds`; arrays (ranks,).

    `peers_s` is the median of each rank's peers; for a rank without peers the time it would need by
    its own past.
    """

    step: int
    seconds: float
    own_s: np.ndarray
    peers_s: np.ndarray
    is_slow: np.ndarray


def quartile(values: Sequence[float]) -> float:
    """The lower quartile: the value at index len / 4 in sorted order, of four the second."""
    return sorted(values)[len(values) // 4]


class Judge:
    """Judges the windows of all ranks, in order; `stages` is the pipeline stage of each rank."""

    def __init__(self, stages: Sequence[int]):
        self.stages = np.array(stages)
        _, place, count = np.unique(self.stages, return_inverse=True, return_counts=True)
        self.alone = frozenset(
            map(int, np.flatnonzero(count[place] == 1))
        )  # in their pipeline stages
        self._shares: deque[dict[int, float]] = deque(maxlen=PAST_WINDOWS)  # of `alone`
        self.slow: set[int] = set()  # reported, and not healthy again since
        self._windows: deque[Window] = deque(maxlen=MOST_KEPT)
        self._creeping: dict[int, Slow] = {}
        self._added = 0

    def add(self, step: int, seconds: float, own_s: Sequence[float | None]) -> list[Slow]:
        """The ranks that are newly slow after a window that ended with `step` and took `seconds`.

        A rank whose time is not known (None) is neither judged nor a peer of others.
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
        """The ranks that were slow and have been like their peers for a whole period."""
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
        """Judge the ranks without peers by their own past."""
        shares = {rank: share(own, rank) for rank in self.alone}
        for rank, now in shares.items():
            past = [one[rank] for one in self._shares if not np.isnan(one[rank])]
            if len(past) >= LEAST_PAST and not np.isnan(now):
                peers_s[rank] = np.median(past) / now * own[rank]
                more_s = own[rank] - peers_s[rank]
                is_slow[rank] = more_s >= LEAST_S and own[rank] > SUDDEN_RATIO * peers_s[rank]
        if not is_slow.any():  # a slow rank changes the shares of all others
            self._shares.append(shares)

    def _since(self, windows: int, seconds: float) -> list[Window]:
        """The last windows: at least that many, and that long; empty where there are not enough."""
        taken: list[Window] = []
        total = 0.0
        for window in reversed(self._windows):
            taken.append(window)
            total += window.seconds
            if len(taken) >= windows and total >= seconds:
                return taken[::-1]
        return []


def against_peers(own_s: np.ndarray, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each rank the median of its peers, and True where the rank is slow against it."""
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
    """The time of a rank divided by the median of all others; NaN where that is not known."""
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
    # Medians over time first: they remove what varies from batch to batch.
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
    """The standard deviation by the median absolute deviation: half of the values may be wrong."""
    return TO_DEVIATION * float(np.median(np.abs(values - np.median(values))))
