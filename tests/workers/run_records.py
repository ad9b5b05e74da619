"""Writes the record of a run as a run does, from given seconds and losses, for tests of reports."""

from __future__ import annotations

import json
from pathlib import Path

from data.stream.ledger import Ledger
from data.stream.schedule import schedule_of
from recipes.compose import compose, recipe_yaml
from runtime.log.metrics import MetricsWriter, StepNumbers
from runtime.monitor.clock import StepTimes
from runtime.resolve import resolve


def write_run(
    root, name, seconds, *words, losses=None, val=(), sent=None, peaks=(1.5, 1.25),
    surroundings=None, state_gib=None,
) -> Path:  # fmt: skip
    """Write runs/<name> below `root`, with the given seconds of each step; returns its folder."""
    place = root / name
    place.mkdir()
    recipe = compose("tiny", [f"run={name}", *words]).recipe
    ranks = 2
    schedule = schedule_of(recipe)
    resolved = resolve(recipe, ranks, schedule)
    (place / "recipe.yaml").write_text(recipe_yaml(recipe))
    (place / "layout.json").write_text(json.dumps(resolved.layout.as_dict()))
    around = {"commit": "c" * 40, "torch": "2.13", "cores": 2, **(surroundings or {})}
    (place / "environment.json").write_text(json.dumps(around))
    writer = MetricsWriter(place, world=ranks, tensorboard=False, state_gib=state_gib)
    ledger = Ledger(place / "ledger")
    for step, step_s in enumerate(seconds, start=1):
        tokens = schedule.tokens_after(step) - schedule.tokens_after(step - 1)
        writer.step(
            StepNumbers(
                step,
                loss=9.0 - step if losses is None else losses[step - 1],
                grad_norm=1.0,
                lr=1e-3,
                tokens=schedule.tokens_after(step),
                tokens_per_step=tokens,
                targets=tokens,
                times=StepTimes(step_s, 0.1, step_s / 2, 0.2, other_s=0.05, is_first=step == 1),
                accumulation=2,
                communication_bytes=sent,
                val_loss=dict(val).get(step),
            )
        )
        ledger.append(step=step, samples=(8 * step - 8, 8 * step), batch_hash=f"{recipe.seed}"
                      f"-{step}", tokens=tokens, targets=tokens, sources={})  # fmt: skip
    ledger.close()
    writer.event("finished", peak_memory_gib=list(peaks))
    writer.close()
    return place
