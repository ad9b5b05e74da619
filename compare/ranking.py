"""Ranks the variants of a comparison by what they learned, with the spread over seeds.

    last validation loss of each run -> mean and spread of a variant -> order, distance to the best

Rule: a difference that is not larger than the spread over seeds is reported as such, never as a
result. Units: nats per token, or bits per byte of the held-out text, which compares tokenizers too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compare.results import RunResult, Side

SPEED, LOSS = "tokens_per_s", "val_loss"
LEARNED = {LOSS: "nats per token", "bits_per_byte": "bits per byte"}  # measure -> its unit
RANKS = (SPEED, *LEARNED)  # values of RANK=


@dataclass(frozen=True)
class RankedSide:
    """One variant in the order of validation loss, in the unit of the measure.

    `losses` has the last validation loss of each run, infinite where it was not finite. `spread` is
    the highest minus the lowest of them, None with one run. `difference` is to the best variant.
    `noise` is the larger spread of both, None where neither is known.
    """

    side: Side
    losses: list[float]
    mean: float
    spread: float | None
    difference: float = 0.0
    noise: float | None = None

    @property
    def is_distinguishable(self) -> bool | None:
        """True where the difference to the best is larger than the spread; None if not known."""
        if math.isinf(self.difference):
            return True
        return None if self.noise is None else self.difference > self.noise


def last_loss(run: RunResult, measure: str) -> float | None:
    """Last validation loss of a run; infinite where it was not finite, None without evaluation."""
    found = [line[measure] for line in run.lines if measure in line]
    if not found:
        return None
    return math.inf if found[-1] is None else found[-1]


def ranked(sides: Sequence[Side], measure: str = LOSS) -> list[RankedSide]:
    """The sides that were evaluated, best first; `measure` is one of LEARNED."""
    found = []
    for side in sides:
        losses = [loss for run in side.runs if (loss := last_loss(run, measure)) is not None]
        if losses:
            mean = sum(losses) / len(losses)
            is_finite = math.isfinite(mean)
            spread = max(losses) - min(losses) if len(losses) > 1 and is_finite else None
            found.append(RankedSide(side, losses, mean, spread))
    found.sort(key=lambda one: one.mean)
    return [against(one, found[0]) for one in found]


def against(one: RankedSide, best: RankedSide) -> RankedSide:
    """`one` with its difference to the best variant, and the noise of that difference."""
    spreads = [spread for spread in (one.spread, best.spread) if spread is not None]
    difference = one.mean - best.mean if math.isfinite(best.mean) else 0.0
    return RankedSide(
        one.side, one.losses, one.mean, one.spread, difference, max(spreads, default=None)
    )


def curve(side: Side, measure: str) -> dict[int, list[float]]:
    """Map each evaluated step to the validation losses of the side's runs that are finite."""
    found: dict[int, list[float]] = {}
    for run in side.runs:
        for line in run.lines:
            if line.get(measure) is not None:
                found.setdefault(line["step"], []).append(line[measure])
    return found
