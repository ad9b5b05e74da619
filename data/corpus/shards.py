"""A split of a corpus, read as one long row of tokens with document starts: its shards, end to end.

    token 0 ...... shard 0 ......|...... shard 1 ......|... shard 2 ...   a window may cross "|"

Rule: every byte handed out lies in a block whose hash was checked, and every read checks its byte
count. Reads are positioned reads, not a memory map: a file that is cut while in use gives an error
with its name, never a signal. At most `MAX_OPEN` shards are open. Safe for threads (one lock per
split).

Units: tokens, counted from the start of the split.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data.corpus.block_hashes import BlockChecker, read_exactly
from data.corpus.indexed import IndexView, Shard, first_at_least

MAX_OPEN = 64


class Pieces(NamedTuple):
    """Token ranges cut at shard ends, arrays (pieces,) int64.

    Columns [column, column + stop - start) of a row come from tokens [start, stop) of a shard.
    """

    row: np.ndarray
    column: np.ndarray
    shard: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Split:
    """The shards of one split, in the order given, all of one type."""

    def __init__(self, shards: list[Shard], max_open: int = MAX_OPEN):
        self.shards = shards
        self.dtype = shards[0].dtype if shards else np.dtype("<u2")
        sizes = [shard.num_tokens for shard in shards]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - np.array(sizes, dtype=np.int64)
        self.num_tokens = int(self._ends[-1]) if shards else 0
        self.num_documents = sum(shard.num_documents for shard in shards)
        self._document_ends = np.cumsum([s.num_documents for s in shards], dtype=np.int64)
        self._max_open = max_open
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._checkers: dict[int, BlockChecker] = {}
        self._lock = threading.Lock()

    def read(self, start: np.ndarray, count: int) -> np.ndarray:
        """Token ids of the ranges [start, start + count), (len(start), count), type of the shards.

        Raises UserError where a block is damaged, or a file has become shorter.
        """
        tokens = np.empty((len(start), count), dtype=self.dtype)
        data, itemsize = memoryview(tokens).cast("B"), self.dtype.itemsize
        pieces = self._pieces(np.asarray(start, dtype=np.int64), count)
        first_byte, end_byte = pieces.start * itemsize, pieces.stop * itemsize
        place = (pieces.row * count + pieces.column) * itemsize
        with self._lock:
            for shard, mine in groups(pieces.shard):
                opened = self._opened(shard)
                fd = opened.fd
                opened.checker.check(fd, first_byte[mine], end_byte[mine])
                path = self.shards[shard].bin_path
                ranges = (place[mine], first_byte[mine], end_byte[mine])
                for at, low, high in zip(*(column.tolist() for column in ranges), strict=True):
                    target = data[at : at + high - low]
                    if os.preadv(fd, (target,), low) != high - low:
                        read_exactly(fd, target, low, path)
        return tokens

    def document_starts(self, start: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, position) of each document that starts in [start[row], start[row] + count).

        Both int64, ascending by row then position, without repeats. Only the index is read.
        """
        pieces = self._pieces(np.asarray(start, dtype=np.int64), count)
        found = []
        with self._lock:
            for shard, mine in groups(pieces.shard):
                piece, token = self._opened(shard).document_starts(
                    pieces.start[mine], pieces.stop[mine]
                )
                row, origin = pieces.row[mine], pieces.column[mine] - pieces.start[mine]
                found.append(row[piece] * count + token + origin[piece])
        if len(found) == 1:
            return np.divmod(found[0], count)
        return np.divmod(np.sort(np.concatenate(found)), count)

    def damaged(self, start: np.ndarray, count: int) -> np.ndarray:
        """True for ranges [start, start + count) that touch a damaged block, bool (len(start),)."""
        pieces = self._pieces(np.asarray(start, dtype=np.int64), count)
        found = np.zeros(len(start), dtype=bool)
        with self._lock:
            for shard, mine in groups(pieces.shard):
                opened, itemsize = self._opened(shard), self.dtype.itemsize
                first_byte, end_byte = pieces.start[mine] * itemsize, pieces.stop[mine] * itemsize
                is_bad = opened.checker.damaged(opened.fd, first_byte, end_byte)
                found[pieces.row[mine][is_bad]] = True
        return found

    def document_range(self, document: int) -> tuple[int, int]:
        """Tokens [first, end) of a document, its end id included.

        Documents count from 0 over all shards.
        """
        assert 0 <= document < self.num_documents
        shard = int(np.searchsorted(self._document_ends, document, side="right"))
        inner = document - int(self._document_ends[shard] - self.shards[shard].num_documents)
        with self._lock:
            first, end = self._opened(shard).document_range(inner)
        return int(self._starts[shard]) + first, int(self._starts[shard]) + end

    def document_at(self, token: int) -> int:
        """The number of the document that a token belongs to."""
        assert 0 <= token < self.num_tokens
        shard = int(np.searchsorted(self._ends, token, side="right"))
        with self._lock:
            inner = self._opened(shard).document_at(token - int(self._starts[shard]))
        return inner + int(self._document_ends[shard] - self.shards[shard].num_documents)

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _opened(self, shard: int) -> _OpenShard:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].close()
        facts = self.shards[shard]
        if shard not in self._checkers:
            bin_bytes = facts.num_tokens * facts.dtype.itemsize
            self._checkers[shard] = BlockChecker(facts.bin_path, bin_bytes, facts.is_hashed)
        self._open[shard] = _OpenShard(facts, self._checkers[shard])
        return self._open[shard]

    def _pieces(self, start: np.ndarray, count: int) -> Pieces:
        assert count > 0
        assert not len(start) or (start.min() >= 0 and start.max() + count <= self.num_tokens)
        stop = start + count
        first = np.searchsorted(self._ends, start, side="right")
        if len(start) and (stop <= self._ends[first]).all():  # no window crosses a shard's end
            low = start - self._starts[first]
            return Pieces(np.arange(len(start)), np.zeros_like(start), first, low, low + count)
        last = np.searchsorted(self._ends, stop, side="left")
        num_pieces = last - first + 1
        row = np.repeat(np.arange(len(start)), num_pieces)
        shard = np.arange(len(row)) - (np.cumsum(num_pieces) - num_pieces - first)[row]
        origin = self._starts[shard]
        low = np.maximum(start[row], origin)
        high = np.minimum(stop[row], self._ends[shard])
        pieces = Pieces(row, low - start[row], shard, low - origin, high - origin)
        if len(row) == len(start):
            return pieces
        return Pieces(*(column[high > low] for column in pieces))  # an empty shard inside a window


class _OpenShard:
    """File handles and mapped index of one shard."""

    def __init__(self, facts: Shard, checker: BlockChecker):
        self.fd = os.open(facts.bin_path, os.O_RDONLY | os.O_CLOEXEC)
        # Closes the file also where a stream is dropped without a call of close, as in a sweep.
        self._close = weakref.finalize(self, os.close, self.fd)
        self.checker = checker
        self._itemsize = facts.dtype.itemsize
        self._num_tokens, self._num_documents = facts.num_tokens, facts.num_documents
        self._index = IndexView(
            facts.idx_path, facts.num_sequences, facts.num_entries, facts.offsets
        )
        self._is_sequence_document = (
            facts.num_entries == facts.num_sequences + 1 == facts.num_documents + 1
        )

    def document_starts(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(range number, token) of the documents that start in the token ranges [start, stop)."""
        bounds = np.concatenate([start, stop])
        bound = first_at_least(self._index.offsets, bounds * self._itemsize)  # in sequences
        if not self._is_sequence_document:
            bound = first_at_least(self._index.documents, bound)
        low, high = bound[: len(start)], bound[len(start) :]
        counts = high - low
        which = np.repeat(np.arange(len(start)), counts)
        document = np.arange(len(which)) + (low - np.cumsum(counts) + counts)[which]
        sequence = document if self._is_sequence_document else self._index.documents[document]
        token = self._index.offsets[sequence] // self._itemsize
        # An empty document starts where the next one does: both make one boundary.
        is_new = np.ones(len(token), dtype=bool)
        is_new[1:] = (token[1:] != token[:-1]) | (which[1:] != which[:-1])
        return which[is_new], token[is_new]

    def document_range(self, document: int) -> tuple[int, int]:
        """Tokens [first, end) of a document of this shard."""
        bounds = [self._first_token(document), self._first_token(document + 1)]
        return bounds[0], bounds[1]

    def _first_token(self, document: int) -> int:
        if document >= self._num_documents:
            return self._num_tokens
        sequence = document if self._is_sequence_document else int(self._index.documents[document])
        if sequence >= len(self._index.offsets):  # an empty last document
            return self._num_tokens
        return int(self._index.offsets[sequence]) // self._itemsize

    def document_at(self, token: int) -> int:
        """The last document that starts at or before a token: the one that holds it."""
        after = np.array([(token + 1) * self._itemsize])
        bound = first_at_least(self._index.offsets, after)  # sequences that start up to the token
        if not self._is_sequence_document:
            bound = first_at_least(self._index.documents, bound)
        return min(int(bound[0]), self._num_documents) - 1

    def close(self) -> None:
        self._close()
        del self._index


def groups(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(value, its indices in ascending order) for each distinct value, ascending.

    A single distinct value takes a fast path.
    """
    if not len(values):
        return
    first = int(values[0])
    if (values == first).all():
        yield first, np.arange(len(values))
        return
    order = np.argsort(values, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(values[order])) + 1):
        yield int(values[mine[0]]), mine
