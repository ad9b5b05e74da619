"""Writing one shard: `.bin`, `.idx` and `.xxh`, streamed, and published only when complete.

Rule: a file has its final name only after its last byte is on disk (temporary name, fsync, rename).
Memory does not grow with the number of documents: lengths are written to a temporary file, and
offsets are computed from it at the end.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import numpy as np
import xxhash

from base.errors import UserError
from data.corpus.block_hashes import BlockHasher
from data.corpus.indexed import CHUNK, CODES, HEADER, MAGIC, MAX_SEQUENCE_ITEMS

SPILL_ITEMS = 1 << 16


class ShardWriter:
    """Writes the documents of one shard in order.

    prefix: path without suffix; dtype: uint16 or int32; eod_id: counted for the manifest. Use
    `close` to publish or `abort` to leave nothing behind.
    """

    def __init__(
        self,
        prefix: Path,
        dtype: np.dtype,
        eod_id: int,
        max_sequence_items: int = MAX_SEQUENCE_ITEMS,
    ):
        self.prefix, self.dtype, self.eod_id = prefix, np.dtype(dtype), eod_id
        self.num_tokens = self.num_documents = self.num_sequences = self.num_eod = 0
        self.min_id, self.max_id = None, None
        self._max_items = max_sequence_items
        self._bin = PublishedFile(prefix.with_suffix(".bin"))
        self._lengths = _Spill(prefix.with_suffix(".lengths.tmp"))
        self._sequences = _Spill(prefix.with_suffix(".documents.tmp"))
        self._blocks = BlockHasher()

    def add(self, ids: np.ndarray) -> None:
        """Append one document, int (n,). Raises UserError for an id that does not fit: no id is
        cast in silence.
        """
        ids = np.asarray(ids)
        if len(ids):
            self._check_range(ids)
            data = memoryview(np.ascontiguousarray(ids, dtype=self.dtype)).cast("B")
            self._bin.write(data)
            self._blocks.update(data)
        pieces = range(0, max(1, len(ids)), self._max_items)
        for start in pieces:
            self._lengths.add(min(self._max_items, len(ids) - start))
        self._sequences.add(len(pieces))
        self.num_tokens += len(ids)
        self.num_sequences += len(pieces)
        self.num_documents += 1

    def add_many(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents that lie back to back in `ids`, int (sum of lengths,); like `add` for
        each.
        """
        if len(lengths) and int(lengths.max()) > self._max_items:
            for one in np.split(ids, np.cumsum(lengths)[:-1]):
                self.add(one)
            return
        if len(ids):
            self._check_range(ids)
            data = memoryview(np.ascontiguousarray(ids, dtype=self.dtype)).cast("B")
            self._bin.write(data)
            self._blocks.update(data)
        self._lengths.extend(lengths)
        self._sequences.extend(np.ones(len(lengths), dtype=np.int32))
        self.num_tokens += len(ids)
        self.num_sequences += len(lengths)
        self.num_documents += len(lengths)

    def close(self) -> dict:
        """Publish the files; returns the shard's entry for the manifest."""
        index = PublishedFile(self.prefix.with_suffix(".idx"))
        side = PublishedFile(self.prefix.with_suffix(".xxh"))
        self._write_index(index)
        side.write(self._blocks.side_file())
        for file in (self._bin, side, index):
            file.publish()
        return {
            "name": self.prefix.name,
            "tokens": self.num_tokens,
            "sequences": self.num_sequences,
            "documents": self.num_documents,
            "min_id": self.min_id,
            "max_id": self.max_id,
            "eod_count": self.num_eod,
            "bin_bytes": self._bin.size,
            "bin_xxh3": self._bin.digest(),
            "idx_bytes": index.size,
            "idx_xxh3": index.digest(),
            "xxh_xxh3": side.digest(),
        }

    def abort(self) -> None:
        self._bin.discard()
        self._lengths.discard()
        self._sequences.discard()

    def _check_range(self, ids: np.ndarray) -> None:
        if ids.dtype.kind not in "iu":
            raise UserError(
                f"{self.prefix}: token ids are {ids.dtype.name}, not whole numbers; 1.5 is no id"
            )
        low, high = int(ids.min()), int(ids.max())
        limit = np.iinfo(self.dtype).max
        if low < 0 or high > limit:
            raise UserError(
                f"{self.prefix}: token id {low if low < 0 else high} does not fit "
                f"{self.dtype.name} (0 to {limit}); the tokenizer gives ids beyond its vocabulary "
                "size"
            )
        self.min_id = low if self.min_id is None else min(self.min_id, low)
        self.max_id = high if self.max_id is None else max(self.max_id, high)
        self.num_eod += int(np.count_nonzero(ids == self.eod_id))

    def _write_index(self, index: PublishedFile) -> None:
        code = CODES[self.dtype]
        index.write(HEADER.pack(MAGIC, 1, code, self.num_sequences, self.num_documents + 1))
        for chunk in self._lengths.chunks():
            index.write(chunk)
        for ends in _running_sums(self._lengths, self.dtype.itemsize):
            index.write(ends)
        for ends in _running_sums(self._sequences, 1):
            index.write(ends)
        index.write(np.array([self.num_sequences], dtype="<i8"))
        self._lengths.discard()
        self._sequences.discard()


class PublishedFile:
    """A file that appears under its name only when `publish` is called; it counts and hashes
    (xxh3-128) its bytes.
    """

    def __init__(self, path: Path):
        self.path, self.size = path, 0
        self._temporary = path.with_name(path.name + ".tmp")
        self._hash = xxhash.xxh3_128()
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - lives as long as the object

    def write(self, data) -> None:
        data = memoryview(data).cast("B")
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class _Spill:
    """A column of int32 that is kept in a file, 4 bytes a value."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "w+b")  # noqa: SIM115 - lives as long as the object
        self._recent = array("i")

    def add(self, value: int) -> None:
        self._recent.append(value)
        if len(self._recent) >= SPILL_ITEMS:
            self._flush()

    def extend(self, values: np.ndarray) -> None:
        self._flush()
        self._file.write(np.ascontiguousarray(values, dtype=np.int32).data)

    def chunks(self):
        self._flush()
        self._file.seek(0)
        while data := self._file.read(4 * CHUNK):
            yield np.frombuffer(data, dtype=np.int32).astype("<i4", copy=False)

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._recent.tofile(self._file)
        self._recent = array("i")


def _running_sums(column: _Spill, scale: int):
    """Exclusive running sums of a column times `scale`, int64, in chunks."""
    before = 0
    for chunk in column.chunks():
        ends = np.cumsum(chunk, dtype=np.int64)
        yield ((before + ends - chunk) * scale).astype("<i8", copy=False)
        before += int(ends[-1])


def file_hash(path: Path) -> str:
    """xxh3-128 of a file, or of the files of a folder in order of their names."""
    digest = xxhash.xxh3_128()
    for one in sorted(path.iterdir()) if path.is_dir() else [path]:
        with open(one, "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    return digest.hexdigest()
