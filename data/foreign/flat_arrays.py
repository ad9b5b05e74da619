"""Statistics of a flat array of ids, which has no header that a wrong declaration would contradict.

    parity      ids at even and at odd places are alike; where not, the ids are wider than declared
    front       ids at the front occur elsewhere, too; where not, the front is a header
    end ids     some, and not one at nearly every place

Rule: an array that fails a test is refused, unless the user accepts it (`unusual=accept`). A test
gives its verdict only where chance would fail it less than once in a million arrays.

Units: ids, places (counted from 0).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

LEAST_IDS = 4096  # fewer are too few for the distributions
FEW_IDS = 64  # enough where every second id is the same
PARITY_BINS = 64
MOST_DISTANCE = 0.4  # total variation between even and odd places; text stays below 0.1
FRONT_IDS = 12  # a header of 24 bytes in uint16, the shortest that is known
CHANCE = 1e-6
MOST_END_SHARE = 0.5
MOST_VOCABULARY = 1 << 24  # beyond it the occurrences of ids are not counted


class FlatStatistics:
    """Collects the statistics of one array, chunk by chunk in order."""

    def __init__(self, vocab_size: int, eod_id: int):
        self._eod_id = eod_id
        self._parity = np.zeros((2, PARITY_BINS), dtype=np.int64)
        self._front = np.empty(0, dtype=np.int64)
        is_counted = vocab_size <= MOST_VOCABULARY
        self._counts = np.zeros(vocab_size, dtype=np.int64) if is_counted else None
        self._num_ids = self._num_ends = 0

    def add(self, ids: np.ndarray) -> None:
        """Take the next ids, each from 0 to vocab_size - 1."""
        ids = ids.astype(np.int64)
        for parity in (0, 1):
            mine = ids[(parity + self._num_ids) % 2 :: 2]
            self._parity[parity] += np.bincount(mine % PARITY_BINS, minlength=PARITY_BINS)
        self._front = np.concatenate([self._front, ids[: FRONT_IDS - len(self._front)]])
        if self._counts is not None:
            self._counts += np.bincount(ids, minlength=len(self._counts))
        self._num_ids += len(ids)
        self._num_ends += int(np.count_nonzero(ids == self._eod_id))

    def summary(self) -> str:
        """One line for the log."""
        share = self._num_ends / max(1, self._num_ids)
        mean = f"{1 / share:,.0f} tokens a document" if share else "no document ends"
        return f"{self._num_ids:,} ids, {share:.2%} of them the end id {self._eod_id}: {mean}"

    def problems(self, path: Path, dtype: np.dtype) -> list[str]:
        """One line for each test that the array fails, with the way out."""
        found = []
        found += self._parity_problems(dtype)
        if self._num_ids >= LEAST_IDS:
            found += self._end_problems()
        found += self._front_problems()
        way_out = "; where it is right nevertheless: OVERRIDES=unusual=accept"
        return [f"{path}: {one}{way_out}" for one in found]

    def _parity_problems(self, dtype: np.dtype) -> list[str]:
        shares = self._parity / np.maximum(1, self._parity.sum(axis=1, keepdims=True))
        distance = float(np.abs(shares[0] - shares[1]).sum()) / 2
        used = sorted(np.count_nonzero(self._parity, axis=1).tolist())
        is_constant = self._num_ids >= FEW_IDS and used[0] == 1 and used[1] >= 8
        if not is_constant and (self._num_ids < LEAST_IDS or distance <= MOST_DISTANCE):
            return []
        return [
            f"ids at even and at odd places differ ({distance:.0%} of their distribution), as where"
            f" ids of {2 * dtype.itemsize} bytes or more are read as {dtype.name}; declare their"
            f" true type, such as dtype={_wider(dtype)}"
        ]

    def _end_problems(self) -> list[str]:
        share = self._num_ends / self._num_ids
        if not self._num_ends:
            return [
                f"the end id {self._eod_id} does not occur in {self._num_ids:,} ids, so the file"
                " would be one document; name the tokenizer or end token (eod=, eod_id=) that made"
                " it"
            ]
        if share > MOST_END_SHARE:
            return [
                f"{share:.0%} of its ids are the end id {self._eod_id}; name the tokenizer or end"
                " token (eod=, eod_id=) that made it, or its true dtype"
            ]
        return []

    def _front_problems(self) -> list[str]:
        if self._counts is None or self._num_ids < 8 * FRONT_IDS:
            return []
        elsewhere = self._counts[self._front] - (self._front[:, None] == self._front).sum(axis=1)
        alone = int(np.count_nonzero(elsewhere == 0))
        rest = self._counts.copy()
        np.subtract.at(rest, self._front, 1)
        # The share of the other ids that occur once: how often an id is alone by chance.
        share = (np.count_nonzero(rest == 1) + 1) / (self._num_ids - len(self._front) + 1)
        if alone < 2 or _at_least(alone, len(self._front), min(1.0, share)) > CHANCE:
            return []
        return [
            f"{alone} of its first {len(self._front)} ids ({self._front[:6].tolist()} ...) occur"
            " nowhere else, as where a header is read as ids; write the ids without it"
        ]


def _at_least(hits: int, trials: int, chance: float) -> float:
    """Probability of `hits` or more in a binomial distribution."""
    return sum(
        math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
        for k in range(hits, trials + 1)
    )


def _wider(dtype: np.dtype) -> str:
    return {1: "uint16", 2: "uint32"}.get(dtype.itemsize, "int64")
