"""Compares the records of two runs of one recipe: identical, or the first difference.

Rule: recorded numbers are compared exactly, as they stand in the files. Only where the hardware or
the software differs may losses differ, by at most TOLERANCE, and the reason is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.values import counted
from data.stream.ledger import read_ledger
from record.records import read_metrics

TOLERANCE = 1e-5  # relative difference of losses; gradient norms differ ten times as much
NUMBERS = ("loss", "grad_norm", "lr", "tokens", "targets", "skipped", "val_loss")
BATCHES = ("batch_hash", "data_step", "samples", "targets")
# Fields of environment.json on which the bits of a result depend.
DECIDES_BITS = ("torch", "cuda", "machine", "processor", "cpu", "threads", "gpu")

Key = tuple[int, int]  # segment, step


@dataclass(frozen=True)
class RecordComparison:
    """Result of `compared`.

    `first` describes the first difference and is None where the records are identical. `worst` is
    the largest relative difference of a loss, infinite where a loss is missing or not finite.
    """

    steps: dict[int, tuple[int, int]]  # segment -> first and last step
    losses: int
    batches: int
    first: str | None
    worst: float
    is_same_data: bool


def numbers_of(folder: Path) -> dict[Key, dict[str, Any]]:
    """Read the metrics and the ledger of a run; returns one dict for each recorded step."""
    found = {(line["segment"], line["step"]): dict(line) for line in read_metrics(folder)}
    for line in read_ledger(folder / "ledger"):
        own = found.setdefault((line["segment"], line["step"]), {})
        own |= {name: line[name] for name in BATCHES}
    return found


def compared(
    old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]], numbers: dict[int, int]
) -> RecordComparison:
    """Compare every recorded step with the same step of the copy.

    `numbers` maps a segment of the recorded run to its number in the copy.
    """
    first, worst, is_same_data, batches, losses = None, 0.0, True, 0, 0
    steps: dict[int, tuple[int, int]] = {}
    for segment, step in sorted(old):
        if segment not in numbers:
            continue
        one, other = old[segment, step], new.get((numbers[segment], step), {})
        low, _ = steps.get(segment, (step, step))
        steps[segment] = low, step
        batches += "batch_hash" in one
        losses += "loss" in one
        for name in dict.fromkeys((*BATCHES, *NUMBERS)):
            if name not in one or (name == "val_loss" and name not in other):
                continue
            if one[name] == other.get(name, math.nan):
                continue
            shown = f"{one[name]} recorded, {other.get(name, 'nothing')} now"
            first = first or f"segment {segment}, step {step}: {name} {shown}"
            is_same_data = is_same_data and name not in BATCHES
            if name == "loss":
                worst = max(worst, distance(one[name], other.get(name)))
    return RecordComparison(steps, losses, batches, first, worst, is_same_data)


def distance(one: float | None, other: float | None) -> float:
    """Relative difference of two losses; infinite where one of them is missing."""
    if one is None or other is None:
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def why_not_bits(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], notes: Sequence[str]
) -> list[str]:
    """Reasons why equal bits cannot be expected; an empty list where they can."""
    reasons = list(notes)
    now = new[-1] if new else {}
    for name in DECIDES_BITS:
        then = {str(entry.get(name)) for entry in old}
        if then != {str(now.get(name))}:
            reasons.append(f"{name} was {' and '.join(sorted(then))}, now {now.get(name)}")
    then = {str(entry["packages"].get("deepspeed")) for entry in old}
    if then != {str(now.get("packages", {}).get("deepspeed"))}:
        reasons.append(f"deepspeed was {' and '.join(sorted(then))}")
    return reasons


def verdict_of(found: RecordComparison, reasons: Sequence[str]) -> tuple[str, bool]:
    """Text of the verdict, and True where the copy is as near as can be expected."""
    spans = ", ".join(f"{number} ({a} to {b})" for number, (a, b) in sorted(found.steps.items()))
    segments = f"{'segment' if len(found.steps) == 1 else 'segments'} {spans}"
    many = f"{counted(found.losses, 'loss', 'losses')} and "
    many += f"{counted(found.batches, 'batch hash', 'batch hashes')} of {segments}"
    if found.first is None:
        return f"identical: {many}", True
    lines = [f"first difference: {found.first}"]
    if not reasons:
        return "\n".join([*lines, f"DIFFERENT: {many} were compared"]), False
    lines += [f"bits cannot be expected: {reason}" for reason in reasons]
    is_near = found.is_same_data and found.worst <= TOLERANCE
    verdict = "equal within what can be expected" if is_near else "DIFFERENT"
    lines.append(f"{verdict}: {many}; largest relative difference of a loss {found.worst:.1e}")
    return "\n".join(lines), is_near
