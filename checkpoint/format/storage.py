"""Writes the fragments of a rank to one large file and an index, and reads rectangles back.

    fragments -> staging buffer -> digest of each block -> rank-00007.bin, then rank-00007.json
    jobs, sorted by file and place -> blocks, compared with their digests -> fragments

Rule: a file is written once, front to back, and only the parts that a fragment needs are read;
there is no tensor format and no pickle. Beside the fragments themselves this needs memory for one
window of blocks. Units: bytes and elements, as named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from checkpoint.format.blocks import (
    BLOCK_BYTES,
    WINDOW_BYTES,
    Damaged,
    Problem,
    check_size,
    digest,
    opened,
    read_blocks,
    root,
)
from checkpoint.format.index import FORMAT, ITEM_BYTES, Fragment, Index, Jobs, describe
from checkpoint.format.index_file import (
    Point,
    data_name,
    index_name,
    naming,
    nothing,
    write_all,
    write_file,
)


def write_rank(
    folder: Path, rank: int, fragments: Iterable[Fragment], local: dict, point: Point = nothing
) -> dict[str, list]:
    """Write the pieces that this rank owns, and their index, durably; {file name: [bytes, digest]}.

    `local` is JSON of this rank alone (random states). Raises OSError with the path, and
    FileExistsError when a file already exists.
    """
    groups, ordered = describe(fragments)
    path = folder / data_name(rank)
    with naming(path):
        point("open data", rank)
        writer = _Writer(path, rank, point, pinned=any(f.tensor.is_cuda for f in ordered))
        try:
            for run in runs(fragment.tensor for fragment in ordered):
                writer.append(run)
            num_bytes, digests = writer.finish()
        finally:
            os.close(writer.descriptor)
    index = {
        "format": FORMAT,
        "rank": rank,
        "bytes": num_bytes,
        "groups": groups,
        "digests": b"".join(digests).hex(),
        "local": local,
    }
    text = json.dumps(index, separators=(",", ":")).encode()
    write_file(folder / index_name(rank), text, rank, point, "index")
    return {
        data_name(rank): [num_bytes, root(digests)],
        index_name(rank): [len(text), digest(text).hex()],
    }


def runs(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Give the bytes of one-dimensional tensors in order, as few uint8 tensors as their memory
    allows.

    Pieces of a flat partition, and those of a snapshot, are neighbours in memory and become one.
    """
    waiting: torch.Tensor | None = None
    for tensor in tensors:
        found = tensor.detach().contiguous().view(torch.uint8)
        if waiting is not None and _follows(waiting, found):
            joined = (waiting.numel() + found.numel(),)
            waiting = waiting.as_strided(joined, (1,), waiting.storage_offset())
            continue
        if waiting is not None:
            yield waiting
        waiting = found
    if waiting is not None:
        yield waiting


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether two uint8 tensors are neighbours in one storage."""
    storage = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return storage and before.data_ptr() + before.numel() == after.data_ptr()


class _Writer:
    """A file that grows window by window; the digest of each block is taken before it is
    written.
    """

    def __init__(self, path: Path, rank: int, point: Point, pinned: bool):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o644)
        self.rank, self.point = rank, point
        self.window = torch.empty(WINDOW_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.filled = self.written = 0
        self.digests: list[bytes] = []

    def append(self, source: torch.Tensor) -> None:
        """Add a one-dimensional uint8 tensor. Whole windows of host memory are written without a
        copy.
        """
        done = 0
        while done < len(source):
            count = min(WINDOW_BYTES - self.filled, len(source) - done)
            part = source[done : done + count]
            if count == WINDOW_BYTES and part.device.type == "cpu":
                self._write(part)
            else:
                self.window[self.filled : self.filled + count].copy_(part)
                self.filled += count
                if self.filled == WINDOW_BYTES:
                    self._write(self.window)
                    self.filled = 0
            done += count

    def _write(self, window: torch.Tensor) -> None:
        data = memoryview(window.numpy())
        blocks = range(0, len(data), BLOCK_BYTES)
        self.digests += [digest(data[at : at + BLOCK_BYTES]) for at in blocks]
        self.point("write data", self.rank)
        write_all(self.descriptor, data)
        # Linux begins to write these pages out now, so that the fsync at the end finds little to
        # do, and a checkpoint does not push the corpus out of the page cache.
        os.posix_fadvise(self.descriptor, self.written, len(data), os.POSIX_FADV_DONTNEED)
        self.written += len(data)

    def finish(self) -> tuple[int, list[bytes]]:
        """Write the rest and fsync; return (bytes of the file, digest of each block)."""
        if self.filled:
            self._write(self.window[: self.filled])
            self.filled = 0
        self.point("fsync data", self.rank)
        os.fsync(self.descriptor)
        return self.written, self.digests


def read(
    folder: Path,
    index: Index,
    digests: Callable[[int], Sequence[bytes]],
    jobs: Jobs,
    fragments: Sequence[Fragment],
) -> int:
    """Carry out `jobs`: copy stored elements into the tensors of the fragments; return bytes read.

    Every block is compared with its digest before anything is copied from it. Raises Damaged with a
    line for each bad file; the other files are still read, so that all bad files are named at once.
    """
    total, problems = 0, []
    ranks, first = np.unique(jobs.file, return_index=True)  # jobs are sorted by file
    for rank, (low, high) in zip(
        ranks.tolist(), pairwise([*first.tolist(), len(jobs)]), strict=True
    ):
        path = folder / data_name(rank)
        try:
            with opened(path) as descriptor:
                check_size(descriptor, path, index.file_bytes[rank])
                source = _Reader(descriptor, path, index.file_bytes[rank], digests(rank))
                total += _read_file(source, jobs, range(low, high), fragments)
        except Damaged as damage:
            problems += [Problem(line, line.kind, path.name) for line in damage.problems]
    if problems:
        raise Damaged(*problems)
    return total


class _Reader:
    """A window of checked blocks that moves through a file."""

    def __init__(self, descriptor: int, path: Path, num_bytes: int, digests: Sequence[bytes]):
        self.descriptor, self.path, self.num_bytes = descriptor, path, num_bytes
        self.digests = digests
        self.buffer = torch.empty(WINDOW_BYTES + 2 * BLOCK_BYTES, dtype=torch.uint8)
        self.low = self.high = 0

    def move(self, low: int, high: int) -> int:
        """Move the window so that it holds at least [low, high); return bytes read."""
        first = low // BLOCK_BYTES
        self.low, self.high = 0, 0  # nothing usable if this fails
        end = min(-(-high // BLOCK_BYTES) * BLOCK_BYTES, self.num_bytes)
        if high > end:
            raise Damaged(f"{self.path}: its index points past its end")
        start = first * BLOCK_BYTES
        room = memoryview(self.buffer.numpy())[: end - start]
        read_blocks(self.descriptor, self.path, first, room, self.digests)
        self.low, self.high = start, end
        return end - start

    def take(self, low: int, high: int) -> torch.Tensor:
        """Return bytes [low, high) of the file, which must lie inside the window."""
        assert self.low <= low <= high <= self.high
        return self.buffer[low - self.low : high - self.low]


def _read_file(source: _Reader, jobs: Jobs, numbers: range, fragments: Sequence[Fragment]) -> int:
    """Carry out the jobs on one file in order of position; jobs close to each other share one
    read.
    """
    copies = [copy for i in numbers for copy in _copies(jobs, i, fragments)]
    copies.sort(key=lambda copy: copy.byte)  # pieces of strided jobs may interleave
    total, waiting = 0, []
    low = high = 0
    for copy in copies:
        near = copy.byte // BLOCK_BYTES <= high // BLOCK_BYTES
        if waiting and not (near and max(high, copy.end) - low <= WINDOW_BYTES):
            total += source.move(low, high)
            for one in waiting:
                one.carry_out(source)
            waiting = []
        if not waiting:
            low = high = copy.byte
        waiting.append(copy)
        high = max(high, copy.end)
    if waiting:
        total += source.move(low, high)
        for one in waiting:
            one.carry_out(source)
    return total


class _Copy:
    """One rectangular copy that fits a window."""

    __slots__ = (
        "byte",
        "columns",
        "end",
        "item_bytes",
        "rows",
        "stride",
        "target",
        "to",
        "to_stride",
    )

    def __init__(self, byte, rows, columns, stride, target, to, to_stride):
        self.byte, self.rows, self.columns, self.stride = byte, rows, columns, stride
        self.target, self.to, self.to_stride = target, to, to_stride
        self.item_bytes = target.element_size()
        self.end = byte + ((rows - 1) * stride + columns) * self.item_bytes

    def carry_out(self, source: _Reader) -> None:
        """Copy from the window to the fragment."""
        stored = source.take(self.byte, self.end)
        if stored.storage_offset() % self.item_bytes:
            stored = stored.clone()  # a view with wider items needs an aligned start
        size = (self.rows, self.columns)
        stored = window(stored.view(self.target.dtype), 0, *size, self.stride)
        window(self.target, self.to, *size, self.to_stride).copy_(stored)


def _copies(jobs: Jobs, i: int, fragments: Sequence[Fragment]) -> Iterator[_Copy]:
    """Split a job into copies that each fit a window."""
    target = fragments[int(jobs.fragment[i])].tensor.detach()
    byte, to = int(jobs.byte[i]), int(jobs.to[i])
    rows, columns = int(jobs.rows[i]), int(jobs.columns[i])
    stride, to_stride = int(jobs.stride[i]), int(jobs.to_stride[i])
    item = ITEM_BYTES[fragments[int(jobs.fragment[i])].dtype]
    if stride == to_stride == columns:  # dense on both sides: one long row
        rows, columns = 1, rows * columns
        stride = to_stride = columns
    most = WINDOW_BYTES // item
    if rows > 1 and columns <= most:
        step = max(1, (most - columns) // stride + 1)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            at = byte + row * stride * item
            yield _Copy(at, count, columns, stride, target, to + row * to_stride, to_stride)
        return
    for row in range(rows):
        for column in range(0, columns, most):
            count = min(most, columns - column)
            at = byte + (row * stride + column) * item
            yield _Copy(at, 1, count, count, target, to + row * to_stride + column, count)


def window(buffer: torch.Tensor, first: int, rows: int, columns: int, stride: int) -> torch.Tensor:
    """Return a (rows, columns) view of a one-dimensional tensor; rows begin `stride` elements
    apart.

    Raises IndexError when the view leaves the tensor. `as_strided` alone only checks the end of the
    storage, and other tensors may lie before that end.
    """
    last = first + (rows - 1) * stride + columns
    if first < 0 or rows < 1 or not 1 <= columns <= stride or last > buffer.numel():
        raise IndexError(f"window [{first}, {last}) leaves a tensor of {buffer.numel()} elements")
    return buffer.as_strided((rows, columns), (stride, 1), buffer.storage_offset() + first)
