"""Windows of token ids become model inputs: input ids, labels, segments, cumulative lengths.

    tokens   t0 e | t2 t3 t4      one window: T + 1 tokens, "|" = a document starts, e = its end id
    input    t0   e  t2 t3
    labels   e    t2 t3 t4        the end id is a target, and begins the next document as its input
    segment  0    1  1  1

    segment  0    0  1  1         where no begin token precedes documents (older corpora), and where
    labels   e -100  t3 t4        the begin token is stored as t2: the first id is no target

Rule: boundaries come from the index, never from a search for the end id; the tokens only confirm
them. With attend="across" a row is one segment and every label counts.

Everything is vectorised; no loop runs over tokens. Shapes: B rows, T = seq_len. While the sequence
length is warmed up, a batch has more and shorter rows, whose tokens and labels in order are the
same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from base.errors import UserError

NO_CUTS = np.zeros(0, dtype=np.int64)
IGNORED = -100  # torch's and Hugging Face's mark for "no target here"


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, numpy, contiguous."""

    input_ids: np.ndarray  # (B, T) int64
    # (B, T) int64, labels[b, t] is the target of input_ids[b, t]; IGNORED = no target
    labels: np.ndarray
    segment_ids: np.ndarray  # (B, T) int32, number of the document within its row
    # int32, ends of the documents in the flattened rows; 0 first, B * T repeated at the end
    cu_seqlens: np.ndarray
    max_seqlen: int  # no document in the batch is longer: a power of two, or T
    # (B,) uint64, xxh3-64 of each window's ids, uncut; 0 for a padding row
    sample_hashes: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Windows with their document starts.

    tokens: (B, T + 1), any integer type; starts: (row, position) pairs, ascending.
    """

    tokens: np.ndarray
    start_row: np.ndarray
    start_position: np.ndarray
    hashes: np.ndarray
    start_is_begun: np.ndarray | None = None  # see `lost_targets`; None = False for all

    @property
    def seq_len(self) -> int:
        return self.tokens.shape[1] - 1

    def split(self, parts: int) -> list[Rows]:
        """The same rows in that many equal parts, in order; views."""
        size = len(self.tokens) // parts
        if parts == 1:
            return [self]
        bounds = np.arange(parts + 1) * size
        at = np.searchsorted(self.start_row, bounds).tolist()
        return [
            Rows(
                self.tokens[low : low + size],
                self.start_row[at[number] : at[number + 1]] - low,
                self.start_position[at[number] : at[number + 1]],
                self.hashes[low : low + size],
                None
                if self.start_is_begun is None
                else self.start_is_begun[at[number] : at[number + 1]],
            )
            for number, low in enumerate(bounds[:-1].tolist())
        ]


def make_batches(
    rows: Rows,
    micro_batch: int,
    attend: str,
    is_padding: np.ndarray | None = None,
    is_masked: np.ndarray | None = None,
    length: int | None = None,
) -> list[Batch]:
    """Cut rows into micro-batches of `micro_batch` rows each, in order.

    is_padding: (B,) rows without targets; is_masked: (B, T + 1) tokens that are no target; length:
    tokens that the model sees at once, a divisor of T (default T). Each row becomes T / length
    rows of the model.
    """
    num_rows, seq_len = len(rows.tokens), rows.seq_len
    length = length or seq_len
    assert num_rows % micro_batch == 0
    assert seq_len % length == 0
    # Labels, without those across a document start, of padding, and of masked tokens.
    input_ids = rows.tokens[:, :-1].astype(np.int64)
    labels = rows.tokens[:, 1:].astype(np.int64)
    flat = NO_CUTS
    if attend == "within" and len(rows.start_row):
        starts = rows.start_row, rows.start_position, rows.start_is_begun
        row, position = lost_targets(*starts, attend)
        labels.reshape(-1)[row * seq_len + position - 1] = IGNORED
        flat = _segment_starts(*starts, seq_len)
    if is_padding is not None:
        labels[is_padding] = IGNORED
    if is_masked is not None:
        labels[is_masked[:, 1:]] = IGNORED
    if length < seq_len:
        # The last target of a part is the first input of the next, as between windows.
        input_ids, labels = input_ids.reshape(-1, length), labels.reshape(-1, length)
        flat = flat[flat % length > 0]  # a part begins there anyway
    # Segments and cumulative lengths, and the micro-batches.
    size = micro_batch * seq_len // length  # rows of a micro-batch
    segment_ids = segments(flat, len(labels), length)
    first = flat.searchsorted(np.arange(0, num_rows + 1, micro_batch) * seq_len).tolist()
    batches = []
    for number in range(num_rows // micro_batch):
        mine = slice(number * size, (number + 1) * size)
        inner = flat[first[number] : first[number + 1]] - number * micro_batch * seq_len
        cu_seqlens, max_seqlen = cumulative_lengths(inner, size, length)
        batches.append(
            Batch(
                input_ids[mine],
                labels[mine],
                segment_ids[mine],
                cu_seqlens,
                max_seqlen,
                rows.hashes[number * micro_batch : (number + 1) * micro_batch],
            )
        )
    return batches


def lost_targets(
    row: np.ndarray, position: np.ndarray, is_begun: np.ndarray | None, attend: str
) -> tuple[np.ndarray, np.ndarray]:
    """The document starts, as (row, position), whose first id is no target in its window.

    is_begun: True where the end id before the start is the first input of the document, so that its
    first id is a target; None = False for all. With attend="across" no target is lost.
    """
    assert attend in ("within", "across")
    is_lost = position >= 1 if attend == "within" else np.zeros(len(position), dtype=bool)
    if is_begun is not None:
        is_lost = is_lost & ~is_begun
    return row[is_lost], position[is_lost]


def _segment_starts(
    row: np.ndarray, position: np.ndarray, is_begun: np.ndarray | None, seq_len: int
) -> np.ndarray:
    """Places in the flattened inputs at which a segment starts inside a row, ascending."""
    first = position if is_begun is None else position - is_begun
    is_inside = (first >= 1) & (first < seq_len)  # a start at T only ends the last document
    return row[is_inside] * seq_len + first[is_inside]


def num_targets(
    steps: int,
    num_rows: int,
    seq_len: int,
    row: np.ndarray,
    position: np.ndarray,
    attend: str,
    is_begun: np.ndarray | None = None,
) -> list[int]:
    """Targets of each of `steps` batches of `num_rows` windows of T + 1 tokens.

    row, position, is_begun: the document starts of all batches, rows counted through. No token is
    read.
    """
    lost_row, _ = lost_targets(row, position, is_begun, attend)
    lost = np.bincount(lost_row // num_rows, minlength=steps)
    return (num_rows * seq_len - lost).tolist()


def segments(flat: np.ndarray, num_rows: int, seq_len: int) -> np.ndarray:
    """Number of the document within its row, (num_rows, T) int32.

    flat: ascending positions in the flattened rows at which a document starts inside a row.
    """
    if not len(flat):
        return np.zeros((num_rows, seq_len), dtype=np.int32)
    starts = np.concatenate([np.arange(0, num_rows * seq_len + 1, seq_len), flat])
    starts.sort()
    row = starts[:-1] // seq_len
    number = np.arange(len(row), dtype=np.int32) - row.searchsorted(row).astype(np.int32)
    return number.repeat(starts[1:] - starts[:-1]).reshape(num_rows, seq_len)


def cumulative_lengths(inner: np.ndarray, num_rows: int, seq_len: int) -> tuple[np.ndarray, int]:
    """(cu_seqlens, max_seqlen) of flattened rows that are cut at `inner` (ascending) and at their
    own ends.

    The count of cu_seqlens depends on (rows, seq_len) alone, so shapes stay fixed under
    compilation: one document per 32 tokens, at least 8 a row. It doubles for batches of documents
    shorter than that, which is correct but compiles again. max_seqlen is rounded up to a power of
    two for the same reason.
    """
    if not len(inner):
        return _uncut(num_rows, seq_len).copy(), min(seq_len, 1 << (seq_len - 1).bit_length())
    ends = np.concatenate([np.arange(0, num_rows * seq_len + 1, seq_len), inner])
    ends.sort()
    count = num_rows * max(8, seq_len // 32) + 1
    while count < len(ends):
        count = 2 * (count - 1) + 1
    padded = np.full(count, num_rows * seq_len, dtype=np.int32)
    padded[: len(ends)] = ends
    longest = int((ends[1:] - ends[:-1]).max())
    return padded, min(seq_len, 1 << (longest - 1).bit_length())


@functools.lru_cache(maxsize=16)
def _uncut(num_rows: int, seq_len: int) -> np.ndarray:
    """cu_seqlens of rows of one document each."""
    count = num_rows * max(8, seq_len // 32) + 1
    padded = np.full(count, num_rows * seq_len, dtype=np.int32)
    padded[: num_rows + 1] = np.arange(num_rows + 1) * seq_len
    return padded


@functools.lru_cache(maxsize=64)
def own_positions(batch: int, data_rank: int, data_size: int, micro_batch: int) -> np.ndarray:
    """Positions in the global batch that a data-parallel rank trains on, in its order, int64."""
    assert 0 <= data_rank < data_size
    slab = data_size * micro_batch
    if batch % slab:
        low = batch // slab * slab
        nearest = f"{low} or {low + slab}" if low else f"{slab}"
        raise UserError(
            f"a global batch of {batch} sequences is not a multiple of {data_size} data ranks x "
            f"micro_batch {micro_batch} = {slab}; nearest: {nearest} sequences"
        )
    micro_step = np.arange(0, batch, slab)[:, None]
    positions = (micro_step + data_rank * micro_batch + np.arange(micro_batch)).reshape(-1)
    positions.flags.writeable = False  # the cache hands the same array to every caller
    return positions
