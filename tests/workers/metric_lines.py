"""Writes metrics lines with plausible numbers, for tests."""

from __future__ import annotations

from pathlib import Path

from runtime.log.metrics import MetricsWriter, StepNumbers
from runtime.monitor.clock import StepTimes


def make_writer(folder: Path, **options) -> MetricsWriter:
    folder.mkdir(exist_ok=True)
    return MetricsWriter(folder, **(dict(world=1, tensorboard=False) | options))


def write_step(writer: MetricsWriter, step: int, **changes) -> dict:
    """Write one line with plausible numbers: 100 tokens in 0.5 s."""
    fields = dict(
        loss=5.0 / step,
        grad_norm=1.0,
        lr=1e-3,
        tokens=100 * step,
        tokens_per_step=100,
        targets=90,
        times=StepTimes(step_s=0.5, is_first=step == 1),
        accumulation=1,
    )
    return writer.step(StepNumbers(step, **(fields | changes)))
