"""The algebra of pieces: a flat range of a (sharded) tensor as rectangles of the full tensor.

    flat range of a shard --cut--> rectangles of the shard --shift--> rectangles of the full tensor
    stored rectangles x wanted rectangles --overlaps--> what to copy from where to where

The one rule: every tensor is a matrix. All dims but the last are its rows, the last is its columns,
a vector has one row; so two ranks that cut the same tensor in different ways talk about the same
coordinates. A rectangle is a row of an int64 array (row0, row1, column0, column1), half-open, and
lies dense in the buffer it comes from. Pure numpy on columns of numbers, because a large run has
millions of rectangles. Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Box:
    """Where the tensor that a rank holds lies in the full tensor.

    Whole (`dim` None), or a shard of it: `shape[dim]` of `full[dim]` from `offset` on, equal
    elsewhere.
    """

    full: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        sides = zip(self.full, self.shape, strict=True)
        differ = [d for d, (full, part) in enumerate(sides) if full != part]
        if any(side < 0 for side in self.full + self.shape) or differ not in ([], [self.dim]):
            raise ValueError(f"shard {self.shape} of {self.full} is not a cut along dim {self.dim}")
        if self.dim is not None and not (
            0 <= self.dim < len(self.full)
            and 0 <= self.offset <= self.full[self.dim] - self.shape[self.dim]
        ):
            raise ValueError(
                f"shard {self.shape} at {self.offset} of dim {self.dim}: not in {self.full}"
            )


@dataclass(frozen=True)
class Rectangles:
    """n rectangles, each with the place of its first element in the buffer it is cut from."""

    bounds: np.ndarray  # (n, 4) int64: row0, row1, column0, column1
    at: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.at)

    @property
    def measures(self) -> np.ndarray:
        """(n,) uint64, see `measures`."""
        return measures(self.bounds)

    @property
    def areas(self) -> np.ndarray:
        """(n,) number of elements of each."""
        row0, row1, column0, column1 = self.bounds.T
        return (row1 - row0) * (column1 - column0)


def measures(bounds: np.ndarray) -> np.ndarray:
    """A pseudo-random size of each rectangle, (n, 4) -> (n,) uint64, that adds up like an area.

    Pieces have the sum of the whole exactly when they cover each element once (but for one chance
    in 2^60): an overlap as large as a hole hides from areas, not from this. All sums modulo 2^64.
    """
    rows, columns = _mixed(bounds[:, :2], 1), _mixed(bounds[:, 2:], 2)
    return (rows[:, 1] - rows[:, 0]) * (columns[:, 1] - columns[:, 0])


def _mixed(values: np.ndarray, salt: int) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014) of coordinates: int64 -> uint64."""
    z = (values.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor of any number of dims."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def cut(
    starts: np.ndarray, stops: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, Rectangles]:
    """Flat ranges [start, stop) of matrices with `columns` columns -> (which range, rectangles).

    At most three each: the end of a first row, whole rows, the beginning of a last row. All
    arguments are (n,) int64; `at` counts from the start of its own range. Empty ranges give no
    rectangle.
    """
    starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    columns = np.maximum(np.broadcast_to(np.asarray(columns, np.int64), starts.shape), 1)
    row_a, column_a = np.divmod(starts, columns)
    row_z, column_z = np.divmod(np.maximum(stops, starts), columns)
    is_inside_one_row = row_a == row_z
    body_a = row_a + (column_a > 0)
    head = np.stack([row_a, row_a + 1, column_a, np.where(is_inside_one_row, column_z, columns)])
    head[:, (column_a == 0) & ~is_inside_one_row] = 0
    body = np.stack([body_a, np.maximum(row_z, body_a), np.zeros_like(columns), columns])
    tail = np.stack([row_z, row_z + 1, np.zeros_like(columns), column_z])
    tail[:, is_inside_one_row] = 0
    bounds = np.stack([head, body, tail], axis=-1)  # (4, n, 3)
    areas = (bounds[1] - bounds[0]) * (bounds[3] - bounds[2])
    at = np.cumsum(areas, axis=1) - areas
    which, part = np.nonzero(areas)
    return which, Rectangles(np.ascontiguousarray(bounds[:, which, part].T), at[which, part])


def shift(rectangles: Rectangles, box: Box) -> tuple[np.ndarray, Rectangles]:
    """Rectangles of a shard -> (which one, rectangles of the full tensor), in the same order.

    A shard along the last dim moves columns, along the first rows; along a dim between them its
    rows lie apart in the full tensor, so a rectangle is cut where they do.
    """
    bounds, at, source = rectangles.bounds.copy(), rectangles.at, np.arange(len(rectangles))
    if box.dim is None:
        return source, rectangles
    if box.dim == len(box.full) - 1:
        bounds[:, 2:] += box.offset
        return source, Rectangles(bounds, at)
    inner = math.prod(box.full[box.dim + 1 : -1])  # rows per index of the cut dim
    run, period = box.shape[box.dim] * inner, box.full[box.dim] * inner
    if not len(at) or run == 0:
        return source, rectangles
    first, last = bounds[:, 0] // run, (bounds[:, 1] - 1) // run
    counts = last - first + 1
    source = np.repeat(source, counts)
    block = first[source] + np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    row0 = np.maximum(bounds[source, 0], block * run)
    row1 = np.minimum(bounds[source, 1], (block + 1) * run)
    widths = bounds[source, 3] - bounds[source, 2]
    moved = block * (period - run) + box.offset * inner
    shifted = np.stack([row0 + moved, row1 + moved, bounds[source, 2], bounds[source, 3]], axis=1)
    return source, Rectangles(shifted, at[source] + (row0 - bounds[source, 0]) * widths)


def rectangles_of(box: Box, start: int, count: int) -> Rectangles:
    """Elements [start, start + count) of the flattened shard as rectangles of the full tensor."""
    _, columns = matrix(box.shape)
    _, pieces = cut(np.array([start]), np.array([start + count]), np.array([columns]))
    return shift(pieces, box)[1]


def overlaps(wanted: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where one wanted rectangle (4,) meets stored ones (n, 4): (indices, common rectangles)."""
    low = np.maximum(wanted[[0, 2]], stored[:, [0, 2]])
    high = np.minimum(wanted[[1, 3]], stored[:, [1, 3]])
    hits = np.flatnonzero((low < high).all(axis=1))
    return hits, np.stack([low[hits, 0], high[hits, 0], low[hits, 1], high[hits, 1]], axis=1)


def place(common: np.ndarray, bounds: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First element and row stride, in its buffer, of a rectangle `common` inside each of `bounds`.

    All are (n, 4), `at` is (n,); a rectangle's rows follow each other without gaps in its buffer.
    """
    stride = bounds[:, 3] - bounds[:, 2]
    return at + (common[:, 0] - bounds[:, 0]) * stride + common[:, 2] - bounds[:, 2], stride
