"""Two records of one run, held against each other: identical, the first difference, or why not.

The one rule: recorded numbers are compared exactly, as they stand in the files. Where other
hardware or another torch makes that too much to ask, it is said why, and losses must agree to
TOLERANCE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.stream.ledger import read_ledger
from record.records import read_metrics

TOLERANCE = 1e-5  # relative, of losses; norms of gradients move ten times as much
NUMBERS = ("loss", "grad_norm", "lr", "tokens", "targets", "skipped", "val_loss")
BATCHES = ("batch_hash", "data_step", "samples", "targets")
# Of environment.json: what decides bits.
DECIDES_BITS = ("torch", "cuda", "machine", "processor", "cpu", "threads", "gpu")

Key = tuple[int, int]  # segment, step


@dataclass(frozen=True)
class Compared:
    """`first` is the first difference in words, None = identical; `worst` the largest relative
    difference of a loss, infinite where one is not finite or missing.
    """

    steps: dict[int, tuple[int, int]]  # segment -> first and last step
    losses: int
    batches: int
    first: str | None
    worst: float
    is_same_data: bool


def numbers_of(folder: Path) -> dict[Key, dict[str, Any]]:
    """What a run recorded of each step: metrics, and the ledger's fields."""
    found = {(line["segment"], line["step"]): dict(line) for line in read_metrics(folder)}
    for line in read_ledger(folder / "ledger"):
        own = found.setdefault((line["segment"], line["step"]), {})
        own |= {name: line[name] for name in BATCHES}
    return found


def compared(
    old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]], numbers: dict[int, int]
) -> Compared:
    """Hold each recorded step against the copy's; `numbers` has its segments: recorded -> new."""
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
    return Compared(steps, losses, batches, first, worst, is_same_data)


def distance(one: float | None, other: float | None) -> float:
    """Relative difference; infinite where one of them is no number."""
    if one is None or other is None:
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def why_not_bits(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], notes: Sequence[str]
) -> list[str]:
    """Why equal bits cannot be expected; none where they can."""
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


def told(found: Compared, reasons: Sequence[str]) -> tuple[str, bool]:
    """The verdict in words, and whether it is a good one."""
    spans = ", ".join(f"{number} ({a} to {b})" for number, (a, b) in sorted(found.steps.items()))
    many = f"{found.losses} losses and {found.batches} batch hashes of segments {spans}"
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
