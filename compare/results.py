"""Reads the records of the runs of a comparison and computes what is compared.

    runs/<run>/metrics.jsonl events.jsonl layout.json environment.json recipe.yaml -> RunResult
    the runs of one variant -> Side      all sides -> Agreement of losses, what differs

Rule: every number comes from the record of a run; nothing is measured or estimated here. The first
step of each attempt is warm-up and part of no number (as in runtime.log.metrics.summary). The
numbers of a variant are computed over the steps of all its runs together.

Units: tokens/s over all ranks, seconds per step, GiB, MiB per step; differences are relative.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import UserError
from checkpoint.load.allowed_changes import flatten, treatment
from data.stream.ledger import read_ledger
from model.cost import num_parameters
from recipes.compose import compose
from record.predictions import measured, read_plan
from record.records import METRICS, read_events, read_metrics
from runtime.log.metrics import quartiles, summary

# Largest relative difference of losses between two legal layouts in fp32.
SAME_LOSS = 1e-6
# Knobs that name a run or choose what is written: not counted as a difference between variants.
SILENT = ("run", "log", "checkpoint", "allow", "resume", "eval_every", "eval_tokens", "stop_after")
# Fields of environment.json that could make one run faster than another.
SURROUNDINGS = ("commit", "uncommitted_changes", "torch", "cuda", "packages", "machine", "system",
                "processor", "cpu", "cores", "threads", "gpu")  # fmt: skip

Three = tuple[float | None, float | None, float | None]  # first quartile, median, third quartile


@dataclass(frozen=True)
class RunResult:
    """The record of one run. `round` counts from 1."""

    name: str
    round: int
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    peaks_gib: list[float]  # one for each rank; empty where the run did not record them
    layout: dict[str, Any]
    environment: dict[str, Any]
    parameters: int
    knobs: dict[str, Any]  # dotted name -> value
    batches: dict[int, str]  # step -> hash of the global batch
    predicted: dict[str, Any] = field(default_factory=dict)  # terms of plan.json
    measured: dict[str, float] = field(default_factory=dict)  # the same terms

    @property
    def steady(self) -> list[dict[str, Any]]:
        """Metrics lines without the warm-up steps."""
        return [line for line in self.lines if not line["first_of_attempt"]]

    @property
    def losses(self) -> dict[int, float | None]:
        """Map each step to its loss; None where it was not finite."""
        return {line["step"]: line["loss"] for line in self.lines}


@dataclass
class Side:
    """One variant and its runs. `reason` is why none of them finished, where none did."""

    label: str
    runs: list[RunResult] = field(default_factory=list)
    reason: str | None = None

    def quartiles(self, name: str) -> Three:
        """Quartiles of one field of the metrics lines, over the steps of all runs."""
        return quartiles([line.get(name) for run in self.runs for line in run.steady])

    def median(self, name: str) -> float | None:
        """Median of one field of the metrics lines, over the steps of all runs."""
        return self.quartiles(name)[1]

    def peaks_gib(self) -> list[float]:
        """Peak memory of each rank in GiB, the highest of all runs.

        Old records have only that of rank 0.
        """
        known = [run.peaks_gib or [run.summary["peak_memory_gib"]] for run in self.runs]
        return [max(peaks) for peaks in zip(*known, strict=False)]

    def extra_scalars(self) -> dict[str, float]:
        """Medians of the numbers that the engine added to the steps, by name."""
        return extra_scalars([line for run in self.runs for line in run.steady])

    def communication_bytes(self) -> dict[str, float]:
        """Median payload of a step on rank 0 in bytes, by kind of collective.

        Empty where communication was not counted.
        """
        lines = [line for run in self.runs for line in run.steady]
        counted = [line["communication_bytes"] for line in lines if "communication_bytes" in line]
        kinds = sorted({kind for one in counted for kind in one})
        return {kind: statistics.median(one.get(kind, 0) for one in counted) for kind in kinds}


def read_run(folder: Path, number: int = 1) -> RunResult:
    """Read one run. Raises UserError where its record has no step or cannot be read."""
    if not (folder / METRICS).is_file():
        raise UserError(f"{folder.name}: no record of a run in {folder} (no {METRICS})")
    try:
        numbers = summary(folder)
        every = read_metrics(folder)
        lines = [line for line in every if line["segment"] == every[-1]["segment"]]
        endings = [event for event in read_events(folder) if "peak_memory_gib" in event]
        recipe = compose(str(folder / "recipe.yaml")).recipe
        layout, environment = (read_json(folder / n) for n in ("layout.json", "environment.json"))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder.name}: its record cannot be read: {error}") from None
    if not lines:
        raise UserError(f"{folder.name}: no step is on record in {folder}")
    return RunResult(
        folder.name,
        number,
        lines,
        numbers,
        endings[-1]["peak_memory_gib"] if endings else [],
        layout,
        environment,
        num_parameters(recipe.model),
        flatten(dataclasses.asdict(recipe)),
        {line["step"]: line["batch_hash"] for line in read_ledger(folder / "ledger")},
        read_plan(folder).get("predicted") or {},
        measured(folder, endings[-1]["peak_memory_gib"] if endings else ()),
    )


def read_json(path: Path) -> Any:
    """Read a JSON file of the record. Raises ValueError that names the file."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path.name} is damaged ({error}); the next start of the run writes it again"
        ) from None


def extra_scalars(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of the numbers that the engine added to these metrics lines, by name."""
    known: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.get("scalars", {}).items():
            if value is not None:
                known.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in known.items()}


def ratios(side: Side, base: Side) -> Three | None:
    """Lowest, median and highest ratio of tokens/s to `base`, each paired within one round."""
    speeds = {run.round: run.summary["tokens_per_s"] for run in base.runs}
    paired = [
        run.summary["tokens_per_s"] / speeds[run.round]
        for run in side.runs
        if speeds.get(run.round) and run.summary["tokens_per_s"]
    ]
    return (min(paired), statistics.median(paired), max(paired)) if paired else None


@dataclass(frozen=True)
class Agreement:
    """Comparison of the losses of all runs.

    `largest` is the largest relative difference from the first run over `steps` steps (infinite
    where a loss was not finite), `at` is its step and run. `reason` is why agreement cannot be
    expected, None where it can; `bound` is the limit, None outside fp32.
    """

    steps: int
    largest: float
    at: tuple[int, str] | None
    by_side: dict[str, float]
    same_data: bool
    reason: str | None
    bound: float | None

    @property
    def is_broken(self) -> bool:
        """True where losses that must agree do not."""
        return self.reason is None and self.bound is not None and self.largest > self.bound


def agreement(sides: Sequence[Side]) -> Agreement | None:
    """Compare the losses of all runs with those of the first; None with fewer than two runs."""
    runs = [(side.label, run) for side in sides for run in side.runs]
    if len(runs) < 2:
        return None
    first = runs[0][1]
    bases = bases_by_seed(sides)
    steps = sorted(set(first.losses).intersection(*(run.losses for _, run in runs[1:])))
    largest, at, same_data = 0.0, None, True
    by_side: dict[str, float] = {}
    for label, run in runs:
        base = bases.get(run.knobs["seed"], first)
        by_side.setdefault(label, 0.0)
        for step in steps:
            same_data = same_data and base.batches.get(step) == run.batches.get(step)
            gap = difference(base.losses[step], run.losses[step])
            by_side[label] = max(by_side[label], gap)
            if gap > largest:
                largest, at = gap, (step, run.name)
    is_fp32 = first.knobs["precision"] == "fp32"
    reason = excuse(runs, same_data, steps, ("seed",) if len(bases) > 1 else ())
    return Agreement(len(steps), largest, at, by_side, same_data, reason,
                     SAME_LOSS if is_fp32 else None)  # fmt: skip


def bases_by_seed(sides: Sequence[Side]) -> dict[int, RunResult]:
    """The run to compare with, for each seed; empty where the sides do not have the same seeds."""
    seeds = [[run.knobs["seed"] for run in side.runs] for side in sides if side.runs]
    if any(own != seeds[0] for own in seeds):
        return {}
    bases: dict[int, RunResult] = {}
    for run in (run for side in sides for run in side.runs):
        bases.setdefault(run.knobs["seed"], run)
    return bases


def difference(one: float | None, two: float | None) -> float:
    """Relative difference of two losses; a loss that was not finite differs from every number."""
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    return abs(one - two) / abs(one) if one else abs(two)


def excuse(
    runs: Iterable[tuple[str, RunResult]],
    same_data: bool,
    steps: Sequence[int],
    paired: Sequence[str] = (),
) -> str | None:
    """Reason why the losses need not agree, or None where they must.

    `paired` names knobs that differ only between rounds, which are compared one by one.
    """
    differ = differing(run for _, run in runs)
    changed = [key for key in differ if treatment(key) != "free" and key not in paired]
    if changed:
        return f"the runs differ in {', '.join(changed)}"
    if not steps:
        return "the runs have no step in common"
    if not same_data:
        return "the runs were not trained on the same batches (their ledgers differ)"
    return None


def differing(runs: Iterable[RunResult]) -> dict[str, list[Any]]:
    """Map each knob that differs to its value in each run; SILENT knobs are left out."""
    runs = list(runs)
    keys = {key: None for run in runs for key in run.knobs}
    values = {key: [run.knobs.get(key) for run in runs] for key in keys}
    return {
        key: given
        for key, given in values.items()
        if any(one != given[0] for one in given)
        and not any(key == name or key.startswith(f"{name}.") for name in SILENT)
    }


def surroundings(runs: Sequence[RunResult]) -> dict[str, list[Any]]:
    """Map ranks and facts of environment.json that differ to their value in each run."""
    found = {"ranks": [run.layout["world"] for run in runs]}
    for name in SURROUNDINGS:
        found[name] = [run.environment.get(name) for run in runs]
    return {name: given for name, given in found.items() if any(v != given[0] for v in given)}
