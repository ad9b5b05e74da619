"""Megatron's indexed format: a `.bin` of token ids back to back and an `.idx` with the documents.

    .idx, little endian: 9 bytes magic | u64 version 1 | u8 type code | u64 S sequences | u64 D
                         | i32[S] lengths in items | i64[S] byte offsets
                         | i64[D] first sequence of each document, then S  [| i8[S] modes]

This module knows every byte of the format and the dialects found in public data.

Rule: the type code is never believed alone; the size of the .bin decides. We write uint16 (code 8)
or int32 (code 4) and check the range of ids on each write.

Units: items are tokens; offsets are bytes; a document is one or more sequences.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from base.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
FAIRSEQ_HEADER_BYTES = HEADER.size - 8  # the same magic, without the number of documents
MAX_SEQUENCE_ITEMS = 1 << 30  # a length is an int32; a longer document becomes several sequences
CHUNK = 1 << 20  # items of the index that are checked at once

# Meaning of the type codes in Megatron and its relatives (float codes never hold ids), and in
# DeepSpeed's data sampler.
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
DEEPSPEED_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 7: "<u4", 8: "<u8"}
CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}


def token_dtype(vocab_size: int) -> np.dtype:
    """The type for every id below `vocab_size`: uint16 where the largest possible id fits, else
    int32.
    """
    return np.dtype("<u2") if vocab_size - 1 <= 0xFFFF else np.dtype("<i4")


@dataclass(frozen=True)
class Shard:
    """Facts of a checked pair of .idx and .bin.

    Keeps no file open and no array that grows with the corpus, except offsets that had to be
    computed again.
    """

    prefix: Path
    dtype: np.dtype
    num_tokens: int
    num_sequences: int
    num_documents: int
    num_entries: int  # length of the document array
    notes: tuple[str, ...] = ()  # oddities that were tolerated
    offsets: np.ndarray | None = field(default=None, repr=False)
    is_hashed: bool = True  # False: there are no hashes to check its blocks against

    @property
    def bin_path(self) -> Path:
        return self.prefix.with_suffix(".bin")

    @property
    def idx_path(self) -> Path:
        return self.prefix.with_suffix(".idx")


class IndexView:
    """The arrays of an .idx, mapped into memory. Not aligned to 8 bytes: see `first_at_least`."""

    def __init__(
        self, path: Path, num_sequences: int, num_entries: int, offsets: np.ndarray | None = None
    ):
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        after_lengths = HEADER.size + 4 * num_sequences
        self.lengths = np.frombuffer(self._map, "<i4", num_sequences, HEADER.size)
        self.offsets = np.frombuffer(self._map, "<i8", num_sequences, after_lengths)
        self.documents = np.frombuffer(
            self._map, "<i8", num_entries, after_lengths + 8 * num_sequences
        )
        if offsets is not None:
            self.offsets = offsets


def check_shard(prefix: Path) -> Shard:
    """Read and check an .idx against its .bin: header, sizes, bounds, offsets, documents.

    Raises UserError naming the file, what was expected and what was found.
    """
    idx, bin_bytes = prefix.with_suffix(".idx"), prefix.with_suffix(".bin").stat().st_size
    code, num_sequences, num_entries = _read_header(idx)
    view = IndexView(idx, num_sequences, num_entries)
    num_tokens = _sum_of_lengths(idx, view.lengths)
    dtype = _resolve_type(idx, code, num_tokens, bin_bytes)
    notes = []
    offsets = None
    if not _has_plain_offsets(idx, view, dtype.itemsize):
        notes.append(f"{idx}: offsets wrapped past 2**31 bytes; computed again from the lengths")
        offsets = np.cumsum(view.lengths, dtype=np.int64) - view.lengths
        offsets *= dtype.itemsize
    num_documents = _count_documents(idx, view.documents, num_sequences, notes)
    return Shard(
        prefix, dtype, num_tokens, num_sequences, num_documents, num_entries, tuple(notes), offsets
    )


def first_at_least(array: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Index of the first element >= each wanted value, int64. `array` ascends and may be unaligned.

    numpy's searchsorted copies an unaligned array whole at each call; this touches log2(len)
    elements per value.
    """
    low = np.zeros(len(wanted), dtype=np.int64)
    if not len(array):
        return low
    step = 1 << (len(array).bit_length() - 1)
    while step:
        middle = low + step
        # Elements before `low` are known to be smaller; compare the last of the next `step`.
        is_smaller = array[np.minimum(middle, len(array)) - 1] < wanted
        low = np.where(is_smaller & (middle <= len(array)), middle, low)
        step >>= 1
    return low


def _read_header(idx: Path) -> tuple[int, int, int]:
    size = idx.stat().st_size
    with open(idx, "rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(OLD_MAGIC):
        raise UserError(
            f"{idx}: has the old TNTIDX format, expected MMIDIDX; convert it with Megatron's tools"
        )
    if len(head) < HEADER.size:
        raise UserError(f"{idx}: expected a header of {HEADER.size} bytes, found {len(head)} bytes")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise UserError(
            f"{idx}: expected the magic {MAGIC!r}, found {magic!r}; not a Megatron index"
        )
    if version != 1:
        raise UserError(f"{idx}: expected version 1, found {version}")
    if size == FAIRSEQ_HEADER_BYTES + 12 * num_sequences:
        raise UserError(
            f"{idx}: is an index of fairseq, which has no documents; write the data with Megatron's"
            " tools, or its ids as a flat array"
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if num_entries < 1 or size not in (
        expected,
        expected + num_sequences,
    ):  # + modes of a multimodal file
        raise UserError(
            f"{idx}: expected {expected} bytes for {num_sequences} sequences and {num_entries} "
            f"document entries, found {size} bytes; restore it from a copy or build the corpus "
            "again"
        )
    return code, num_sequences, num_entries


def _sum_of_lengths(idx: Path, lengths: np.ndarray) -> int:
    total = 0
    for start in range(0, len(lengths), CHUNK):
        chunk = lengths[start : start + CHUNK]
        if chunk.min() < 0:
            at = start + int(np.argmin(chunk))
            raise UserError(
                f"{idx}: expected lengths >= 0, found {int(lengths[at])} for sequence {at}"
            )
        total += int(chunk.sum(dtype=np.int64))
    return total


def _resolve_type(idx: Path, code: int, num_tokens: int, bin_bytes: int) -> np.dtype:
    names = {"Megatron": MEGATRON_TYPES.get(code), "DeepSpeed": DEEPSPEED_TYPES.get(code)}
    tried = {who: np.dtype(name) for who, name in names.items() if name}
    for dtype in tried.values():
        if num_tokens * dtype.itemsize == bin_bytes:
            return dtype
    if not tried:
        raise UserError(f"{idx}: expected a type code from 1 to 8, found {code}")
    meanings = ", ".join(
        f"{dtype.name} as {who} means it ({num_tokens * dtype.itemsize} bytes)"
        for who, dtype in tried.items()
    )
    raise UserError(
        f"{idx.with_suffix('.bin')}: found {bin_bytes} bytes, expected {num_tokens} tokens of type "
        f"code {code}: {meanings}; restore the pair from a copy or build the corpus again"
    )


def _has_plain_offsets(idx: Path, view: IndexView, itemsize: int) -> bool:
    """True where each offset is the sum of the lengths before it; False where only its low 32 bits
    are, as from writers that added in int32 under numpy 2. Raises UserError for anything else.
    """
    is_plain, running = True, 0
    for start in range(0, len(view.lengths), CHUNK):
        lengths = view.lengths[start : start + CHUNK].astype(np.int64)
        expected = running + (np.cumsum(lengths) - lengths) * itemsize
        found = view.offsets[start : start + CHUNK]
        running += int(lengths.sum()) * itemsize
        if is_plain and np.array_equal(found, expected):
            continue
        is_plain = False
        wrong = np.flatnonzero((found != expected) & (found != expected.astype(np.int32)))
        if len(wrong):
            at = int(wrong[0])
            raise UserError(
                f"{idx}: expected byte offset {int(expected[at])} for sequence {start + at}, found "
                f"{int(found[at])}; restore it from a copy or build the corpus again"
            )
    return is_plain


def _count_documents(idx: Path, documents: np.ndarray, num_sequences: int, notes: list[str]) -> int:
    previous = 0
    for start in range(0, len(documents), CHUNK):
        chunk = documents[start : start + CHUNK]
        bad = np.flatnonzero(np.diff(chunk, prepend=previous) < 0)
        if len(bad) or chunk[-1] > num_sequences or (start == 0 and chunk[0] != 0):
            raise UserError(
                f"{idx}: expected document starts that ascend from 0 to {num_sequences} sequences, "
                f"found {int(chunk[0])} .. {int(chunk.max())}"
                + (f", descending at document {start + int(bad[0])}" if len(bad) else "")
            )
        previous = int(chunk[-1])
    if previous == num_sequences:
        return len(documents) - 1
    notes.append(f"{idx}: the document array ends at {previous}, not at {num_sequences} sequences")
    return len(documents)
