"""Pairs of Megatron files that become shards as they are: two links and an entry in the manifest.

Rule: the entry of `link` holds hashes, since every byte was read; the entry of `link_unread` has
sizes and the index alone, and no hash, so that a reader knows which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import xxhash

from data.corpus.block_hashes import BlockHasher
from data.corpus.shard_writer import PublishedFile, file_hash
from data.foreign.token_files import Foreign


@dataclass
class Facts:
    """Findings of one pass over documents, or of a look at some of them."""

    documents: int = 0
    seen: int = 0  # of them, those whose first and last ids were read
    not_ended: int = 0
    begun: int = 0  # documents whose first id is the begin id
    min_id: int | None = None
    max_id: int | None = None
    eod_count: int = 0

    def add(
        self, ids: np.ndarray, lengths: np.ndarray, eod_id: int, begin_id: int | None = None
    ) -> None:
        """Take documents that lie back to back in `ids`."""
        self.documents += len(lengths)
        self.seen += len(lengths)
        if not len(ids):
            self.not_ended += len(lengths)
            return
        low, high = int(ids.min()), int(ids.max())
        self.min_id = low if self.min_id is None else min(self.min_id, low)
        self.max_id = high if self.max_id is None else max(self.max_id, high)
        self.eod_count += int(np.count_nonzero(ids == eod_id))
        last = np.cumsum(lengths) - 1
        if begin_id is not None:
            first = np.minimum(last + 1 - lengths, len(ids) - 1)
            self.begun += int(np.count_nonzero((lengths > 0) & (ids[first] == begin_id)))
        is_ended = (lengths > 0) & (ids[np.maximum(last, 0)] == eod_id)
        self.not_ended += int(np.count_nonzero(~is_ended))

    def merge(self, own: Facts) -> None:
        """Add what was found elsewhere."""
        for one in fields(Facts):
            a, b = getattr(self, one.name), getattr(own, one.name)
            if one.name in ("min_id", "max_id"):
                known = [value for value in (a, b) if value is not None]
                pick = min if one.name == "min_id" else max
                setattr(self, one.name, pick(known) if known else None)
            else:
                setattr(self, one.name, a + b)


def link(one: Foreign, prefix: Path, facts: Facts, advance) -> dict:
    """Link a pair of files; returns the entry that one pass over them gives."""
    blocks, whole = BlockHasher(), xxhash.xxh3_128()
    own = Facts()
    for ids, lengths in one.chunks():
        data = memoryview(ids).cast("B")
        blocks.update(data)
        whole.update(data)
        own.add(ids, lengths, one.eod_id, one.begin_id)
        advance(len(data))
    facts.merge(own)
    side = PublishedFile(prefix.with_suffix(".xxh"))
    side.write(blocks.side_file())
    side.publish()
    return _linked(one, prefix) | {
        "min_id": own.min_id,
        "max_id": own.max_id,
        "eod_count": own.eod_count,
        "bin_xxh3": whole.hexdigest(),
        "xxh_xxh3": side.digest(),
    }


def link_unread(one: Foreign, prefix: Path, facts: Facts, advance) -> dict:
    """Link a pair of files; returns the entry from its index and sizes.

    Of the tokens, only the first and last ids of some documents are read.
    """
    first, last = one.edges()
    facts.merge(
        Facts(
            documents=one.shard.num_documents,
            seen=len(first),
            not_ended=int(np.count_nonzero(last != one.eod_id)),
            begun=int(np.count_nonzero(first == one.begin_id)) if one.begin_id is not None else 0,
        )
    )
    advance(one.path.stat().st_size)
    unknown = ("min_id", "max_id", "eod_count", "bin_xxh3", "xxh_xxh3")
    return _linked(one, prefix) | dict.fromkeys(unknown)


def why_not(one: Foreign, dtype: np.dtype) -> str | None:
    """The reason why a file cannot be a shard as it is; None where it can."""
    if one.kind != "megatron":
        return f"is {one.kind}, not a Megatron pair"
    if one.dtype != dtype:
        return f"holds {one.dtype.name}, the corpus is {dtype.name}"
    return one.shard.notes[0] if one.shard.notes else None


def _linked(one: Foreign, prefix: Path) -> dict:
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).symlink_to(one.path.with_suffix(suffix).absolute())
    return {
        "name": prefix.name,
        "tokens": one.num_tokens,
        "sequences": one.shard.num_sequences,
        "documents": one.shard.num_documents,
        "bin_bytes": one.path.stat().st_size,
        "idx_bytes": one.shard.idx_path.stat().st_size,
        "idx_xxh3": file_hash(one.shard.idx_path),
    }
