"""Pieces of tensors as rectangles: a flat range of a (sharded) tensor, in the full tensor.

    flat range of a shard --cut--> rectangles of the shard --shift--> rectangles of the full tensor
    stored rectangles x wanted rectangles --overlaps--> what to copy from where to where

Rule: every tensor is treated as a matrix. All dims but the last are its rows, the last one is its
columns, and a vector has one row; so ranks that shard the same tensor in different ways use the
same coordinates. A rectangle is a row of an int64 array (row0, row1, column0, column1), half-open,
and is stored without gaps in its buffer. The code is plain numpy on columns of numbers, because a
large run has millions of rectangles. Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Box:
    """Position, in the full tensor, of the tensor that a rank holds.

    Either the whole tensor (`dim` None), or a shard: `shape[dim]` of `full[dim]` indices from
    `offset` on, and every other dim in full.
    """

    full: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        sides = zip(self.full, self.shape, strict=True)
        differ = [d for d, (full, part) in enumerate(sides) if full != part]
        if any(side < 0 for side in self.full + self.shape) or differ not in ([], [self.dim]):
            raise ValueError(f"{self.shape} is not a shard of {self.full} along dim {self.dim}")
        if self.dim is not None and not (
            0 <= self.dim < len(self.full)
            and 0 <= self.offset <= self.full[self.dim] - self.shape[self.dim]
        ):
            raise ValueError(
                f"shard {self.shape} at {self.offset} of dim {self.dim} lies outside {self.full}"
            )


@dataclass(frozen=True)
class Rectangles:
    """n rectangles, each with the position of its first element in the buffer that holds it."""

    bounds: np.ndarray  # (n, 4) int64: row0, row1, column0, column1
    at: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.at)

    @property
    def measures(self) -> np.ndarray:
        """Pseudo-random sizes, (n,) uint64; see `measures`."""
        return measures(self.bounds)

    @property
    def areas(self) -> np.ndarray:
        """Number of elements of each, (n,)."""
        row0, row1, column0, column1 = self.bounds.T
        return (row1 - row0) * (column1 - column0)


def measures(bounds: np.ndarray) -> np.ndarray:
    """Return a pseudo-random size of each rectangle, (n, 4) -> (n,) uint64, that adds up like an
    area.

    The sizes of pieces sum to that of the whole exactly when the pieces cover each element once
    (except with probability 2^-60). Areas alone would not notice an overlap that is as large as a
    hole. All sums are modulo 2^64.
    """
    rows, columns = _mixed(bounds[:, :2], 1), _mixed(bounds[:, 2:], 2)
    return (rows[:, 1] - rows[:, 0]) * (columns[:, 1] - columns[:, 0])


def _mixed(values: np.ndarray, salt: int) -> np.ndarray:
    """Mix coordinates with SplitMix64 (Steele et al. 2014): int64 -> uint64."""
    z = (values.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor with any number of dims."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def cut(
    starts: np.ndarray, stops: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, Rectangles]:
    """Turn flat ranges [start, stop) of matrices with `columns` columns into rectangles; returns
    (index of the range, rectangles).

    Each range gives at most three: the end of a first row, whole rows, the beginning of a last row.
    All arguments are (n,) int64; `at` counts from the start of its own range. Empty ranges give no
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
    """Turn rectangles of a shard into (index of the rectangle, rectangles of the full tensor), in
    the same order.

    A shard along the last dim moves columns, one along the first dim moves rows. Along a dim
    between them the rows of the shard are not adjacent in the full tensor, so rectangles are split
    there.
    """
    bounds, at, source = rectangles.bounds.copy(), rectangles.at, np.arange(len(rectangles))
    if box.dim is None:
        return source, rectangles
    if box.dim == len(box.full) - 1:
        bounds[:, 2:] += box.offset
        return source, Rectangles(bounds, at)
    inner = math.prod(box.full[box.dim + 1 : -1])  # rows per index of the sharded dim
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
    """Return elements [start, start + count) of the flattened shard as rectangles of the full
    tensor.
    """
    _, columns = matrix(box.shape)
    _, pieces = cut(np.array([start]), np.array([start + count]), np.array([columns]))
    return shift(pieces, box)[1]


def overlaps(wanted: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intersect one wanted rectangle (4,) with stored ones (n, 4): (indices, common rectangles)."""
    low = np.maximum(wanted[[0, 2]], stored[:, [0, 2]])
    high = np.minimum(wanted[[1, 3]], stored[:, [1, 3]])
    hits = np.flatnonzero((low < high).all(axis=1))
    return hits, np.stack([low[hits, 0], high[hits, 0], low[hits, 1], high[hits, 1]], axis=1)


def place(common: np.ndarray, bounds: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first element and the row stride, in the buffer of each of `bounds`, of the
    rectangle `common` inside it.

    Both are (n, 4) and `at` is (n,). The rows of a rectangle follow each other in its buffer
    without gaps.
    """
    stride = bounds[:, 3] - bounds[:, 2]
    return at + (common[:, 0] - bounds[:, 0]) * stride + common[:, 2] - bounds[:, 2], stride
