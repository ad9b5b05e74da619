"""The mixture: the source of sample n, and which draw of that source it is. Exact, with random
access both ways.

Weights become integer counts over a period. The slots of each source are spread evenly over the
period, and the slots of all sources are merged into one table. Sample n is entry (n mod period) of
the table, in block (n div period). One source is the same table with one name in it. Weights that
change over time are `Stages`.

Rule: after any number of samples every source is within a few samples of its share.

Units: weights are shares of tokens; all windows are equally long, so they are shares of samples.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from base.errors import UserError

PERIOD = 1 << 16
MAX_PERIOD = 1 << 22


class Mixture:
    """The interleaving of the sources with a weight above 0, numbered by sorted uid.

    uids: names; counts: slots of each in one period, int64 (sources,); period: their sum.
    """

    def __init__(self, weights: Mapping[str, float], period: int = PERIOD):
        shares = shares_of(weights)
        counts = counts_over_period(shares, period)
        self.uids = tuple(counts)
        self.counts = np.array(list(counts.values()), dtype=np.int64)
        self.period = int(self.counts.sum())
        source, turn, self._slots = _interleave(self.counts)
        self._source, self._turn = (
            source.astype(np.uint16),
            turn.astype(np.uint32),
        )  # 6 bytes per entry
        self._first_slot = np.cumsum(self.counts) - self.counts

    def locate(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source number, draw of that source) of each sample; arrays (n,) int64."""
        block, entry = np.divmod(np.asarray(sample, dtype=np.int64), self.period)
        source = self._source[entry].astype(np.int64)
        return source, block * self.counts[source] + self._turn[entry]

    def sample(self, source: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """The sample that is the given draw of the given source: the inverse of `locate`."""
        block, turn = np.divmod(np.asarray(draw, dtype=np.int64), self.counts[source])
        return block * self.period + self._slots[self._first_slot[source] + turn]

    def draws_before(self, sample: int) -> np.ndarray:
        """Number of draws of each source in samples [0, sample); int64 (sources,)."""
        block, entry = divmod(int(sample), self.period)
        return block * self.counts + np.bincount(self._source[:entry], minlength=len(self.uids))

    def fingerprint(self) -> str:
        """SHA-256 of names and counts: equal exactly when the table is equal."""
        text = json.dumps(list(zip(self.uids, self.counts.tolist(), strict=True)))
        return hashlib.sha256(text.encode()).hexdigest()


class Stages:
    """Mixtures one after another. Each holds from its first sample on and starts at entry 0 of its
    table; a source continues with its next draw in whichever stage it appears again.

    stages: (first sample, weights), the first at 0, ascending. uids: every name with a weight above
    0 in some stage, sorted; sources are numbered by it.
    """

    def __init__(self, stages: Sequence[tuple[int, Mapping[str, float]]]):
        self.mixtures = [Mixture(weights) for _, weights in stages]
        self.starts = np.array([first for first, _ in stages], dtype=np.int64)
        assert self.starts[0] == 0
        assert (np.diff(self.starts) >= 0).all()
        self.uids = tuple(sorted({uid for mixture in self.mixtures for uid in mixture.uids}))
        number = {uid: place for place, uid in enumerate(self.uids)}
        # Number of a mixture's own sources here, and the other way round (-1: not in it).
        self._outer = [np.array([number[uid] for uid in one.uids]) for one in self.mixtures]
        self._inner = np.full((len(stages), len(self.uids)), -1)
        self._before = np.zeros((len(stages), len(self.uids)), dtype=np.int64)  # draws, per stage
        for stage, outer in enumerate(self._outer):
            self._inner[stage, outer] = np.arange(len(outer))
            if stage:
                length = self.starts[stage] - self.starts[stage - 1]
                self._before[stage] = self._before[stage - 1] + self._draws(stage - 1, length)

    def locate(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source number, draw of that source) of each sample; arrays (n,) int64."""
        sample = np.asarray(sample, dtype=np.int64)
        source, draw = np.empty((2, len(sample)), dtype=np.int64)
        stages = np.searchsorted(self.starts, sample, side="right") - 1
        for stage in np.unique(stages):
            mine = stages == stage
            inner, turn = self.mixtures[stage].locate(sample[mine] - self.starts[stage])
            source[mine] = self._outer[stage][inner]
            draw[mine] = turn + self._before[stage, source[mine]]
        return source, draw

    def sample(self, source: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """The sample that is the given draw of the given source, -1 where none ever is."""
        source, draw = np.asarray(source), np.asarray(draw, dtype=np.int64)
        found = np.full(len(draw), -1, dtype=np.int64)
        # The last stage that begins at or below the draw holds it: a stage that does not draw the
        # source leaves its count as it is, so the next stage begins with the same count.
        stages = (self._before[:, source] <= draw).sum(axis=0) - 1
        for stage in np.unique(stages):
            inner = self._inner[stage, source]
            mine = np.flatnonzero((stages == stage) & (inner >= 0))
            turn = draw[mine] - self._before[stage, source[mine]]
            found[mine] = self.mixtures[stage].sample(inner[mine], turn) + self.starts[stage]
        return found

    def draws_before(self, sample: int) -> np.ndarray:
        """Number of draws of each source in samples [0, sample); int64 (sources,)."""
        stage = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self._before[stage] + self._draws(stage, sample - int(self.starts[stage]))

    def _draws(self, stage: int, samples: int) -> np.ndarray:
        draws = np.zeros(len(self.uids), dtype=np.int64)
        draws[self._outer[stage]] = self.mixtures[stage].draws_before(samples)
        return draws

    def first_draws(self, samples: int) -> np.ndarray:
        """Number of draws of each source in that many samples of the first stage."""
        return self._draws(0, samples)

    def share(self, uid: str, stage: int) -> float:
        """The share of samples of one source in a stage."""
        mixture = self.mixtures[stage]
        if uid not in mixture.uids:
            return 0.0
        return int(mixture.counts[mixture.uids.index(uid)]) / mixture.period

    def past(self, sample: int) -> list:
        """All that decides samples [0, sample), as plain values."""
        return [
            [int(start), mixture.fingerprint()]
            for start, mixture in zip(self.starts, self.mixtures, strict=True)
            if start < max(sample, 1)
        ]

    def fingerprint(self) -> str:
        """Equal exactly when all tables and their starts are; a single stage has its mixture's."""
        if len(self.mixtures) == 1:
            return self.mixtures[0].fingerprint()
        return hashlib.sha256(json.dumps(self.past(2**63)).encode()).hexdigest()


def shares_of(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Weights as exact shares of 1, sorted by uid, without the zeros. Raises UserError for a bad
    weight.
    """
    problems = [
        f"data.sources.{uid}.weight={weight} is not a finite number >= 0; 0 = never drawn"
        for uid, weight in weights.items()
        if isinstance(weight, bool) or not math.isfinite(weight) or weight < 0
    ]
    if not problems and not any(weights.values()):
        problems = [
            f"data.sources: all weights are 0 ({', '.join(weights) or 'none'}); one must be above 0"
        ]
    if problems:
        raise UserError(*problems)
    # The decimal digits the user wrote, so that 0.1 is a tenth and no rounding of a sum enters the
    # order.
    exact = {
        uid: Fraction(repr(float(weights[uid]))) for uid in sorted(weights) if weights[uid] > 0
    }
    total = sum(exact.values())
    return {uid: weight / total for uid, weight in exact.items()}


def counts_over_period(shares: Mapping[str, Fraction], period: int = PERIOD) -> dict[str, int]:
    """Slots per source by largest remainder (ties by uid); the period doubles until each has at
    least one.
    """
    while True:
        counts = {uid: math.floor(share * period) for uid, share in shares.items()}
        by_remainder = sorted(shares, key=lambda uid: (counts[uid] - shares[uid] * period, uid))
        for uid in by_remainder[: period - sum(counts.values())]:
            counts[uid] += 1
        missing = [uid for uid, count in counts.items() if count == 0]
        if not missing:
            return counts
        if period >= MAX_PERIOD:
            raise UserError(
                *(
                    f"data.sources.{uid}.weight is {float(shares[uid]):.3g} of the total, less "
                    f"than one sample in {MAX_PERIOD}; raise it, or set it to 0"
                    for uid in missing
                )
            )
        period *= 2


def _interleave(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slots (j + 1/2) / count of all sources in ascending order, ties by source.

    Returns (source of each entry, its j, place of each slot in the table).
    """
    source = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    turn = np.arange(len(source)) - first[source]
    # Compare (2j + 1) / count exactly: 80 binary digits by two integer divisions. Different
    # fractions with denominators whose product is at most 2**42 differ within them; equal ones stay
    # in order of source.
    divisor = counts[source].astype(np.uint64)
    high, rest = np.divmod((2 * turn + 1).astype(np.uint64) << np.uint64(40), divisor)
    low = (rest << np.uint64(40)) // divisor
    order = np.lexsort((low, high))
    places = np.empty(len(order), dtype=np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return source[order], turn[order], places
