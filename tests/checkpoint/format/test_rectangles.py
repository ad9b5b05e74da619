"""The algebra of pieces against brute force: number every element and look where it ends up."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.format.rectangles import Box, cut, matrix, overlaps, place, rectangles_of

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes(draw):
    """A tensor shape and a shard of it, or the whole of it."""
    full = draw(shapes)
    if draw(st.booleans()):
        return Box(full, full)
    dim = draw(st.integers(0, len(full) - 1))
    size = draw(st.integers(1, full[dim]))
    offset = draw(st.integers(0, full[dim] - size))
    shape = full[:dim] + (size,) + full[dim + 1 :]
    return Box(full, shape, dim, offset)


@st.composite
def pieces(draw, box=None):
    """A shard and a flat range of it."""
    box = draw(boxes()) if box is None else box
    total = math.prod(box.shape)
    start = draw(st.integers(0, total))
    return box, start, draw(st.integers(0, total - start))


def numbered(full):
    """The full tensor with every element holding its own number."""
    return np.arange(math.prod(full)).reshape(full)


def view(buffer, first, rows, columns, stride):
    """Rows that begin `stride` elements apart in a flat buffer."""
    index = first + stride * np.arange(rows)[:, None] + np.arange(columns)
    return index, buffer[index]


def shard_of(tensor, box):
    """The part of a full tensor that `box` describes, flattened."""
    if box.dim is None:
        return tensor.reshape(-1)
    index = [slice(None)] * tensor.ndim
    index[box.dim] = slice(box.offset, box.offset + box.shape[box.dim])
    return tensor[tuple(index)].reshape(-1)


@settings(max_examples=300, deadline=None)
@given(pieces())
def test_rectangles_hold_the_elements_of_the_flat_range_in_order(piece):
    box, start, count = piece
    full = numbered(box.full)
    expected = shard_of(full, box)[start : start + count]
    rectangles = rectangles_of(box, start, count)
    seen = np.full(count, -1)
    rows = full.reshape(matrix(box.full))
    for (row0, row1, column0, column1), at in zip(rectangles.bounds, rectangles.at, strict=True):
        block = rows[row0:row1, column0:column1].reshape(-1)
        assert (seen[at : at + block.size] == -1).all()
        seen[at : at + block.size] = block
    assert (seen == expected).all()
    assert rectangles.areas.sum() == count


@settings(max_examples=300, deadline=None)
@given(st.data(), shapes)
def test_any_stored_cut_fills_any_wanted_cut(data, full):
    """Copy through overlaps only, from a random cut into ranges to another: nothing is missing."""
    tensor = numbered(full)
    total = tensor.size
    edges = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)) + [0, total])
    stored = []
    for low, high in pairwise(edges):
        stored.append(
            (rectangles_of(Box(full, full), low, high - low), tensor.reshape(-1)[low:high])
        )
    dim = data.draw(st.integers(0, len(full) - 1))
    size = data.draw(st.integers(1, full[dim]))
    offset = data.draw(st.integers(0, full[dim] - size))
    box = Box(full, full[:dim] + (size,) + full[dim + 1 :], dim, offset)
    box, start, count = data.draw(pieces(box))
    wanted = rectangles_of(box, start, count)
    buffer = np.full(count, -1)
    for bounds, at in zip(wanted.bounds, wanted.at, strict=True):
        for rectangles, source in stored:
            hits, common = overlaps(bounds, rectangles.bounds)
            many = np.repeat(bounds[None], len(hits), axis=0)
            to, to_stride = place(common, many, np.repeat(at, len(hits)))
            of, of_stride = place(common, rectangles.bounds[hits], rectangles.at[hits])
            for i, (row0, row1, column0, column1) in enumerate(common):
                window = (row1 - row0, column1 - column0)
                target, _ = view(buffer, to[i], *window, to_stride[i])
                buffer[target] = view(source, of[i], *window, of_stride[i])[1]
    assert (buffer == shard_of(tensor, box)[start : start + count]).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9)), max_size=6))
def test_cutting_many_ranges_at_once_equals_cutting_them_one_by_one(ranges):
    ranges = [(min(a, b), max(a, b), columns) for a, b, columns in ranges]
    starts, stops, columns = np.array(ranges, np.int64).reshape(-1, 3).T
    which, rectangles = cut(starts, stops, columns)
    for i, (start, stop, width) in enumerate(ranges):
        _, alone = cut(np.array([start]), np.array([stop]), np.array([width]))
        assert len(alone) <= 3
        assert (rectangles.bounds[which == i] == alone.bounds).all()
        assert (rectangles.at[which == i] == alone.at).all()


def test_a_scalar_and_an_empty_tensor_have_their_elements():
    assert rectangles_of(Box((), ()), 0, 1).bounds.tolist() == [[0, 1, 0, 1]]
    assert len(rectangles_of(Box((0, 3), (0, 3)), 0, 0)) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ((4, 4), (4, 2)),
        ((4, 4), (2, 4), 1),
        ((4, 4), (2, 4), 0, 3),
        ((4,), (4, 1)),
        ((4,), (4,), 1),
    ],
)
def test_a_shard_that_does_not_fit_its_tensor_is_refused(arguments):
    with pytest.raises(ValueError):
        Box(*arguments)
