"""Everything that observes the loop, behind one object: the loop tells it what happens, once.

    begin(step) -> phase("data") -> begin_update -> end_update -> end -> record -> ... -> close

    all ranks   heartbeat, profiler, clock, hardware watch, counter of communication, ledger
    rank 0      the record: metrics, events, console

Rule: the scalars of a step are read one step later, after the next step has been launched, so no
step waits for its own; `flush` reads them early, before a save and before an end. Nothing here
changes a number of the training.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from data.stream.collect import LEDGER_EVERY, LedgerCollector
from data.stream.stream import StepData
from record.heartbeat import HEART
from runtime.engine.batches import gather_hashes
from runtime.engine.communication import bytes_by_kind
from runtime.engine.engine import StepResult
from runtime.health.verdict import Judgement
from runtime.log.rank0_record import Finished, RunRecord
from runtime.monitor.hardware import HardwareWatch
from runtime.monitor.profiling import profiler_of
from runtime.run import Run


class Telemetry:
    """The observers of one attempt on one rank; `record` is rank 0's, None on the others."""

    def __init__(self, run: Run, record: RunRecord | None):
        recipe, layout, me = run.recipe, run.resolved.layout, run.process
        self.rank0_record, self._counter = record, run.counter
        self._hardware = HardwareWatch(recipe.hardware, layout, me, run.after_step)
        self._ledger = LedgerCollector(
            record.ledger if record else None,
            lambda own: gather_hashes(own, me.device),
            LEDGER_EVERY,
            [layout.coordinates(rank).data for rank in range(layout.world)],
            run.stream.skips.fingerprint(),
        )
        self._profiler = profiler_of(
            recipe.log.profile, run.folder, me.rank, HEART.around(self._hardware.clock.phase)
        )
        self._sent: dict[str, int] | None = None  # bytes of this step, by kind of collective

    def start(self) -> None:
        """Begin to measure: the first step begins here."""
        self._hardware.clock.start()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step; `name` is one of runtime.monitor.clock.PHASES."""
        return self._profiler.phase(name)

    def begin(self, step: int) -> None:
        """Step `step` begins."""
        self._profiler.begin(step)
        HEART.beat("step", step)

    def begin_update(self, num_micro_batches: int) -> None:
        """The batch is on the device; the update begins."""
        HEART.beat("step", parts=num_micro_batches)
        if self._counter:
            self._counter.take()  # calls before the update belong to no step

    def end_update(self) -> None:
        """The update has been launched."""
        self._sent = bytes_by_kind(self._counter.take()) if self._counter else None

    def end(
        self, data: StepData, lr: float, result: StepResult, losses: torch.Tensor | None
    ) -> Finished:
        """The step has been launched; returns it with its times, all still to be read.

        losses: of the evaluation after it, as Engine.evaluate returns them.
        """
        span = self._hardware.clock.finish()
        self._profiler.end(data.step)
        self._hardware.step(data.step, span)
        return Finished(data, lr, result, span, losses, self._sent)

    def record(self, finished: Finished, judgement: Judgement) -> None:
        """Record the step before, and what is known of this one; a collective every few steps."""
        data = finished.data
        self._ledger.add(data)
        if self.rank0_record is None:
            return
        self.rank0_record.add(finished)
        self.rank0_record.hardware(data.step, self._hardware.news())
        if finished.result.skipped or judgement.reason:
            self.rank0_record.bad_step(data, finished.result.skipped, judgement)
        if data.quarantined:
            self.rank0_record.quarantined(data)

    def flush(self) -> None:
        """Record the newest step now, before a checkpoint of it exists; a collective."""
        self._ledger.flush()
        if self.rank0_record:
            self.rank0_record.flush()

    def close(self) -> None:
        """Stop observing the hardware."""
        self._hardware.close()
