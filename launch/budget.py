"""Whether a run is started again after an attempt, and when: pure functions of its attempts.

    finished, stopped    the end                     93    the end: do not retry
    75                   the end: requeue            76    again, at once
    anything else        again, as long as attempts come farther than those before them

Rule: only progress buys another try. An attempt that adds no step and no checkpoint costs one of
`restart.attempts`. A failure before the run's first step ever, and running out of memory twice
after the same step, are not tried again. Units: seconds, steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from base.exits import DO_NOT_RETRY
from base.values import counted
from launch.ranks.outcome import how
from record.attempts import Attempt, Progress

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0
# Failures of the code itself, which the same code makes again.
OWN = ("failed", "out_of_memory")
# The wait after an attempt that was refused before it began, when the one before had lost a host:
# ranks of that host may still hold the run.
BUSY_WAIT_S = 5.0


@dataclass(frozen=True)
class RestartVerdict:
    """What follows an attempt. `why` is for a person; `is_final` = the run is given up."""

    again: bool
    status: int = 0
    wait_s: float = 0.0
    why: str = ""
    is_final: bool = False


class Budget:
    """Judges the attempts of one launch, one after the other.

    `progress` is how far the run had come before them; `busy_s` is how long the ranks of a lost
    host may still hold the run. `shrink()` changes a run whose first step does not fit, and says
    how; "" where it cannot.
    """

    def __init__(
        self,
        attempts: int,
        progress: Progress,
        busy_s: float = 0.0,
        shrink: Callable[[], str] = str,
    ):
        self._attempts, self._busy_s, self._shrink = attempts, busy_s, shrink
        self._best_step = (progress.segment, progress.step)
        self._best_saved = (progress.segment, progress.saved_step)
        self._fruitless = 0
        self._oom_at: tuple[int, int] | None = None
        self._last: Attempt | None = None
        self._busy_for_s = 0.0

    def judge(self, attempt: Attempt) -> RestartVerdict:
        """Decide what follows `attempt`."""
        before, self._last = self._last, attempt

        # The end that was asked for.
        if attempt.cause in ("finished", "stopped", "preempted"):
            return RestartVerdict(False, attempt.status)

        # Ends that no other try can change.
        if self._waits_for_cut_off_ranks(attempt, before):
            self._last = before
            why = "ranks that were cut off may still hold the run"
            return RestartVerdict(True, 0, BUSY_WAIT_S, why)
        if self._best_step[1] and is_nothing(attempt.progress):
            step = self._best_step[1]
            return final(f"nothing is left of the run's folder, which had come to step {step}")
        if attempt.cause in ("refused", "gave_up") or self._attempts == 0:
            return RestartVerdict(False, attempt.status)
        has_progressed = self._has_progressed(attempt.progress)
        if attempt.cause == "rewound" and (has_progressed or attempt.has_begun):
            return RestartVerdict(True, why="the run was taken back")
        if self._best_step[1] == 0 and attempt.cause in OWN:  # a mistake that a person must correct
            if attempt.cause == "out_of_memory" and (why := self._shrink()):
                return RestartVerdict(True, why=why)
            return RestartVerdict(False, attempt.status)
        if why := self._same_out_of_memory(attempt):
            return final(why)

        # Another try, as long as some are left.
        self._fruitless = 0 if has_progressed else self._fruitless + 1
        if self._fruitless >= self._attempts:
            return final(
                f"{counted(self._fruitless, 'attempt')} in a row added no step and no checkpoint"
                f" beyond step {self._best_step[1]} (restart.attempts={self._attempts})"
            )
        wait_s = FIRST_WAIT_S * 2 ** (self._fruitless - 1) if self._fruitless else 0.0
        left = self._attempts - self._fruitless
        why = f"{describe(attempt)}; {left} tries left"
        return RestartVerdict(True, 0, min(wait_s, LONGEST_WAIT_S), why)

    def _has_progressed(self, now: Progress) -> bool:
        """Whether the run is farther than ever; remembers how far. A new segment counts anew."""
        step, saved = (now.segment, now.step), (now.segment, now.saved_step)
        is_farther = step > self._best_step or saved > self._best_saved
        self._best_step = max(self._best_step, step)
        self._best_saved = max(self._best_saved, saved)
        return is_farther

    def _same_out_of_memory(self, attempt: Attempt) -> str:
        """Why running out of memory would happen again; empty where it may not."""
        here = (attempt.progress.segment, attempt.progress.step)
        if attempt.cause != "out_of_memory":
            self._oom_at = None
        elif self._oom_at == here:
            return f"out of memory twice after step {here[1]}; it would be again"
        else:
            self._oom_at = here
        return ""

    def _waits_for_cut_off_ranks(self, attempt: Attempt, before: Attempt | None) -> bool:
        """Whether ranks of a lost host may be why the run is busy, for `busy_s` at most."""
        is_busy = (
            attempt.cause == "refused"
            and not attempt.has_begun
            and before is not None
            and before.cause in ("lost_host", "hung")
            and self._busy_for_s < self._busy_s
        )
        self._busy_for_s = self._busy_for_s + BUSY_WAIT_S if is_busy else 0.0
        return is_busy


def is_nothing(progress: Progress) -> bool:
    """Whether a run has neither a step nor a checkpoint."""
    return (progress.segment, progress.step, progress.saved_step) == (0, 0, 0)


def final(why: str) -> RestartVerdict:
    """The run is given up."""
    return RestartVerdict(False, DO_NOT_RETRY, why=why, is_final=True)


def describe(attempt: Attempt) -> str:
    """Who failed, and how, in a few words."""
    where = f" of {attempt.host}" if attempt.host else ""
    if attempt.cause == "lost_host":
        return f"host {attempt.host or '?'} was lost"
    if attempt.rank is None and attempt.cause == "killed":
        return "all hosts ended their ranks, because they no longer heard this launcher"
    if attempt.rank is None:
        return attempt.cause.replace("_", " ")
    what = {"hung": "hung", "out_of_memory": "ran out of memory"}.get(attempt.cause)
    return f"rank {attempt.rank}{where} {what or how(_as_popen(attempt.status))}"


def _as_popen(status: int) -> int:
    """The status of a killed process as Popen gives it: minus the signal."""
    return 128 - status if status > 128 else status
