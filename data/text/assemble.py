"""Finished units become the shards of a corpus: documents kept, their splits, their shards.

    units in input order --duplicates, held-out--> kept documents --greedy cut--> shards
    shard: .bin .idx .xxh .docs.parquet, each written by any worker that is free

Rule: the plan is a function of the units and the settings; the bytes of a shard are a function of
the plan. Memory: one record batch at a time, and O(shards + units).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data.corpus.shard_writer import PublishedFile, ShardWriter, file_hash
from data.text.duplicates import mark_first
from data.text.provenance import SCHEMA, SUFFIX, ProvenanceWriter

SPLITS = ("train", "valid")


@dataclass(frozen=True)
class Done:
    """A finished unit, and the numbers of its first document and row among all."""

    folder: Path
    files: tuple[str, ...]
    first_document: int  # among all documents of all units
    row_base: int  # added to its rows: lines of the file before it
    documents: int


@dataclass(frozen=True)
class Selection:
    """The documents that are kept, and those of them that are held out; can be sent to a worker."""

    first_path: str | None  # file of bools, one a document: True for the first with its text
    hash_limit: int
    held_digests: np.ndarray = field(repr=False)  # uint64 (n, 2)

    def masks(self, batch: pa.RecordBatch, first_document: int) -> dict[str, np.ndarray]:
        """Documents of a batch by split, bool (n,) each."""
        keep = np.ones(len(batch), dtype=bool)
        if self.first_path:
            stop = first_document + len(batch)
            keep = np.memmap(self.first_path, dtype=bool, mode="r")[first_document:stop].copy()
        held = column(batch, "hash") < np.uint64(self.hash_limit)
        if len(self.held_digests):
            held |= _are_in(digest_words(batch), self.held_digests)
        return {"train": keep & ~held, "valid": keep & held}


@dataclass(frozen=True)
class ShardTask:
    """One shard: documents from (unit, document) `first` up to `stop`, those of its split."""

    folder: Path
    name: str
    split: str
    units: tuple[Done, ...]
    first: int  # document of the first unit
    stop: int  # document of the last unit
    number: int  # of its first document in the split
    documents: int
    tokens: int
    selection: Selection
    dtype: str
    eod_id: int
    key: str = ""
    rows: str | None = None  # file that says which documents, where they are shuffled


class Part(NamedTuple):
    """Documents of a shard: ids back to back, tokens of each, rows of the provenance file."""

    ids: np.ndarray
    lengths: np.ndarray
    origin: pa.Table


def column(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """A column without nulls as an array."""
    return batch.column(batch.schema.get_field_index(name)).to_numpy(zero_copy_only=False)


def digest_words(batch: pa.RecordBatch) -> np.ndarray:
    """Digests as two words each, uint64 (n, 2)."""
    array = batch.column(batch.schema.get_field_index("digest"))
    words = np.frombuffer(array.buffers()[1], dtype="<u8", count=2 * (array.offset + len(array)))
    return words.reshape(-1, 2)[array.offset :]


def batches(folder: Path) -> Iterator[pa.RecordBatch]:
    """The documents of a unit, a batch at a time."""
    with pa.memory_map(str(folder / "docs.arrow")) as source:
        table = pa.ipc.open_file(source)
        for number in range(table.num_record_batches):
            yield table.get_batch(number)


def select_first(units: Sequence[Done], path: Path) -> str:
    """Find the first document of each text; returns the path of a file of bools."""

    def digests() -> Iterator[np.ndarray]:
        for unit in units:
            for batch in batches(unit.folder):
                yield digest_words(batch)

    mark_first(digests(), sum(unit.documents for unit in units), path)
    return str(path)


def plan_shards(
    units: Sequence[Done],
    selection: Selection,
    max_tokens: int,
    make: Callable[..., ShardTask],
) -> tuple[list[ShardTask], dict[str, Counter]]:
    """Shards in order, and counts of documents, tokens and duplicates by name of file.

    A shard ends before the document that would make it longer than max_tokens.
    """
    cutters = {split: _Cutter(split, max_tokens) for split in SPLITS}
    by_file: dict[str, Counter] = {name: Counter() for unit in units for name in unit.files}
    for number, begin, batch, masks in chosen(units, selection):
        count(by_file, units[number].files, batch, masks)
        tokens = column(batch, "tokens")
        for split, mask in masks.items():
            which = np.flatnonzero(mask)
            cutters[split].add(number, begin + which, tokens[which])
    shards = [
        make(
            name=f"{split}-{place:05d}",
            split=split,
            units=tuple(units[cut.first[0] : cut.last[0] + 1]),
            first=cut.first[1],
            stop=cut.last[1] + 1,
            number=cut.number,
            documents=cut.documents,
            tokens=cut.tokens,
            selection=selection,
        )
        for split, cutter in cutters.items()
        for place, cut in enumerate(cutter.close())
    ]
    return shards, by_file


def chosen(units: Sequence[Done], selection: Selection) -> Iterator[tuple]:
    """Batches in input order: (number of the unit, first document of the batch in the unit, batch,
    documents by split).
    """
    for number, unit in enumerate(units):
        begin = 0
        for batch in batches(unit.folder):
            yield number, begin, batch, selection.masks(batch, unit.first_document + begin)
            begin += len(batch)


def count(by_file: dict[str, Counter], files: Sequence[str], batch, masks) -> None:
    """Add the documents, tokens and duplicates of a batch to the counts of its files."""
    tokens, source = column(batch, "tokens"), column(batch, "source")
    for split, mask in masks.items():
        sums = np.bincount(source[mask], tokens[mask], len(files)).tolist()
        for name, number in _by_source(files, source[mask]):
            by_file[name][f"documents_{split}"] += number
            by_file[name][f"tokens_{split}"] += int(sums[files.index(name)])
    for name, number in _by_source(files, source[~(masks["train"] | masks["valid"])]):
        by_file[name]["duplicates"] += number


def write_shard(task: ShardTask, parts: Iterable[Part], advance: Callable[[int], None]) -> None:
    """Write the files of one shard; last its manifest entry, <name>.json beside the folder."""
    prefix = task.folder / task.name
    writer = ShardWriter(prefix, np.dtype(task.dtype), task.eod_id)
    provenance = ProvenanceWriter(prefix.with_name(prefix.name + SUFFIX))
    for part in parts:
        writer.add_many(part.ids, part.lengths)
        provenance.add(part.origin)
        advance(part.ids.nbytes)
    assert (writer.num_tokens, writer.num_documents) == (task.tokens, task.documents)
    provenance.close()
    side = file_hash(provenance.path)
    entry = PublishedFile(task.folder.parent / "shards" / f"{task.name}.json")
    text = {"key": task.key, "entry": writer.close(), "side": {provenance.path.name: side}}
    entry.write(json.dumps(text).encode())
    entry.publish()


def in_order(task: ShardTask) -> Iterator[Part]:
    """The documents of a shard in input order, a batch at a time."""
    document, dtype = task.number, np.dtype(task.dtype)
    for place, unit in enumerate(task.units):
        low = task.first if place == 0 else 0
        high = task.stop if place == len(task.units) - 1 else unit.documents
        with open(unit.folder / "ids.bin", "rb") as ids:
            begin = 0
            for batch in batches(unit.folder):
                tokens = column(batch, "tokens")
                size = int(tokens.sum())
                numbers = begin + np.arange(len(batch))
                begin += len(batch)
                if begin <= low or begin - len(batch) >= high:
                    ids.seek(size * dtype.itemsize, 1)
                    continue
                first = unit.first_document + begin - len(batch)
                mask = task.selection.masks(batch, first)[task.split]
                mask &= (numbers >= low) & (numbers < high)
                some = np.fromfile(ids, dtype=dtype, count=size)
                if not mask.all():
                    some = some[np.repeat(mask, tokens)]
                kept = batch.filter(pa.array(mask))
                documents = document + np.arange(len(kept))
                yield Part(some, tokens[mask], origin(task, unit, kept, documents))
                document += len(kept)


def origin(task: ShardTask, unit: Done, kept: pa.RecordBatch, documents: np.ndarray) -> pa.Table:
    """Rows of the provenance file for documents of a unit, with their numbers in the split."""
    columns = {name: kept.column(kept.schema.get_field_index(name)) for name in kept.schema.names}
    columns["source"] = pa.array(unit.files).take(columns["source"])
    columns["row"] = pa.array(column(kept, "row") + unit.row_base)
    columns["document"], columns["xxh3"] = pa.array(documents), columns["digest"]
    columns["split"] = pa.array([task.split] * len(kept))
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


@dataclass
class _Cut:
    first: tuple[int, int]
    number: int
    last: tuple[int, int] = (0, 0)
    documents: int = 0
    tokens: int = 0


class _Cutter:
    """Cuts one split into shards as its documents come."""

    def __init__(self, split: str, max_tokens: int):
        self.split, self.max_tokens = split, max_tokens
        self._cuts: list[_Cut] = []
        self._current: _Cut | None = None
        self._documents = 0

    def add(self, unit: int, documents: np.ndarray, tokens: np.ndarray) -> None:
        ends, at = np.cumsum(tokens), 0
        while at < len(documents):
            before = int(ends[at - 1]) if at else 0
            if self._current is None:
                self._current = _Cut((unit, int(documents[at])), self._documents)
            cut = self._current
            stop = int(np.searchsorted(ends, before + self.max_tokens - cut.tokens, side="right"))
            if stop <= at and cut.tokens:
                self._cuts.append(cut)
                self._current = None
                continue
            stop = max(stop, at + 1)  # a document longer than a shard has one of its own
            cut.last = (unit, int(documents[stop - 1]))
            cut.documents += stop - at
            cut.tokens += int(ends[stop - 1]) - before
            self._documents += stop - at
            at = stop

    def close(self) -> list[_Cut]:
        return self._cuts + ([self._current] if self._current else [])


def _by_source(files, source: np.ndarray) -> Iterator[tuple[str, int]]:
    for file, number in enumerate(np.bincount(source, minlength=len(files)).tolist()):
        if number:
            yield files[file], number


def _are_in(words: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Rows of `words` that are rows of `wanted`, bool (n,)."""
    found = np.isin(words[:, 0], wanted[:, 0])
    some = np.flatnonzero(found)
    known = {tuple(row) for row in wanted[np.isin(wanted[:, 0], words[some, 0])].tolist()}
    found[some] = [tuple(row) in known for row in words[some].tolist()]
    return found
