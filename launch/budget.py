"""Whether a run is started again after an attempt, and when: pure functions of what the attempts
were.

    finished, stopped            the end                 93        the end
    75                           the end: requeue        76        again, at once
    anything else                again, as long as attempts come farther than those before them

The one rule: only progress buys another try. An attempt that adds no step and no checkpoint costs
one
of `restart.attempts`; a crash before the run's first step ever, or the same lack of memory at the
same
step, is not tried again. Units: seconds, steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from base.exits import DO_NOT_RETRY
from base.values import counted
from launch.ranks.outcome import how

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0
# A rank's own mistake, which the same code makes again.
OWN = ("failed", "out_of_memory")
# Not begun, refused, and the attempt before lost a host: that host's ranks may still hold the run.
BUSY_WAIT_S = 5.0


@dataclass(frozen=True)
class Attempt:
    """What became of one attempt. `place` is (segment, step, saved step) of the run after it."""

    cause: str
    status: int
    place: tuple[int, int, int]
    has_begun: bool
    rank: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What follows. `why` is for a person; `is_final` = the run is given up, with a bundle."""

    again: bool
    status: int = 0
    wait_s: float = 0.0
    why: str = ""
    is_final: bool = False


class Budget:
    """Judges the attempts of one launch, one after the other."""

    def __init__(self, attempts: int, place: tuple[int, int, int], busy_s: float = 0.0):
        self._attempts, self._busy_s = attempts, busy_s
        self._best_step, self._best_saved = place[:2], (place[0], place[2])
        self._fruitless = 0
        self._oom_at: tuple[int, int] | None = None
        self._last: Attempt | None = None
        self._busy_for_s = 0.0

    def judge(self, attempt: Attempt) -> Verdict:
        """What to do after `attempt`."""
        before, self._last = self._last, attempt
        if attempt.cause in ("finished", "stopped", "preempted"):
            return Verdict(False, attempt.status)
        if self._waits_for_ghosts(attempt, before):
            self._last = before
            return Verdict(True, 0, BUSY_WAIT_S, "ranks that were cut off may still hold the run")
        if self._best_step[1] and attempt.place == (0, 0, 0):
            why = (
                f"nothing is left of the run's folder, which had come to step {self._best_step[1]}"
            )
            return Verdict(False, DO_NOT_RETRY, why=why, is_final=True)
        if attempt.cause == "refused" or self._attempts == 0:
            return Verdict(False, attempt.status)
        has_progressed = self._has_progressed(attempt)
        if attempt.cause == "rewound" and (has_progressed or attempt.has_begun):
            return Verdict(True, why="the run was taken back")
        if self._best_step[1] == 0 and attempt.cause in OWN:
            return Verdict(
                False, attempt.status
            )  # the first step was never done: a mistake to mend
        why = self._same_out_of_memory(attempt)
        if why:
            return Verdict(False, DO_NOT_RETRY, why=why, is_final=True)
        self._fruitless = 0 if has_progressed else self._fruitless + 1
        if self._fruitless >= self._attempts:
            why = (
                f"{counted(self._fruitless, 'attempt')} in a row added no step and no checkpoint"
                f" beyond step {self._best_step[1]} (restart.attempts={self._attempts})"
            )
            return Verdict(False, DO_NOT_RETRY, why=why, is_final=True)
        wait_s = FIRST_WAIT_S * 2 ** (self._fruitless - 1) if self._fruitless else 0.0
        left = self._attempts - self._fruitless
        return Verdict(
            True, 0, min(wait_s, LONGEST_WAIT_S), f"{describe(attempt)}; {left} tries left"
        )

    def _has_progressed(self, attempt: Attempt) -> bool:
        """Whether the run is farther than ever; remembers how far. A new segment counts anew."""
        segment, step, saved = attempt.place
        is_farther = (segment, step) > self._best_step or (segment, saved) > self._best_saved
        self._best_step = max(self._best_step, (segment, step))
        self._best_saved = max(self._best_saved, (segment, saved))
        return is_farther

    def _same_out_of_memory(self, attempt: Attempt) -> str:
        here = attempt.place[:2]
        if attempt.cause != "out_of_memory":
            self._oom_at = None
        elif self._oom_at == here:
            return f"out of memory twice after step {here[1]}; it would be again"
        else:
            self._oom_at = here
        return ""

    def _waits_for_ghosts(self, attempt: Attempt, before: Attempt | None) -> bool:
        is_ghost = (
            attempt.cause == "refused"
            and not attempt.has_begun
            and before is not None
            and before.cause in ("lost_host", "hung")
            and self._busy_for_s < self._busy_s
        )
        self._busy_for_s = self._busy_for_s + BUSY_WAIT_S if is_ghost else 0.0
        return is_ghost


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
    return 128 - status if status > 128 else status
