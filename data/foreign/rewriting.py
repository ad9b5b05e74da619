"""Token files that are written into new shards: other types, and files whose documents go to two
splits.

Rule: a document is written whole, in the order of its file, or left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from base.errors import UserError
from data.corpus.corpus_writer import SHARD_BYTES, hash_limit
from data.corpus.shard_writer import ShardWriter
from data.foreign.flat_arrays import FlatStatistics
from data.foreign.linking import Facts
from data.foreign.token_files import Foreign

Sides = Callable[[np.ndarray, np.ndarray], Iterable[tuple[str, np.ndarray]]]


@dataclass
class Places:
    """Folder, type, names and entries of new shards."""

    folder: Path
    dtype: np.dtype
    eod_id: int
    names: dict[str, Iterator[str]]
    shards: dict[str, list[dict]]

    def open(self, split: str) -> ShardWriter:
        return ShardWriter(self.folder / next(self.names[split]), self.dtype, self.eod_id)


def rewrite(
    one: Foreign,
    split: str,
    places: Places,
    cut: str | float,
    vocab_size: int,
    facts: Facts,
    advance,
    statistics: FlatStatistics | None = None,
) -> None:
    """Write the documents of a file into new shards; a shard ends with the chunk that fills it.

    cut: shares of its documents in order, such as "969,30,1"; or the share that is held out by
    hash, where 0.0 leaves all in `split`. statistics: takes the ids of a flat array. Raises
    UserError for an id beyond the vocabulary.
    """
    writers: dict[str, ShardWriter] = {}
    sides, own = _sides(one, split, cut), Facts()
    for ids, lengths in one.chunks():
        own.add(ids, lengths, one.eod_id, one.begin_id)
        if own.max_id is not None and (own.max_id >= vocab_size or own.min_id < 0):
            found = own.max_id if own.max_id >= vocab_size else own.min_id
            what = "its true dtype, or " if one.kind == "flat" else ""
            raise UserError(
                f"{one.path}: holds the id {found}, expected 0 to {vocab_size - 1}; name {what}the "
                "tokenizer that made it, or its vocab_size"
            )
        if statistics:
            statistics.add(ids)
        for side, mine in sides(ids, lengths):
            if not mine.any():
                continue
            writer = writers.get(side) or writers.setdefault(side, places.open(side))
            writer.add_many(ids[np.repeat(mine, lengths)] if not mine.all() else ids, lengths[mine])
            if writer.num_tokens * places.dtype.itemsize >= SHARD_BYTES:
                places.shards.setdefault(side, []).append(writers.pop(side).close())
        advance(ids.nbytes)
    for side, writer in writers.items():
        places.shards.setdefault(side, []).append(writer.close())
    facts.merge(own)


def _sides(one: Foreign, split: str, cut: str | float) -> Sides:
    """A function from (ids, lengths) of the next documents of a file to (split, mask) pairs."""
    if isinstance(cut, str):
        return _by_number(one, cut)
    limit = hash_limit(cut)

    def by_hash(ids: np.ndarray, lengths: np.ndarray) -> list[tuple[str, np.ndarray]]:
        if not limit:
            return [(split, np.ones(len(lengths), dtype=bool))]
        documents = np.split(ids.astype("<i4"), np.cumsum(lengths)[:-1])
        digests = [xxhash.xxh3_64_intdigest(document.data) for document in documents]
        held = np.array(digests, dtype=np.uint64) < np.uint64(limit)
        return [("train", ~held), ("valid", held)]

    return by_hash


def _by_number(one: Foreign, split: str) -> Sides:
    """Cut a file like Megatron: at the shares of its number of documents, rounded."""
    shares = [float(share) for share in split.split(",")]
    ends = np.round(np.cumsum(shares) / sum(shares) * one.num_documents).astype(np.int64)
    done = 0

    def by_number(ids: np.ndarray, lengths: np.ndarray) -> list[tuple[str, np.ndarray]]:
        nonlocal done
        number = done + np.arange(len(lengths))
        done += len(lengths)
        return [("train", number < ends[0]), ("valid", (number >= ends[0]) & (number < ends[1]))]

    return by_number
