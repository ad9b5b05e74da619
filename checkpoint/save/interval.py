"""The steps after which a run saves: at a fixed interval, by time, or by Young's formula.

    T = sqrt(2 x mean time between failures x stall of a save)

A shorter interval stalls more than it saves, and a longer one repeats more work after a failure
(J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974). Rule: every
rank computes the next step to save from numbers that all ranks have, and does so before the current
save is written. The checkpoint therefore contains that step, and a run that goes on from it saves
next where the uninterrupted run would have. Saves by time (`Timer`) are rank 0's decision, which
travels to all ranks with the requests of a step. Units: seconds, steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from base.units import duration
from base.values import counted

# Minutes of work at risk where nothing else is chosen.
DEFAULT_MINUTES = 10.0
# Interval while no stall has been measured yet.
FIRST_STEPS = 10
REMEMBERED = 9  # saves of which the median is used, so that one slow save changes little
STEADY = 0.1  # the interval is kept while the formula differs from it by less than this share


@dataclass(frozen=True)
class Cost:
    """Measurements of one rank: `stall_s` and `save_s` of the last save, `step_s` since then. None
    means that there is no measurement yet.
    """

    stall_s: float | None
    save_s: float | None
    step_s: float | None


def is_due(step: int, every: int, last_step: int) -> bool:
    """Return whether what is done each `every` updates (0 = never) and after the last one follows
    update `step`. Saves at a fixed interval and evaluations use it.
    """
    return step == last_step or (every > 0 and step % every == 0)


def limit_s(interval: int | str, minutes: float | None, mtbf_hours: float | None) -> float | None:
    """Seconds of work that may be lost by a kill, as the recipe says; None: no limit in time."""
    if interval != "auto" or (minutes is None and mtbf_hours is not None):
        return None
    return 60 * (DEFAULT_MINUTES if minutes is None else minutes)


def risk(interval: int | str, minutes: float | None, mtbf_hours: float | None) -> str:
    """The work that a kill loses at most, in words for a person."""
    seconds = limit_s(interval, minutes, mtbf_hours)
    if seconds is not None:
        return f"about {duration(seconds)} of work (checkpoint.interval=auto)"
    if interval == "auto":
        return "the work of one interval, by Young's formula (checkpoint.interval=auto)"
    if interval == 0:
        return "all work since the start: no save before the end (checkpoint.interval=0)"
    return f"the work of {counted(interval, 'step')} (checkpoint.interval={interval})"


class Timer:
    """Decides by time when a save is due: after `limit_s` seconds of work; None = never."""

    def __init__(self, limit_s: float | None, now: Callable[[], float] = time.monotonic):
        self._limit_s, self._now = limit_s, now
        self._since = now()

    def restart(self) -> None:
        """Work counts from here: training begins, or a save has just been made or left out."""
        self._since = self._now()

    def is_over(self) -> bool:
        """Return whether so much work has been done that it must be saved."""
        return self._limit_s is not None and self._now() - self._since >= self._limit_s


def young_steps(mtbf_s: float, stall_s: float, save_s: float, step_s: float) -> int:
    """Return the number of steps between saves, at least one.

    The interval is never shorter than a save takes, because the next save would wait for it. It is
    never longer than the time between failures, where the formula does not hold any more (it
    assumes a stall that is small against that time).
    """
    seconds = min(max(math.sqrt(2 * mtbf_s * stall_s), save_s), mtbf_s)
    return max(1, round(seconds / step_s))


class Pace:
    """The next step of a run after which it saves; the same on all ranks."""

    def __init__(self, mtbf_s: float):
        self.mtbf_s = mtbf_s
        self.next = FIRST_STEPS
        self.interval = FIRST_STEPS
        self.stalls_s: list[float] = []
        self.saves_s: list[float] = []
        self._since: float | None = None  # the first step edge after the last save
        self._edges = 0

    def go_on(self, after_step: int, stored: dict[str, Any]) -> None:
        """Continue from what a checkpoint stored; one saved at a fixed interval stored nothing."""
        self.next = after_step + FIRST_STEPS
        if stored:
            self.next, self.interval = stored["next"], stored["interval"]
            self.stalls_s, self.saves_s = list(stored["stalls_s"]), list(stored["saves_s"])

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether a save follows update `step`: each planned one, and the last one."""
        return step == last_step or step >= self.next

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint."""
        return {
            "next": self.next,
            "interval": self.interval,
            "stalls_s": self.stalls_s,
            "saves_s": self.saves_s,
        }

    def edge(self) -> None:
        """Count the end of a step. Timing begins with the end of the first step after a save or a
        start, because that step may contain work that is done once.
        """
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._edges += 1

    def step_s(self) -> float | None:
        """Return the mean time from step to step since the last save, evaluations included."""
        if self._since is None or self._edges == 0:
            return None
        return (time.perf_counter() - self._since) / self._edges

    def decide(self, step: int, costs: Sequence[Cost]) -> bool:
        """Set `next` from the measurements of all ranks, before the save after `step`; return
        whether the interval has changed. Training waits for the slowest rank, so the maximum is
        used.
        """
        before = self.interval
        for known, measured in (
            (self.stalls_s, [one.stall_s for one in costs]),
            (self.saves_s, [one.save_s for one in costs]),
        ):
            if None not in measured:
                known.append(max(measured))
                del known[:-REMEMBERED]
        step_times = [one.step_s for one in costs]
        if self.stalls_s and self.saves_s and None not in step_times:
            stall_s, save_s = map(statistics.median_low, (self.stalls_s, self.saves_s))
            wanted = young_steps(self.mtbf_s, stall_s, save_s, max(step_times))
            if abs(wanted - before) > STEADY * before:
                self.interval = wanted
        self.postpone(step)
        return self.interval != before

    def postpone(self, step: int) -> None:
        """Set `next` one interval after `step`, whether a save follows `step` or not."""
        self.next = step + self.interval
        self._since, self._edges = None, 0
