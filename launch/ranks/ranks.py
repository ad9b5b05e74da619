"""The ranks of one host: started, watched, stopped, their output kept. A node agent drives them.

    start_ranks -> LocalRanks: output lines, heartbeats ... the end of each rank
        one failed: the others get a moment, then stop      one hangs: all are killed at once

Rule: when `wait` returns no rank is alive, except one that the kernel itself cannot end, which is
named. If this process is killed the kernel kills the ranks. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from base.redaction import secret_values
from launch.ranks import oom
from launch.ranks.hang_judge import HangJudge
from launch.ranks.rank_process import RankProcess
from launch.ranks.run_logs import RunLogs, log_name
from launch.ranks.shutdown import Shutdown
from launch.ranks.watchdog import LOOK_S, Hung, Watchdog, state_of
from recipes.schema import Watch
from record.attempts import RankEnd
from record.failure import failure_in

GRACE_S = 30.0  # from a request to stop to SIGKILL, where the recipe does not say
# Before the first step there is nothing to save, and a rank may wait for others in C.
START_GRACE_S, BEFORE = 10.0, {"start", "load"}
FLUSH_S = 2.0  # a silent rank's log appears so soon after the run folder


@dataclass(frozen=True)
class RankListener:
    """Functions that hear of the ranks, called from threads.

    `show(local rank, "out" or "err", line with its end)` gets their output, `ended(end)` each end.
    `suspect` tells the launcher of a run on several hosts that silence is heard here (None), and
    then which rank of this host is the likeliest to hang; the answers are `look` and `condemn`.
    """

    show: Callable[[int, str, bytes], None] = lambda local, kind, line: None
    ended: Callable[[RankEnd], None] = lambda end: None
    suspect: Callable[[Hung | None], None] | None = None


def start_ranks(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    listener: RankListener = RankListener(),
    logs: RunLogs | None = None,
    limits: Watch | None = None,
    keeps_terminal: bool = False,
) -> LocalRanks:
    """Start one rank per environment in `folder`. Raises OSError, and then none is left.

    With `limits` the ranks are watched (launch.ranks.watchdog); they also say how long a rank may
    take to end when it is asked to.
    """
    oom_kills = oom.kills()
    watchdog = Watchdog([int(one["RANK"]) for one in environments], limits) if limits else None
    beats = watchdog.environment() if watchdog else {}
    ranks: list[RankProcess] = []
    try:
        for local, environment in enumerate(environments):
            # A live line that is drawn over and over needs the terminal itself.
            has_terminal = keeps_terminal and local == 0 and sys.stdout.isatty()
            ranks.append(RankProcess(command, {**environment, **beats}, folder, has_terminal))
    except OSError:
        for rank in ranks:
            rank.process.kill()
        if watchdog:
            watchdog.close()
        raise
    is_all = len(environments) == int(environments[0].get("WORLD_SIZE", 1))
    judge = HangJudge(watchdog, is_all, listener.suspect) if watchdog else None
    grace_s = limits.grace_s if limits else GRACE_S
    secrets = secret_values(environments[0])
    return LocalRanks(ranks, listener, logs or RunLogs(None), judge, grace_s, secrets, oom_kills)


class LocalRanks:
    """The ranks of this host, from their start to the end of the last one.

    `stop`, `kill`, `suspend`, `look` and `condemn` may be called from anywhere, also from a signal
    handler; `wait` carries them out. `oom_kills` is the kernel's count before the start.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        listener: RankListener,
        logs: RunLogs,
        judge: HangJudge | None,
        grace_s: float,
        secrets: Sequence[str],
        oom_kills: int,
    ):
        self._ranks, self._listener, self._logs, self._judge = ranks, listener, logs, judge
        self._grace_s, self._secrets, self._oom_kills = grace_s, secrets, oom_kills
        self._shutdown = Shutdown()
        self._started = time.monotonic()
        self._ends: list[RankEnd] = []
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._follow, args=pair, daemon=True)
            for pair in enumerate(ranks)
        ]

    def stop(self, by: int = signal.SIGTERM) -> None:
        """Ask every rank to end by a signal, with time to save; asked again later, kill them."""
        self._shutdown.ask(by, time.monotonic())
        self._end_judgement()

    def suspend(self, is_still: bool) -> None:
        """Suspend all ranks, or let them go on; their silence means nothing meanwhile."""
        if self._judge:
            self._judge.is_paused = is_still
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGSTOP if is_still else signal.SIGCONT)

    def kill(self) -> None:
        """End every rank at once."""
        self._shutdown.kill()
        self._end_judgement()

    def _end_judgement(self) -> None:
        """Blame no rank for silence when all are killed anyway."""
        if self._judge:
            self._judge.is_over = self._shutdown.is_killed

    def look(self) -> None:
        """Find this host's likeliest rank to hang, because another host hears silence."""
        if self._judge:
            self._judge.is_asked = True

    def condemn(self, hung: Hung) -> None:
        """Take the launcher's verdict: the rank that hangs, on whichever host."""
        if self._judge:
            self._judge.verdict = hung

    def wait(self) -> list[RankEnd]:
        """Wait until no rank is alive; the ends of all, in the order in which they came."""
        shutdown, flush_at, look_at = self._shutdown, 0.0, 0.0
        for thread in self._threads:
            thread.start()
        try:
            while len(self._ends) < len(self._ranks):
                with self._changed:
                    self._changed.wait(0.1)
                now = time.monotonic()
                if now >= flush_at:
                    self._logs.flush()
                    flush_at = now + FLUSH_S

                # A request to end.
                asked = shutdown.asked_now()
                if asked is not None:
                    self._send(asked)
                    shutdown.grant(self._time_to_end_s(), now)

                # A rank that hangs, or one that failed.
                if self._judge and now >= look_at and not self._judge.is_decided:
                    look_at = now + LOOK_S
                    self._kill_if_one_hangs()
                failed = [end for end in self._ends if end.status != 0]
                if failed:
                    shutdown.failed(failed[0], now)

                # What follows when their time is up.
                if shutdown.is_kill_due(now):
                    self._send(signal.SIGKILL)
                if shutdown.is_in_vain(now):
                    self._abandon()
        finally:
            self._send(signal.SIGKILL)
            is_abandoned = any(rank.is_abandoned for rank in self._ranks)
            for thread in self._threads:
                thread.join(timeout=0 if is_abandoned else 5)
            self._logs.close()
            if self._judge:
                self._judge.watchdog.close()
        return self._ends

    def _time_to_end_s(self) -> float:
        """How long ranks may take to end when they are asked to."""
        if self._judge is None:
            return self._grace_s
        phases = {self._judge.watchdog.last(rank.rank).phase for rank in self._ranks}
        return self._grace_s if phases - BEFORE else min(self._grace_s, START_GRACE_S)

    def _kill_if_one_hangs(self) -> None:
        """Kill all ranks where one hangs, after their stacks are in their logs."""
        stacks = self._judge.look({rank.rank: rank.pid for rank in self._ranks if rank.is_living})
        if stacks is None:
            return
        hung = self._judge.hung
        for rank, text in stacks.items():
            who = f"rank {hung.rank} {hung}" if hung else "asked to end"
            note = f"== {who}; the stacks of this rank:\n{text.rstrip()}\n"
            self._logs.write(log_name(rank), note.encode())
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Send a signal to all ranks that live. One that hangs does not count as stopped."""
        hung = self._judge.hung if self._judge else None
        for rank in self._ranks:
            if rank.is_living:
                rank.was_stopped = rank.was_stopped or hung is None or hung.rank != rank.rank
                rank.send(number)

    def _abandon(self) -> None:
        """Count ranks that SIGKILL does not end as lost with their host."""
        with self._changed:
            known = {end.rank for end in self._ends}
            for rank in [r for r in self._ranks if r.is_living and r.rank not in known]:
                text = (
                    f"failed: process {rank.pid} on {socket.gethostname()} does not end after"
                    f" SIGKILL ({described(rank.pid)}): a driver or a file system of this host"
                    " does not answer; restart the host"
                )
                rank.is_abandoned = True
                end = self._end_of(rank, -signal.SIGKILL, (text,))
                self._ends.append(end)
                print(f"warning: {text.removeprefix('failed: ')}", file=sys.stderr, flush=True)
                self._listener.ended(end)

    def _follow(self, local: int, rank: RankProcess) -> None:
        """Keep and pass on the output of one rank, then report its end."""
        name = log_name(rank.rank)
        began = f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}"
        self._logs.write(name, f"== rank {rank.rank}, process {rank.pid}, {began}\n".encode())

        def show(kind: str, line: bytes) -> None:
            self._logs.write(name, line)
            self._listener.show(local, kind, line)

        status = rank.follow(show, self._secrets)
        self._logs.flush(name)  # the run's folder may have come since the last line
        if rank.is_abandoned:
            return
        after_s = time.monotonic() - self._started
        end = RankEnd(rank.rank, status, after_s, was_stopped=rank.was_stopped)
        try:  # a fault of this code must not leave `wait` without the end of a rank
            end = self._end_of(rank, status, tuple(rank.last))
            self._listener.ended(end)
        finally:
            with self._changed:
                self._ends.append(end)
                self._changed.notify()

    def _end_of(self, rank: RankProcess, status: int, last: tuple[str, ...]) -> RankEnd:
        """How a rank ended, with what is known of its last moments."""
        beat = self._judge.watchdog.last(rank.rank) if self._judge else None
        failure = self._judge.watchdog.failure(rank.rank) if self._judge else None
        if failure is None and status > 0:  # it ended before it could report, or no watchdog runs
            failure = failure_in(last)
        phase, step = (beat.phase, beat.step) if beat else (None, None)
        if failure and failure.phase:  # the beat says `end` by now
            phase, step = failure.phase, failure.step
        hung = self._judge.hung_of(rank.rank) if self._judge else None
        is_killed = status == -signal.SIGKILL and not rank.is_abandoned
        return RankEnd(
            rank=rank.rank,
            status=-signal.SIGKILL if hung else status,
            after_s=time.monotonic() - self._started,
            was_stopped=rank.was_stopped,
            is_lost=rank.is_abandoned,
            is_oom=is_killed and oom.kills() > self._oom_kills,
            last=last,
            log=self._logs.path(log_name(rank.rank)),
            phase=phase,
            step=step,
            hung=str(hung) if hung else None,
            silent_s=hung.silent_s if hung else 0.0,
            stack=hung.stack if hung else (),
            only_waits=hung is not None and hung.only_waits,
            error=asdict(failure) if failure else None,
        )


def described(pid: int) -> str:
    """The kernel's description of a process: its state, and the function it waits in."""
    found = [f"state {state}"] if (state := state_of(pid)) else []
    with contextlib.suppress(OSError):
        found.append(f"in {Path(f'/proc/{pid}/wchan').read_text()}")
    return ", ".join(found) or "state unknown"
