"""The skip list: the data step that train step N uses, and the targets that give no loss.

    train step  1 2 3 4 5     advance = [[2, 4]]: data steps 2 and 3 are never used
    data step   0 1 4 5 6     no_update, mask: nothing moves; a batch, a document or a part of one
                              does not train

Rule: ranges are of data steps, so they name the same batches however often a run was skipped,
resumed or rewound. Of overlapping ranges only the union counts. A range may be added to a run as
long as it changes nothing before the next data step (`past`), so the newest list replays the whole
run.

Units: train steps from 1, data steps from 0; ranges [first, end).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from recipes.schema import Skip

FOREVER = 2**62  # an open end

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Mask:
    """Training documents [first, end) of one source that give no loss in some data steps.

    tokens: for a single document, the range of its tokens, counted from its start.
    """

    source: str
    documents: tuple[int, int]
    steps: tuple[int, int]
    tokens: tuple[int, int] = (0, FOREVER)


class Skips:
    """A skip list. Both directions of the mapping take a binary search in the merged ranges."""

    def __init__(self, skip: Skip):
        self.advance = merged(skip.advance)
        self.no_update = merged(skip.no_update)
        self.masks = tuple(
            Mask(
                mask["source"],
                tuple(mask["documents"]),
                closed(mask["steps"]),
                closed(mask.get("tokens", (0, None))),
            )
            for mask in skip.mask
        )
        self._first = np.array([first for first, _ in self.advance], dtype=np.int64)
        self._end = np.array([end for _, end in self.advance], dtype=np.int64)
        self._left_out = np.concatenate([[0], np.cumsum(self._end - self._first)])
        # Number of data steps used before each range = the train step that first skips the range.
        self._used_before = (self._first - self._left_out[:-1]).tolist()

    def data_step(self, step: int) -> int:
        """The data step that train step N >= 1 uses."""
        assert step >= 1, "steps count from 1"
        return step - 1 + int(self._left_out[bisect_right(self._used_before, step - 1)])

    def steps_of(self, data_step: np.ndarray) -> np.ndarray:
        """The train steps that use the given data steps, 0 where none does; arrays (n,) int64."""
        data_step = np.asarray(data_step, dtype=np.int64)
        number = np.searchsorted(self._first, data_step, side="right")
        is_out = np.zeros(len(data_step), dtype=bool)
        inside = number > 0
        is_out[inside] = data_step[inside] < self._end[number[inside] - 1]
        return np.where(is_out, 0, data_step - self._left_out[number] + 1)

    def ranges_before(self, data_step: int) -> Ranges:
        """Ranges that `advance` leaves out before a data step."""
        return clipped(self.advance, data_step)

    def is_update(self, data_step: int) -> bool:
        """True where the batch of a data step trains. Meant for batches that are used."""
        return not any(first <= data_step < end for first, end in self.no_update)

    def past(self, data_step: int) -> list | None:
        """Everything the list does before a data step, as plain values; None = nothing."""
        advance = clipped(self.advance, data_step)
        no_update = [
            [first, end]
            for first, end in clipped(self.no_update, data_step)
            if any(step for step in self.steps_of(np.arange(first, end)).tolist())
        ]
        masks = merged_masks(self.masks, data_step)
        return [advance, no_update, masks] if advance or no_update or masks else None

    def fingerprint(self) -> str | None:
        """Short hash of what the whole list does; None for an empty one."""
        past = self.past(FOREVER)
        return None if past is None else digest(past)


def merged(ranges: Iterable[Iterable[int]]) -> Ranges:
    """The union of ranges [first, end), ascending and apart."""
    union: list[list[int]] = []
    for first, end in sorted(tuple(one) for one in ranges):
        if union and first <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([first, end])
    return tuple((first, end) for first, end in union)


def closed(given: Iterable[int | None]) -> tuple[int, int]:
    """A range with an end: FOREVER where it has none."""
    first, end = given
    return first, FOREVER if end is None else end


def clipped(ranges: Ranges, end: int) -> Ranges:
    """The parts of ranges that lie before `end`."""
    return tuple((low, min(high, end)) for low, high in ranges if low < end)


def merged_masks(masks: Iterable[Mask], data_step: int) -> list:
    """[source, document range, merged steps] of masks before a data step.

    A token range follows where it is not whole documents. The order of the masks, and how they were
    split over steps, do not matter.
    """
    by_place: dict[tuple, list] = {}
    for mask in masks:
        tokens = () if mask.tokens == (0, FOREVER) else (mask.tokens,)
        by_place.setdefault((mask.source, mask.documents, *tokens), []).append(mask.steps)
    found = [
        [source, documents, clipped(merged(steps), data_step), *tokens]
        for (source, documents, *tokens), steps in by_place.items()
    ]
    return sorted(entry for entry in found if entry[2])


def digest(values: object) -> str:
    """First 16 hex digits of the SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
