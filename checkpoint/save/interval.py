"""How many steps lie between two saves where the recipe says `auto`: Young's interval.

    T = sqrt(2 x mean time between failures x stall of a save)

A shorter interval stalls more than it rescues, a longer one repeats more work after a failure
(J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974). The one rule:
the next step to save after is computed by every rank from numbers that all of them have, and it is
known before the save it follows is written, so that it stands in the checkpoint: a run that goes on
from there saves next where the other would have. Units: seconds, steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Before any stall is known a save costs little beside what a failure so early would repeat.
FIRST_STEPS = 10
REMEMBERED = 9  # saves whose median counts: one that met a busy disk changes little
STEADY = 0.1  # an interval stays while the formula gives one that differs by less than this share


@dataclass(frozen=True)
class Cost:
    """What a rank measured: `stall_s` and `save_s` of the last save, `step_s` since it; None: none
    yet."""

    stall_s: float | None
    save_s: float | None
    step_s: float | None


def is_due(step: int, every: int, last_step: int) -> bool:
    """Return whether what is done each `every` updates (0 = never) and after the last one follows
    update `step`. Saves at a fixed interval and evaluations use it.
    """
    return step == last_step or (every > 0 and step % every == 0)


def young_steps(mtbf_s: float, stall_s: float, save_s: float, step_s: float) -> int:
    """Steps between saves; at least one.

    Never less than a save takes, in the step or beside it: the next one would wait for it. Never
    more than the time between failures, where the formula does not hold any more (its stall must be
    small beside that time).
    """
    seconds = min(max(math.sqrt(2 * mtbf_s * stall_s), save_s), mtbf_s)
    return max(1, round(seconds / step_s))


class Pace:
    """The next step of a run that a save follows; the same on all ranks."""

    def __init__(self, mtbf_s: float):
        self.mtbf_s = mtbf_s
        self.next = FIRST_STEPS
        self.interval = FIRST_STEPS
        self.stalls_s: list[float] = []
        self.saves_s: list[float] = []
        self._since: float | None = None  # the first step edge after the last save
        self._edges = 0

    def go_on(self, after_step: int, stored: dict[str, Any]) -> None:
        """Take up what a checkpoint says; one that says nothing was saved at a fixed interval."""
        self.next = after_step + FIRST_STEPS
        if stored:
            self.next, self.interval = stored["next"], stored["interval"]
            self.stalls_s, self.saves_s = list(stored["stalls_s"]), list(stored["saves_s"])

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether a save follows update `step`: each planned one, and the last one."""
        return step == last_step or step >= self.next

    def as_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "next": self.next,
            "interval": self.interval,
            "stalls_s": self.stalls_s,
            "saves_s": self.saves_s,
        }

    def edge(self) -> None:
        """A step has ended. The one after a save, or a start, begins the measure: it may hold what
        comes once."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._edges += 1

    def step_s(self) -> float | None:
        """Mean time from step to step since the last save, evaluations included."""
        if self._since is None or self._edges == 0:
            return None
        return (time.perf_counter() - self._since) / self._edges

    def decide(self, step: int, costs: Sequence[Cost]) -> bool:
        """Set `next`, from what each rank measured, before the save after `step`; whether the
        interval is another one now. Training waits for the slowest rank."""
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
        """Set `next` as if a save followed `step`, whether one does or not."""
        self.next = step + self.interval
        self._since, self._edges = None, 0
