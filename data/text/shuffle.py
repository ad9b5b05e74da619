"""Documents in a random order: `make corpus ... OVERRIDES=shuffle=7`, for inputs that are sorted.

    kept documents --keyed permutation--> position --> one file of rows a shard
    shard: its rows by position --> ids and origin from their places in the units

Rule: the order is the permutation of `order.py` over all kept documents of a split, keyed by the
seed and the split's name: a function of the input and the settings, like every corpus.

Costs: 40 bytes a document on disk while it works; a shard in memory for each worker. Shards are cut
by number of documents, so that they hold `shard_mib` on average.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from data.corpus.block_hashes import read_exactly
from data.stream.order import forward
from data.text.assemble import (
    SPLITS,
    Done,
    Part,
    Selection,
    ShardTask,
    batches,
    chosen,
    column,
    count,
    origin,
)

RULE = "order 1 over the kept documents of a split, keyed by xxh3-64 of 'documents1|seed|split'"
HELD_ROWS = 1 << 20  # in memory before they go to the files of their shards
POSITION, UNIT, DOCUMENT, TOKEN, TOKENS = range(5)  # columns of a row, int64


def plan_shuffled(
    units: Sequence[Done],
    selection: Selection,
    max_tokens: int,
    make: Callable[..., ShardTask],
    seed: int,
    folder: Path,
) -> tuple[list[ShardTask], dict[str, Counter]]:
    """Like `plan_shards`, with the documents in the order of the seed. folder: for the rows."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    by_file: dict[str, Counter] = {name: Counter() for unit in units for name in unit.files}
    documents, tokens = Counter(), Counter()
    for number, _, batch, masks in chosen(units, selection):
        count(by_file, units[number].files, batch, masks)
        for split, mask in masks.items():
            documents[split] += int(mask.sum())
            tokens[split] += int(column(batch, "tokens")[mask].sum())
    scatters = {
        split: _Scatter(folder, split, documents[split], tokens[split], max_tokens, seed)
        for split in SPLITS
    }
    before = 0  # tokens of the unit before the batch
    for number, begin, batch, masks in chosen(units, selection):
        sizes = column(batch, "tokens")
        before = before if begin else 0
        first = before + np.cumsum(sizes) - sizes
        before += int(sizes.sum())
        for split, mask in masks.items():
            which = np.flatnonzero(mask)
            place = (np.full(len(which), number), begin + which, first[which], sizes[which])
            scatters[split].add(*place)
    shards = [one.close(units, selection, make) for one in scatters.values()]
    return [shard for some in shards for shard in some], by_file


class _Scatter:
    """Sends the documents of one split to the files of their shards."""

    def __init__(self, folder: Path, split: str, documents, tokens, max_tokens: int, seed: int):
        self.folder, self.split, self.documents = folder, split, documents
        self.shards = min(-(-tokens // max_tokens), documents)
        self.seed = xxhash.xxh3_64_intdigest(f"documents1|{seed}|{split}".encode())
        self._counts = np.zeros((self.shards, 2), dtype=np.int64)  # documents, tokens
        self._held: list[np.ndarray] = []
        self._seen = 0

    def add(self, *place: np.ndarray) -> None:
        """Take documents, in input order: unit, document, first token, tokens."""
        index = np.arange(self._seen, self._seen + len(place[0]))
        position = forward(index, self.documents, self.seed).astype(np.int64)
        self._seen += len(index)
        self._held.append(np.column_stack([position, *place]).astype("<i8"))
        if sum(map(len, self._held)) >= HELD_ROWS:
            self._write()

    def close(self, units, selection, make) -> list[ShardTask]:
        """The shards, in order."""
        self._write()
        assert self._seen == self.documents
        before = np.cumsum(self._counts[:, 0]) - self._counts[:, 0]
        return [
            make(
                name=f"{self.split}-{shard:05d}",
                split=self.split,
                units=tuple(units),
                first=0,
                stop=units[-1].documents,
                number=int(before[shard]),
                documents=documents,
                tokens=tokens,
                selection=selection,
                rows=str(self._path(shard)),
            )
            for shard, (documents, tokens) in enumerate(self._counts.tolist())
        ]

    def _path(self, shard: int) -> Path:
        return self.folder / f"{self.split}-{shard:05d}.rows"

    def _write(self) -> None:
        rows = np.concatenate([np.empty((0, 5), dtype="<i8"), *self._held])
        shard = rows[:, POSITION] * self.shards // self.documents
        order = np.argsort(shard, kind="stable")
        numbers, starts = np.unique(shard[order], return_index=True)
        for number, some in zip(numbers, np.split(rows[order], starts)[1:], strict=True):
            with open(self._path(number), "ab") as file:
                file.write(some.data)
            self._counts[number] += len(some), int(some[:, TOKENS].sum())
        self._held = []


def shuffled(task: ShardTask) -> Iterator[Part]:
    """The documents of a shard, in their new order, in one part."""
    rows = np.fromfile(task.rows, dtype="<i8").reshape(-1, 5)
    rows = rows[np.argsort(rows[:, POSITION])]
    ends, dtype = np.cumsum(rows[:, TOKENS]), np.dtype(task.dtype)
    ids, tables = np.empty(task.tokens, dtype=dtype), []
    data = memoryview(ids).cast("B")
    where = np.lexsort((rows[:, DOCUMENT], rows[:, UNIT]))  # as they lie on disk
    units, starts = np.unique(rows[where, UNIT], return_index=True)
    for number, mine in zip(units.tolist(), np.split(where, starts[1:]), strict=True):
        unit = task.units[number]
        bytes_of = rows[mine][:, (TOKEN, TOKENS)] * dtype.itemsize
        stops = ends[mine] * dtype.itemsize
        fd = os.open(unit.folder / "ids.bin", os.O_RDONLY)
        try:
            for stop, (at, size) in zip(stops.tolist(), bytes_of.tolist(), strict=True):
                read_exactly(fd, data[stop - size : stop], at, unit.folder / "ids.bin")
        finally:
            os.close(fd)
        found = pa.Table.from_batches(list(batches(unit.folder))).take(rows[mine, DOCUMENT])
        (batch,) = found.combine_chunks().to_batches()
        tables.append(origin(task, unit, batch, task.number + mine))
    yield Part(ids, rows[:, TOKENS], pa.concat_tables(tables).take(np.argsort(where)))
