"""Sample hashes of all ranks become ledger lines: a rank knows its own samples, a line needs all.

    every rank: add(step), add(step), ... -> every few steps one gather -> all: do the ranks agree?
                                                                        -> rank 0: ledger lines

Rule: every rank gathers after the same steps, so the collective is never uneven. Steps that a
killed run had not gathered yet are trained, and recorded, again after its last checkpoint. Ranks
that share a data coordinate (tensor, pipeline, context) must have had the same samples, and all
ranks the same view of each step; where they do not, all of them stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from base.errors import UserError
from data.stream.ledger import Ledger, batch_hash, in_batch_order
from data.stream.stream import StepData

LEDGER_EVERY = 10  # steps between gathers: 8 bytes per sample, far from the step's critical path


class LedgerCollector:
    """Holds the steps since the last gather, and writes their ledger lines after it.

    ledger: None on ranks that do not write it; gather: the collective, this rank's hashes uint64
    (n,) -> all ranks' (ranks, n), in rank order; every: steps between gathers; data_ranks: data
    coordinate of each of these ranks, None = its own number; skips: fingerprint of the skip list.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        gather: Callable[[np.ndarray], np.ndarray],
        every: int,
        data_ranks: Sequence[int] | None = None,
        skips: str | None = None,
    ):
        self._ledger, self._gather, self._every = ledger, gather, every
        self._data_ranks, self._skips = data_ranks, skips
        self._steps: list[StepData] = []

    def add(self, data: StepData) -> None:
        """Take one finished step; gather and write after every `every` steps."""
        self._steps.append(data)
        if len(self._steps) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Gather, compare and write what is held. A collective call: on every rank or on none.

        Raises UserError on every rank where ranks disagree about the data.
        """
        if not self._steps:
            return
        views = np.array([view(data, self._skips) for data in self._steps], dtype=np.uint64)
        own = [batch.sample_hashes for data in self._steps for batch in data.micro_batches]
        everyone = self._gather(np.concatenate([views, *own]))
        views, hashes = everyone[:, : len(views)], everyone[:, len(views) :]
        ends = np.cumsum([sum(len(b.sample_hashes) for b in d.micro_batches) for d in self._steps])
        self._refuse_disagreement(views, np.split(hashes, ends[:-1], axis=1))
        if self._ledger is not None:
            first = np.unique(self._of_ranks(len(everyone)), return_index=True)[1]
            self._write(np.split(hashes[first], ends[:-1], axis=1))
        self._steps = []

    def _of_ranks(self, ranks: int) -> np.ndarray:
        return np.array(range(ranks) if self._data_ranks is None else self._data_ranks)

    def _refuse_disagreement(self, views: np.ndarray, hashes: list[np.ndarray]) -> None:
        of_rank = self._of_ranks(len(views))
        first = np.array([np.flatnonzero(of_rank == one)[0] for one in of_rank])
        for number, data in enumerate(self._steps):
            for rank, peer, what in (
                *(
                    (rank, int(first[rank]), f"the samples of data rank {of_rank[rank]}")
                    for rank in differing(hashes[number], first)
                ),
                *((rank, 0, "what this step is") for rank in differing(views[:, [number]], 0)),
            ):
                raise UserError(
                    f"step {data.step}: rank {rank} and rank {peer} "
                    f"disagree on {what}; they read different corpora, recipes or damaged memory: "
                    "compare the corpus folders of their hosts"
                )

    def _write(self, everyone: list[np.ndarray]) -> None:
        for data, own in zip(self._steps, everyone, strict=True):
            shape = len(own), len(data.micro_batches), len(data.micro_batches[0].sample_hashes)
            self._ledger.append(
                step=data.step,
                data_step=data.data_step,
                samples=data.sample_range,
                batch_hash=batch_hash(in_batch_order(own.reshape(shape))),
                tokens=data.num_tokens,
                targets=data.num_targets,
                sources=data.source_counts,
                is_update=data.is_update,
                masked=data.num_masked,
                quarantined=data.quarantined,
                length=data.length if data.is_shortened else None,
                skips=self._skips,
            )


def view(data: StepData, skips: str | None) -> int:
    """Hash, 64 bits, of everything all ranks must agree on about a step."""
    parts = (
        data.step,
        data.data_step,
        data.sample_range,
        data.places,
        data.num_targets,
        data.is_update,
        data.length,
        data.quarantined,
        tuple(data.source_counts.items()),
        skips,
    )
    return xxhash.xxh3_64_intdigest(repr(parts).encode())


def differing(rows: np.ndarray, reference) -> list[int]:
    """Numbers of the rows that differ from the row (or rows) `reference`."""
    return np.flatnonzero((rows != rows[reference]).any(axis=1)).tolist()
