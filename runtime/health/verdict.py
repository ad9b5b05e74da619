"""The health judge: it compares one step's loss and gradient norm with the steps before it.

    (health, seen, limits) -> judge -> verdict: go on | skip | roll back | stop, and the next health

    bad step            not finite, or an outlier: far above the running median of loss or norm. It
                        is skipped, because the verdict comes before the weights move
    sustained trouble   several non-finite steps in a row, too many bad steps among the last ones,
                        or a loss that has risen and stays high: the run is rewound to an older
                        checkpoint, and after too many rewinds it stops

Rule: the judge is a pure function of plain numbers. Every rank with the same numbers gives the same
verdict, and recorded runs can be judged again. Only accepted steps enter the statistics, so one NaN
or one spike never changes what counts as usual.

Spreads are the larger of two robust estimates, from the median deviation and from the 95th
percentile, so that heavy tails are not taken for spikes. Norms are judged by their logarithm.
Units: nats, steps; norms before clipping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from base.errors import UserError
from base.values import counted
from recipes.faults import Health as Knobs

# For a normal distribution: standard deviation / median absolute deviation, and the number of
# standard deviations between its median and its 95th percentile.
PER_DEVIATION, AT_95 = 1.4826, 1.645
# Factor on all limits during warm-up: while the learning rate rises, losses and norms move anyway.
WARMUP_SLACK = 2.0
# Bad steps are counted among the last LOOK_BACK * health.patience steps.
LOOK_BACK = 4
# Most recent bad steps of a healthy run: one or two skipped steps do the weights no harm.
LONE = 2
# Limit on a rise of the loss level. The level is a median over many steps, so two standard
# deviations of a single step are far outside its noise.
DRIFT_SIGMAS = 2.0
# Rewinds are counted over, and go back at most, REWINDS_WITHIN * health.rewind steps.
REWINDS_WITHIN = 10
SMALLEST_NORM = 1e-30  # stands for a norm of 0, which has no logarithm


class Verdict(StrEnum):
    """The decision about a step."""

    GO_ON = "go_on"
    SKIP = "skip"
    ROLL_BACK = "roll_back"
    STOP = "stop"


@dataclass(frozen=True)
class Limits:
    """The health policy of a recipe, and its number of warm-up steps."""

    knobs: Knobs = dataclasses.field(default_factory=Knobs)
    warmup_steps: int = 0


@dataclass(frozen=True)
class Seen:
    """One step before its update. `regime` names the composition of its data: batch, mixture."""

    step: int
    data_step: int
    loss: float  # mean over the global batch
    grad_norm: float  # of the whole model; DeepSpeed gives inf or -1 where it is not finite
    regime: str = ""


@dataclass(frozen=True)
class HealthState:
    """The statistics that the judge keeps from step to step; checkpoints save them."""

    losses: tuple[float, ...] = ()  # of accepted steps, oldest first
    norms: tuple[float, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()  # (step, data step) of recent bad steps, oldest first
    skips_in_a_row: int = 0  # newest steps in a row that were not finite
    skipped_steps: int = 0  # all steps that did not move the weights, also those of data.skip
    regime: str = ""
    best_loss: float | None = None  # lowest level so far; a level is a median over the window
    best_step: int = 0  # the step at which it was reached

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint's JSON, which keeps every bit of a float."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HealthState:
        """The inverse of `as_dict`. Raises UserError where another version wrote it."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not names <= set(values):  # others may stand beside them
            raise UserError(
                f"the checkpoint's health is without {', '.join(sorted(names - set(values)))};"
                " another version of the project wrote it: go on with that one"
            )
        lists = {name: tuple(values[name]) for name in ("losses", "norms")}
        bad = tuple((step, data_step) for step, data_step in values["bad"])
        return cls(**{**{name: values[name] for name in names}, **lists, "bad": bad})

    @property
    def is_well(self) -> bool:
        """True where at most LONE recent steps were bad. Only such a checkpoint is rewound to."""
        return self.skips_in_a_row == 0 and len(self.bad) <= LONE


@dataclass(frozen=True)
class Judgement:
    """A verdict, its reason, the health after it, and the step at which the trouble began."""

    verdict: Verdict
    health: HealthState
    reason: str = ""
    is_bad: bool = False  # this step must not move the weights
    onset: int = 0


def judge(
    health: HealthState, seen: Seen, limits: Limits, rewound_at: Sequence[int] = ()
) -> Judgement:
    """The judgement of one step, after its backward pass and before its update.

    `rewound_at` = steps to which earlier verdicts rewound this run.
    """
    knobs = limits.knobs
    if seen.regime != health.regime:  # other data: the statistics start again
        health = dataclasses.replace(
            health, losses=(), norms=(), regime=seen.regime, best_loss=None, best_step=0
        )
    kept_bad = tuple(
        entry for entry in health.bad if entry[0] > seen.step - LOOK_BACK * max(knobs.patience, 1)
    )
    health = dataclasses.replace(health, bad=kept_bad)
    reason = not_finite(seen)
    is_finite = not reason
    if is_finite and knobs.outliers != "off":
        reason = outlier(health, seen, limits)
    is_bad = bool(reason) and (not is_finite or knobs.outliers == "skip")
    health = with_bad(health, seen, is_finite, is_bad) if reason else with_good(health, seen, knobs)
    trouble, onset = sustained(health, seen, limits)
    if not trouble:
        verdict = Verdict.SKIP if is_bad else Verdict.GO_ON
        return Judgement(verdict, health, reason, is_bad)
    verdict, reason = remedy(seen.step, onset, trouble, knobs, rewound_at)
    return Judgement(verdict, health, reason, is_bad, onset)


def remedy(
    step: int, onset: int, trouble: str, knobs: Knobs, rewound_at: Sequence[int]
) -> tuple[Verdict, str]:
    """Roll back; or stop where that is switched off, did not help, or would lose too many steps."""
    if knobs.rewind == 0:
        return Verdict.STOP, f"{trouble} (health.rewind=0)"
    reach = REWINDS_WITHIN * knobs.rewind
    used = sum(step - reach < past for past in rewound_at)
    if used >= knobs.max_rewinds:
        return (
            Verdict.STOP,
            f"{trouble}; {counted(used, 'rewind')} within {reach} steps did not cure it",
        )
    if step - onset > reach:
        return Verdict.STOP, f"{trouble}; going back behind that would lose over {reach} steps"
    return Verdict.ROLL_BACK, trouble


def not_finite(seen: Seen) -> str:
    """The reason why a step is not finite; empty where it is. DeepSpeed gives -1 for such norms."""
    if not math.isfinite(seen.grad_norm) or seen.grad_norm < 0:
        return "gradients not finite"
    return "" if math.isfinite(seen.loss) else "loss not finite"


def outlier(health: HealthState, seen: Seen, limits: Limits) -> str:
    """The reason why a finite step is an outlier; empty where it is none."""
    knobs = limits.knobs
    if len(health.losses) < knobs.tolerant:
        return ""
    slack = WARMUP_SLACK if seen.step <= limits.warmup_steps else 1.0
    norms = [logarithm(norm) for norm in health.norms]
    norm, middle = logarithm(seen.grad_norm), median(norms)
    most = middle + slack * max(math.log(knobs.norm_factor), knobs.sigmas * spread(norms, middle))
    if norm > most:
        return (
            f"gradient norm {seen.grad_norm:.4g}; the median of the last {len(norms)} accepted"
            f" steps is {math.exp(middle):.4g}, the limit {math.exp(most):.4g}"
        )
    # A high loss with a usual gradient comes from another kind of text, and does no harm.
    if norm <= middle + slack * math.log(knobs.norm_factor) / 2:
        return ""
    middle = median(health.losses)
    most = middle + slack * max(knobs.loss_rise, knobs.sigmas * spread(health.losses, middle))
    if seen.loss > most:
        return (
            f"loss {seen.loss:.4f} with gradient norm {seen.grad_norm:.4g}; the median loss of the"
            f" last {len(norms)} accepted steps is {middle:.4f}, the limit {most:.4f}"
        )
    return ""


def sustained(health: HealthState, seen: Seen, limits: Limits) -> tuple[str, int]:
    """The trouble of the run as a whole and the step at which it began; ("", 0) without trouble."""
    knobs = limits.knobs
    if health.skips_in_a_row >= knobs.max_skips:
        count = health.skips_in_a_row
        return f"gradients were not finite in {count} steps in a row", seen.step - count + 1
    if knobs.patience and len(health.bad) >= knobs.patience:
        return (
            f"{len(health.bad)} of the last {LOOK_BACK * knobs.patience} steps were bad",
            health.bad[0][0],
        )
    if (
        knobs.drift == 0
        or health.best_loss is None
        or len(health.losses) < knobs.window
        or seen.step <= limits.warmup_steps
    ):
        return "", 0
    level = median(health.losses)
    rise = level - health.best_loss
    if rise > knobs.drift and rise > DRIFT_SIGMAS * spread(health.losses, level):
        return (
            f"the loss has risen from {health.best_loss:.4f} (median up to step"
            f" {health.best_step}) to {level:.4f}",
            health.best_step,
        )
    return "", 0


def with_bad(health: HealthState, seen: Seen, is_finite: bool, is_skipped: bool) -> HealthState:
    """The health after a bad step: it is counted, and stays out of the statistics."""
    return dataclasses.replace(
        health,
        bad=(*health.bad, (seen.step, seen.data_step)),
        skips_in_a_row=0 if is_finite else health.skips_in_a_row + 1,
        skipped_steps=health.skipped_steps + is_skipped,
    )


def with_good(health: HealthState, seen: Seen, knobs: Knobs) -> HealthState:
    """The health after an accepted step: its numbers enter the statistics."""
    losses = (*health.losses, seen.loss)[-knobs.window :]
    best_loss, best_step = health.best_loss, health.best_step
    if len(losses) == knobs.window:
        level = median(losses)
        if best_loss is None or level < best_loss:
            best_loss, best_step = level, seen.step
    return dataclasses.replace(
        health,
        losses=losses,
        norms=(*health.norms, seen.grad_norm)[-knobs.window :],
        skips_in_a_row=0,
        best_loss=best_loss,
        best_step=best_step,
    )


def passed_over(health: HealthState) -> HealthState:
    """The health after a step that the recipe skips (`data.skip`): it is only counted."""
    return dataclasses.replace(health, skipped_steps=health.skipped_steps + 1)


def median(values: Sequence[float]) -> float:
    """The median; of an even number of values the upper one of the middle two."""
    return sorted(values)[len(values) // 2]


def spread(values: Sequence[float], middle: float) -> float:
    """Robust estimate of the standard deviation: the larger of the two described above."""
    deviation = median([abs(value - middle) for value in values])
    high = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    return max(PER_DEVIATION * deviation, (high - middle) / AT_95)


def logarithm(norm: float) -> float:
    """Natural logarithm of a norm; a norm of 0 counts as SMALLEST_NORM."""
    return math.log(max(norm, SMALLEST_NORM))
