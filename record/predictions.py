"""What the plan predicted for a run beside what the run measured, term by term.

    make pretrain: plan -> plan.json in the run's folder -> after EARLY steps, and at the end:
    metrics.jsonl -> measured() -> an event `prediction` -> make status, compare, plan-check

Rule: a term is compared only where the run counts it. The first step of each attempt is warm-up and
part of no number. Units are in the names; speeds are over all ranks. Imports no torch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record.records import METRICS, read_metrics

PLAN = "plan.json"
EARLY = 20  # steps after the warm-up, when a prediction is compared for the first time
# Name of a term in plan.json and in what `measured` returns -> shown name, format, unit.
TERMS = {
    "step_s": ("step", ".4g", " s"),
    "compute_s": ("forward, backward", ".4g", " s"),
    "optimizer_s": ("optimizer", ".4g", " s"),
    "tokens_per_s": ("tokens/s", ",.0f", ""),
    "mfu": ("MFU", ".1%", ""),
    "bubble": ("bubble", ".1%", ""),
    "communication_mib": ("sent a step", ",.4g", " MiB"),
    "peak_memory_gib": ("peak memory of a rank", ".2f", " GiB"),
}
FIELDS = (
    "first_of_attempt", "tokens_per_s", "tokens_per_s_per_rank", "mfu", "step_s", "compute_s",
    "optimizer_s", "communication_mib", "device_memory_gib",
)  # fmt: skip


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan of a run: `predicted` (term -> value, or None), `choice`; {} where there is none."""
    try:
        found = json.loads((folder / PLAN).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def measured(folder: Path, peaks_gib: Sequence[float] = ()) -> dict[str, float]:
    """Medians of the newest segment of a run; terms that the run does not count are absent.

    `peaks_gib` are the peaks of all ranks, where they are known; else those of rank 0 count.
    Memory is that of a device: a host's peak includes Python and its libraries.
    """
    lines = read_metrics(folder / METRICS, None, FIELDS)
    lines = [line for line in lines if line["segment"] == lines[-1]["segment"]]
    steady = [line for line in lines if not line["first_of_attempt"]]
    ranks = [ranks_of(line) for line in steady]
    newest = next((number for number in reversed(ranks) if number), None)
    steady = [line for line, number in zip(steady, ranks, strict=True) if number == newest]
    found = {}
    for name in TERMS:
        known = [line[name] for line in steady if line.get(name) is not None]
        if known:
            found[name] = float(statistics.median(known))
    on_device = [line["device_memory_gib"] for line in lines if line.get("device_memory_gib")]
    if on_device:
        found["peak_memory_gib"] = max(peaks_gib or on_device)
    return found


def ranks_of(line: Mapping[str, Any]) -> int | None:
    """Number of ranks that trained a step; None where its speed is not known."""
    all_ranks, one = line.get("tokens_per_s"), line.get("tokens_per_s_per_rank")
    return round(all_ranks / one) if all_ranks and one else None


def comparison(
    predicted: Mapping[str, Any], found: Mapping[str, float]
) -> list[tuple[str, str, str, str]]:
    """(term, predicted, measured, difference) as text; a dash where a value is not known."""
    rows = []
    for name, (shown, form, unit) in TERMS.items():
        one, two = predicted.get(name), found.get(name)
        if one is None:
            continue
        real = f"{two:{form}}{unit}" if two else "-"
        rows.append((shown, f"{one:{form}}{unit}", real, apart(one, two)))
    return rows


def apart(one: float, two: float | None) -> str:
    """How far a prediction is from what was measured; beyond a factor of two, as a factor."""
    if not two:
        return "-"
    return f"{one / two - 1:+.1%}" if 0.5 <= one / two <= 2 else f"x {one / two:.3g}"


def sentence(predicted: Mapping[str, Any], found: Mapping[str, float]) -> str:
    """The comparison in one line: the terms that were measured."""
    parts = [
        f"{term} {one} against {two} ({gap})"
        for term, one, two, gap in comparison(predicted, found)
        if two != "-"
    ]
    mark = "" if predicted.get("is_calibrated") else " (not calibrated)"
    return f"predicted{mark} against measured: {'; '.join(parts)}"


def event_of(folder: Path, peaks_gib: Sequence[float] = ()) -> dict[str, Any] | None:
    """Fields of the event `prediction`; None where nothing was predicted or measured."""
    predicted = read_plan(folder).get("predicted")
    found = measured(folder, peaks_gib) if predicted else {}
    if not predicted or "step_s" not in found:
        return None
    return {"text": sentence(predicted, found), "predicted": predicted, "measured": found}
