"""Keeps a run alive: one attempt after the other, until it ends by itself or makes no progress.

    mend the hosts -> start all ranks -> they end -> one line in events.jsonl -> launch.budget
                                                      again | the end | given up, with a bundle

The one rule: an attempt is all ranks or none; what became of it is on record before the next
begins.
This process decides, and touches neither weights nor checkpoints. Units: seconds.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from base.errors import UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED, REQUEUE
from base.run_variables import FAMILY, LAUNCH
from launch.budget import Attempt, Budget
from launch.ranks.outcome import End, cause_of, explain, first_failure
from launch.ranks.screen import Screen
from launch.ranks.start import Asked, Lived
from record import attempts

LOOK_S = 0.5


class SupervisorLog(Protocol):
    """The record of the run, as far as it is used here."""

    def new_launch(self) -> str:
        """A name for the next start of all ranks."""

    def has_begun(self) -> bool:
        """Whether this very job was started before, and put back in the queue."""

    def place(self) -> tuple[int, int, int]:
        """(segment, newest step, newest saved step); zeros where there is nothing."""

    def attend(self) -> None:
        """Let people see that somebody starts this run."""

    def trouble(self) -> str | None:
        """Why nothing can be put on record now; None where it can."""

    def close(self, launch: str, is_ours: bool, attempt: attempts.Attempt) -> attempts.Attempt:
        """Write the line of an attempt; the attempt, without a number where nothing had begun."""

    def stop_is_asked(self) -> bool:
        """Whether `make stop` asked for the end; the request is then carried out."""

    def has_told(self) -> bool:
        """Whether the newest attempt itself said why it is the last one, and left a bundle."""


@dataclass(frozen=True)
class Start:
    """What an attempt is made of. `attempts` starts all ranks and returns when all have ended."""

    num_ranks: int
    live: Callable[[Screen, Asked, dict[str, str], bool], Lived]


def supervise(
    mend: Callable[[Attempt | None, Lived | None], Start],
    supervisor_log: SupervisorLog,
    budget: Budget,
    asked: Asked,
    bundle: Callable[[str], Path | None],
    patience_s: float = 0.0,
    tell: Callable[[str, str], None] = lambda kind, text: None,
) -> int:
    """Live until there is an end; returns the exit status.

    `mend(attempt, lived)` says how the next attempt starts, given the one before; it raises
    UserError
    where it cannot, and a signal breaks it off. `bundle(why)` keeps what a person needs when the
    run is given up; for `patience_s` it waits for a record that cannot be written. People are told
    by `tell(kind, text)`, which returns at once.
    """

    def give_up(why: str) -> int:
        """Say why the run is not started again, and where everything about it lies."""
        folder = bundle(why)
        text = f"stopped for good: {why}{f'; see {folder}' if folder else ''}"
        print(text, file=sys.stderr, flush=True)
        tell("gave_up", text)
        return DO_NOT_RETRY

    attempt: Attempt | None = None
    lived: Lived | None = None
    has_begun, family = supervisor_log.has_begun(), supervisor_log.new_launch()
    while True:
        try:
            asked.then_interrupt()
            start = mend(attempt, lived)
            asked.then_nothing()
        except KeyboardInterrupt:
            return asked_status(asked.first or signal.SIGINT)
        except UserError as error:
            if attempt is None:
                raise
            return give_up("; ".join(error.problems))
        supervisor_log.attend()
        launch = supervisor_log.new_launch()
        screen = Screen(start.num_ranks)
        before = lived
        try:
            lived = start.live(screen, asked, {LAUNCH: launch, FAMILY: family}, has_begun)
        except (OSError, UserError) as error:  # no process, no temporary file, no ssh: for now
            if attempt is None:
                raise
            lived = not_started(error)
        status = screen.finish(lived.ends, asked.first)
        supervisor_log.attend()
        await_record(supervisor_log, asked, patience_s, tell)
        attempt, saved = written_down(
            supervisor_log, lived, status, asked, launch, has_begun, before
        )
        has_begun = has_begun or attempt.has_begun
        verdict = budget.judge(attempt)
        if verdict.is_final:
            return give_up(verdict.why)
        if not verdict.again:
            # It had begun: nobody refused it, it ended for good by itself.
            is_given_up = (
                attempt.cause == "refused" and attempt.has_begun and not supervisor_log.has_told()
            )
            return give_up(reason(lived, start.num_ranks)) if is_given_up else verdict.status
        saved = saved or supervisor_log.place()[2]
        whence = f"checkpoint step {saved}" if saved else "step 0"
        when = f" in {verdict.wait_s:.0f} s" if verdict.wait_s else ""
        text = f"{verdict.why}; going on from {whence}{when}"
        log(f"{text} (Ctrl-C ends the run)")
        if attempt.cause not in ("rewound", "refused"):  # told by the attempt itself, or soon over
            tell("restart", text)
        status = rest(verdict.wait_s, asked, supervisor_log)
        if status is not None:
            return status


def not_started(error: OSError | UserError) -> Lived:
    """An attempt that ended before it had ranks."""
    last = tuple(f"failed: {line}" for line in getattr(error, "problems", [error]))
    now = time.time()
    return Lived([End(rank=0, status=FAILED, after_s=0.0, last=last)], now, now, 0.0)


def await_record(
    supervisor_log: SupervisorLog, asked: Asked, patience_s: float, tell: Callable[[str, str], None]
) -> None:
    """Wait until what happened can be put on record: a full disk is emptied by somebody, a file
    system comes back; the attempts that it would cost are worth more. A signal breaks it off."""
    until, told = time.monotonic() + patience_s, None
    while (
        asked.first is None and time.monotonic() < until and (trouble := supervisor_log.trouble())
    ):
        if trouble != told:
            text = f"{trouble}; waiting up to {patience_s:.0f} s for that to change"
            log(f"{text} (restart.wait_s)")
            tell("waiting", text)
            told = trouble
        time.sleep(LOOK_S)


def written_down(
    supervisor_log: SupervisorLog,
    lived: Lived,
    status: int,
    asked: Asked,
    launch: str,
    is_ours: bool,
    before: Lived | None,
) -> tuple[Attempt, int | None]:
    """Put an attempt on record; what the budget must know of it, and its newest saved step."""
    first = first_failure(lived.ends)
    how = {
        "cause": cause_of(lived.ends, asked.first),
        "status": status,
        "rank": first.rank if first and not first.is_lost else None,
        "host": first.host or None if first else None,
    }
    seen = {"phase": first.phase, "why": first.hung} if first else {}
    closed = supervisor_log.close(
        launch,
        is_ours,
        attempts.Attempt(
            **how,
            **seen,
            began_unix_s=lived.began_unix_s,
            ended_unix_s=lived.ended_unix_s,
            detect_s=lived.detect_s,
            restart_s=max(0.0, lived.began_unix_s - before.ended_unix_s) if before else 0.0,
        ),
    )
    place = supervisor_log.place()
    return Attempt(place=place, has_begun=closed.has_begun, **how), closed.saved_step


def asked_status(number: int) -> int:
    """The status of an end that a signal asks for while no rank lives: all that there is is saved,
    so whoever preempts puts the run back in the queue."""
    return 128 + number if number == signal.SIGINT else REQUEUE


def reason(lived: Lived, num_ranks: int) -> str:
    """Why an attempt ended for good, in its own words."""
    words = (line.removeprefix("refused: ") for line in explain(lived.ends, num_ranks))
    return "; ".join(words)


def rest(seconds: float, asked: Asked, supervisor_log: SupervisorLog) -> int | None:
    """Wait before the next attempt; the exit status of an end that is asked for meanwhile."""
    end = time.monotonic() + seconds
    while True:
        if asked.first is not None:
            return asked_status(asked.first)
        if supervisor_log.stop_is_asked():
            log("it was asked to stop: not started again")
            return FINISHED
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, LOOK_S))


def log(text: str) -> None:
    """A line of the supervisor's own."""
    print(f"restart: {text}", file=sys.stderr, flush=True)
