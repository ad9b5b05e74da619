"""Targets that a batch leaves out: masked documents, and windows that touch a damaged block.

Rule: they are known from numbers alone, without reading a token, so every rank counts the targets
of the whole global batch alike.

Shapes: n samples of the global batch, k of them with something masked, T = seq_len.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Masked(NamedTuple):
    """Tokens that are no target: `is_masked` (k, T + 1) of samples `row` (k,), ascending."""

    row: np.ndarray
    is_masked: np.ndarray

    def num_targets(self, cut_row: np.ndarray, cut_position: np.ndarray) -> int:
        """Number of targets that the mask takes away.

        cut_row, cut_position: tokens that are no target in any case; they are not counted.
        """
        place = np.searchsorted(self.row, cut_row)
        is_here = place < len(self.row)
        is_here[is_here] = self.row[place[is_here]] == cut_row[is_here]
        already = self.is_masked[place[is_here], cut_position[is_here]]
        return int(self.is_masked[:, 1:].sum()) - int(already.sum())

    def of(self, mine: np.ndarray, seq_len: int) -> np.ndarray:
        """The same for the samples numbered `mine`, (len(mine), T + 1)."""
        dense = np.zeros((len(mine), seq_len + 1), dtype=bool)
        place = np.searchsorted(self.row, mine)
        is_here = place < len(self.row)
        is_here[is_here] = self.row[place[is_here]] == mine[is_here]
        dense[is_here] = self.is_masked[place[is_here]]
        return dense


def masked(
    source: np.ndarray,
    start: np.ndarray,
    seq_len: int,
    ranges: Iterable[tuple[int, int, int]],
    is_damaged: np.ndarray | None = None,
) -> Masked | None:
    """The masked tokens of samples; None where nothing is masked.

    source, start: source number and first token of each sample, (n,) int64; ranges: (source number,
    first token, end token) of masked documents; is_damaged: (n,) samples that are masked whole.
    """
    spans = []
    for number, first, end in ranges:
        low = np.maximum(first - start, 0)
        high = np.minimum(end - start, seq_len + 1)
        hit = np.flatnonzero((source == number) & (high > low))
        spans.append((hit, low[hit], high[hit]))
    whole = np.flatnonzero(is_damaged) if is_damaged is not None else np.zeros(0, dtype=np.int64)
    row = np.unique(np.concatenate([whole, *(hit for hit, _, _ in spans)]))
    if not len(row):
        return None
    is_masked = np.zeros((len(row), seq_len + 1), dtype=bool)
    is_masked[np.searchsorted(row, whole)] = True
    columns = np.arange(seq_len + 1)
    for hit, low, high in spans:
        inside = (columns >= low[:, None]) & (columns < high[:, None])
        is_masked[np.searchsorted(row, hit)] |= inside
    return Masked(row.astype(np.int64), is_masked)
