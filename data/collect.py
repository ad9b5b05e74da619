"""From the ranks' sample hashes to the ledger: each rank knows its own samples, the line needs all.

    every rank: add(step), add(step), ... -> every few steps one gather -> rank 0: ledger lines

The one rule: every rank gathers after the same steps, so the collective can never be uneven. What a
killed run had not gathered yet is trained, and recorded, again after its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from data.ledger import Ledger, batch_hash, in_batch_order
from data.stream import StepData

LEDGER_EVERY = 10  # steps between gathers: 8 bytes per sample, far from the step's critical path


class Collector:
    """Holds the steps since the last gather. `ledger` is None on ranks that do not write it.

    `gather` is the collective: this rank's hashes uint64 (n,) -> all data ranks' (ranks, n).
    """

    def __init__(
        self, ledger: Ledger | None, gather: Callable[[np.ndarray], np.ndarray], every: int
    ):
        self._ledger, self._gather, self._every = ledger, gather, every
        self._steps: list[StepData] = []

    def add(self, data: StepData) -> None:
        """Take one finished step; gathers and writes when it is time."""
        self._steps.append(data)
        if len(self._steps) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Gather and write what is held. A collective call: on every rank or on none."""
        if not self._steps:
            return
        own = [batch.sample_hashes for data in self._steps for batch in data.micro_batches]
        everyone = self._gather(np.concatenate(own))
        if self._ledger is not None:
            self._write(everyone)
        self._steps = []

    def _write(self, everyone: np.ndarray) -> None:
        ranks, begin = len(everyone), 0
        for data in self._steps:
            micro_steps, rows = len(data.micro_batches), len(data.micro_batches[0].sample_hashes)
            own = everyone[:, begin : begin + micro_steps * rows]
            begin += micro_steps * rows
            self._ledger.append(
                step=data.step,
                data_step=data.data_step,
                samples=data.sample_range,
                batch_hash=batch_hash(in_batch_order(own.reshape(ranks, micro_steps, rows))),
                tokens=data.num_tokens,
                targets=data.num_targets,
                sources=data.source_counts,
            )
