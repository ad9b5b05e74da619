"""Keeps a run alive: one attempt after the other, until it ends by itself or makes no progress.

    prepare the hosts -> start all ranks -> they end -> a line in events.jsonl -> launch.budget
                                                          again | the end | given up, with a bundle

Rule: an attempt is all ranks or none, and what became of it is on record before the next one
begins. This process decides; it changes neither weights nor checkpoints. Units: seconds.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from base.errors import UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED, REQUEUE
from base.run_variables import FAMILY, LAUNCH
from launch.budget import Budget
from launch.ranks.outcome import cause_of, explain, first_failure
from launch.ranks.screen import Screen
from launch.ranks.start import StopSignals
from record.attempts import Attempt, RankEnd, with_failure
from record.failure import Failure
from record.supervisor_log import SupervisorLog

LOOK_S = 0.5

# Sends people a message of a kind, and returns at once.
Alert = Callable[[str, str], None]


@dataclass(frozen=True)
class AttemptStart:
    """How the next attempt starts.

    `live(screen, stop_signals, variables, has_begun)` starts all ranks, with `variables` in their
    environment, and returns when all have ended. `has_begun` = an earlier attempt of this launch
    has opened the record.
    """

    num_ranks: int
    live: Callable[[Screen, StopSignals, dict[str, str], bool], Attempt]


def supervise(
    prepare: Callable[[Attempt | None], AttemptStart],
    supervisor_log: SupervisorLog,
    budget: Budget,
    stop_signals: StopSignals,
    bundle: Callable[[str], Path | None],
    patience_s: float = 0.0,
    alert: Alert = lambda kind, text: None,
) -> int:
    """Start attempts until there is an end; returns the exit status.

    `prepare(attempt)` says how the next attempt starts, given the one before. It raises UserError
    where there is no way, and a signal interrupts it. `bundle(why)` keeps what a person needs when
    the run is given up. A record that cannot be written is waited for, `patience_s` at most.
    """

    def give_up(why: str) -> int:
        """Report why the run is not started again, and where everything about it lies."""
        folder = bundle(why)
        text = f"stopped for good: {why}{f'; see {folder}' if folder else ''}"
        print(text, file=sys.stderr, flush=True)
        alert("gave_up", text)
        return DO_NOT_RETRY

    attempt: Attempt | None = None
    has_begun, family = supervisor_log.has_begun(), supervisor_log.new_launch()
    while True:
        # Prepare the hosts.
        try:
            stop_signals.then_interrupt()
            start = prepare(attempt)
            stop_signals.then_nothing()
        except KeyboardInterrupt:
            return status_between_attempts(stop_signals.first or signal.SIGINT)
        except UserError as error:
            if attempt is None:
                raise
            return give_up("; ".join(error.problems))

        # Start all ranks, and wait until all have ended.
        supervisor_log.attend()
        launch = supervisor_log.new_launch()
        screen = Screen(start.num_ranks)
        before = attempt
        try:
            attempt = start.live(screen, stop_signals, {LAUNCH: launch, FAMILY: family}, has_begun)
        except (OSError, UserError) as error:  # no process, no temporary file, no ssh: for now
            if attempt is None:
                raise
            attempt = not_started(error)
        status = screen.finish(attempt.ends, stop_signals.first)

        # Put it on record.
        supervisor_log.attend()
        await_record(supervisor_log, stop_signals, patience_s, alert)
        restart_s = max(0.0, attempt.began_unix_s - before.ended_unix_s) if before else 0.0
        attempt = judged(replace(attempt, status=status, restart_s=restart_s), stop_signals.first)
        attempt = supervisor_log.close(launch, has_begun, attempt)
        has_begun = has_begun or attempt.has_begun

        # Decide what follows.
        verdict = budget.judge(attempt)
        if verdict.is_final:
            return give_up(verdict.why)
        if not verdict.again:
            is_given_up = attempt.cause == "gave_up" and not supervisor_log.has_told()
            return give_up(reason(attempt, start.num_ranks)) if is_given_up else verdict.status
        saved = attempt.saved_step or attempt.progress.saved_step
        whence = f"checkpoint step {saved}" if saved else "step 0"
        when = f" in {verdict.wait_s:.0f} s" if verdict.wait_s else ""
        text = f"{verdict.why}; going on from {whence}{when}"
        log(f"{text} (Ctrl-C ends the run)")
        if attempt.cause not in ("rewound", "refused"):  # reported by the attempt, or soon over
            alert("restart", text)
        status = rest(verdict.wait_s, stop_signals, supervisor_log)
        if status is not None:
            return status


def not_started(error: OSError | UserError) -> Attempt:
    """An attempt that ended before it had ranks."""
    last = tuple(f"failed: {line}" for line in getattr(error, "problems", [error]))
    now = time.time()
    return Attempt(now, now, ends=(RankEnd(rank=0, status=FAILED, after_s=0.0, last=last),))


def judged(attempt: Attempt, stopped_by: int | None) -> Attempt:
    """The attempt with its cause, and with rank, host and exception of the first failure."""
    attempt = replace(attempt, cause=cause_of(attempt.ends, stopped_by))
    first = first_failure(attempt.ends)
    if first is None:
        return attempt
    attempt = replace(
        attempt,
        rank=None if first.is_lost else first.rank,
        host=first.host or None,
        phase=first.phase,
        why=first.hung,
    )
    failure = Failure.from_dict(first.error) if first.error and first.status > 0 else None
    return with_failure(attempt, failure)


def await_record(
    supervisor_log: SupervisorLog, stop_signals: StopSignals, patience_s: float, alert: Alert
) -> None:
    """Wait until the record can be written: a full disk is emptied, a file system comes back.

    Attempts that would fail meanwhile cost more than the wait. A signal ends it.
    """
    until, reported = time.monotonic() + patience_s, None
    while (
        stop_signals.first is None
        and time.monotonic() < until
        and (trouble := supervisor_log.trouble())
    ):
        if trouble != reported:
            text = f"{trouble}; waiting up to {patience_s:.0f} s for that to change"
            log(f"{text} (restart.wait_s)")
            alert("waiting", text)
            reported = trouble
        time.sleep(LOOK_S)


def status_between_attempts(number: int) -> int:
    """The exit status when signal `number` asks for the end while no rank lives.

    All there is is saved, so whoever preempts the run puts it back in the queue.
    """
    return 128 + number if number == signal.SIGINT else REQUEUE


def reason(attempt: Attempt, num_ranks: int) -> str:
    """Why an attempt ended for good, in the words of its own ranks."""
    lines = (line.removeprefix("refused: ") for line in explain(attempt.ends, num_ranks))
    return "; ".join(lines)


def rest(seconds: float, stop_signals: StopSignals, supervisor_log: SupervisorLog) -> int | None:
    """Wait before the next attempt; the exit status of an end that is asked for meanwhile."""
    end = time.monotonic() + seconds
    while True:
        if stop_signals.first is not None:
            return status_between_attempts(stop_signals.first)
        if supervisor_log.stop_is_asked():
            log("it was asked to stop: not started again")
            return FINISHED
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, LOOK_S))


def log(text: str) -> None:
    """Print a line of the supervisor."""
    print(f"restart: {text}", file=sys.stderr, flush=True)
