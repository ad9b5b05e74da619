"""Whether a run is started again after a life, and when: pure functions of what the lives were.

    finished, stopped            the end                 93        the end
    75                           the end: requeue        76        again, at once
    anything else                again, as long as lives come farther than those before them

The one rule: only progress buys another try. A life that adds no step and no checkpoint costs one
of `restart.lives`; a crash before the run's first step ever, or the same want of memory at the same
step, is not tried again. Units: seconds, steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from base.exits import DO_NOT_RETRY
from launch.ranks.outcome import how

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0
# A rank's own mistake, which the same code makes again.
OWN = ("failed", "out_of_memory")
# Not begun, refused, and the life before lost a host: that host's ranks may still hold the run.
BUSY_WAIT_S = 5.0


@dataclass(frozen=True)
class Life:
    """What became of one life. `place` is (segment, step, saved step) of the run after it."""

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
    """Judges the lives of one launch, one after the other."""

    def __init__(self, lives: int, place: tuple[int, int, int], busy_s: float = 0.0):
        self._lives, self._busy_s = lives, busy_s
        self._best_step, self._best_saved = place[:2], (place[0], place[2])
        self._fruitless = 0
        self._oom_at: tuple[int, int] | None = None
        self._last: Life | None = None
        self._busy_for_s = 0.0

    def judge(self, life: Life) -> Verdict:
        """What to do after `life`."""
        before, self._last = self._last, life
        if life.cause in ("finished", "stopped", "preempted"):
            return Verdict(False, life.status)
        if self._waits_for_ghosts(life, before):
            self._last = before
            return Verdict(True, 0, BUSY_WAIT_S, "ranks that were cut off may still hold the run")
        if self._best_step[1] and life.place == (0, 0, 0):
            why = (
                f"nothing is left of the run's folder, which had come to step {self._best_step[1]}"
            )
            return Verdict(False, DO_NOT_RETRY, why=why, is_final=True)
        if life.cause == "refused" or self._lives == 0:
            return Verdict(False, life.status)
        has_progressed = self._has_progressed(life)
        if life.cause == "rewound" and (has_progressed or life.has_begun):
            return Verdict(True, why="the run was taken back")
        if self._best_step[1] == 0 and life.cause in OWN:
            return Verdict(False, life.status)  # the first step was never done: a mistake to mend
        why = self._same_want_of_memory(life)
        if why:
            return Verdict(False, DO_NOT_RETRY, why=why, is_final=True)
        self._fruitless = 0 if has_progressed else self._fruitless + 1
        if self._fruitless >= self._lives:
            why = (
                f"{self._fruitless} lives in a row added no step and no checkpoint beyond step"
                f" {self._best_step[1]} (restart.lives={self._lives})"
            )
            return Verdict(False, DO_NOT_RETRY, why=why, is_final=True)
        wait_s = FIRST_WAIT_S * 2 ** (self._fruitless - 1) if self._fruitless else 0.0
        left = self._lives - self._fruitless
        return Verdict(True, 0, min(wait_s, LONGEST_WAIT_S), f"{describe(life)}; {left} tries left")

    def _has_progressed(self, life: Life) -> bool:
        """Whether the run is farther than ever; remembers how far. A new segment counts anew."""
        segment, step, saved = life.place
        is_farther = (segment, step) > self._best_step or (segment, saved) > self._best_saved
        self._best_step = max(self._best_step, (segment, step))
        self._best_saved = max(self._best_saved, (segment, saved))
        return is_farther

    def _same_want_of_memory(self, life: Life) -> str:
        here = life.place[:2]
        if life.cause != "out_of_memory":
            self._oom_at = None
        elif self._oom_at == here:
            return f"out of memory twice after step {here[1]}; it would be again"
        else:
            self._oom_at = here
        return ""

    def _waits_for_ghosts(self, life: Life, before: Life | None) -> bool:
        is_ghost = (
            life.cause == "refused"
            and not life.has_begun
            and before is not None
            and before.cause in ("lost_host", "hung")
            and self._busy_for_s < self._busy_s
        )
        self._busy_for_s = self._busy_for_s + BUSY_WAIT_S if is_ghost else 0.0
        return is_ghost


def describe(life: Life) -> str:
    """Who failed, and how, in a few words."""
    where = f" of {life.host}" if life.host else ""
    if life.cause == "lost_host":
        return f"host {life.host or '?'} was lost"
    if life.rank is None and life.cause == "killed":
        return "all hosts ended their ranks, because they no longer heard this launcher"
    if life.rank is None:
        return life.cause.replace("_", " ")
    what = {"hung": "hung", "out_of_memory": "ran out of memory"}.get(life.cause)
    return f"rank {life.rank}{where} {what or how(_as_popen(life.status))}"


def _as_popen(status: int) -> int:
    return 128 - status if status > 128 else status
