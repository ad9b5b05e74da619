"""Starts the ranks of a run and waits until all have ended: on this host, or on many.

    live_here(arguments, ...)     ranks of this machine: one attempt
    live_across(cluster, ...)     ranks on many hosts, through their agents: one attempt
    across(...)                   one attempt on many hosts, shown to a person, for an exit status

Rule: the exit status is that of `launch.ranks.outcome`. A signal to this process goes to all ranks,
and asking twice kills them. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch.hosts import agent, network
from launch.hosts.cluster import AgentCluster
from launch.hosts.preflight import StartPlan
from launch.ranks.inquiry import Inquiry
from launch.ranks.outcome import first_failure
from launch.ranks.ranks import RankListener, start_ranks
from launch.ranks.run_logs import RunLogs
from launch.ranks.screen import Screen
from launch.ranks.shutdown import AGAIN_S, patience_s
from recipes.schema import Watch
from record.attempts import Attempt, RankEnd
from record.requests import heard_text

# SIGUSR1 is SLURM's warning before its time limit: ranks save and ask to be put back in the queue.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LOST_S = 60.0  # a host that is silent for so long is lost


def live_here(
    arguments: Sequence[str],
    ranks: int,
    root: Path,
    run_folder: Path | None,
    port: int | None,
    screen: Screen,
    stop_signals: StopSignals,
    variables: Mapping[str, str] = {},
    limits: Watch | None = None,
) -> Attempt:
    """One attempt of `ranks` ranks of this machine, with `variables` in their environment."""
    environments = agent.environments(
        os.environ | variables,
        node=0,
        nodes=1,
        per_node=ranks,
        address="127.0.0.1",
        port=port or network.free_port(),
    )

    def show(local: int, kind: str, line: bytes) -> None:
        screen.line(local, kind, line.decode(errors="replace"))

    began, began_unix_s = time.monotonic(), time.time()
    command = [sys.executable, *arguments]
    logs = RunLogs(run_folder)
    group = start_ranks(
        command, environments, root, RankListener(show), logs, limits, keeps_terminal=True
    )
    stop_signals.then(group.stop, group.kill, group.suspend)
    try:
        ends = group.wait()
    finally:
        stop_signals.then_nothing()
    return attempt_of(ends, began, began_unix_s)


def across(
    cluster: AgentCluster,
    plan: StartPlan,
    arguments: Sequence[str],
    per_host: int,
    environment: Mapping[str, str],
    run_folder: str | None,
    screen: Screen | None = None,
    limits: Watch | None = None,
) -> int:
    """Run `python ARGUMENTS` on `per_host` ranks of every host, once; returns the exit status."""
    screen = screen or Screen(per_host * len(plan.hosts))
    order = order_of(plan, arguments, per_host, environment, run_folder, limits=limits)
    with catch_signals() as stop_signals:
        attempt = live_across(cluster, order, screen, stop_signals)
    return screen.finish(attempt.ends, stop_signals.first)


def order_of(
    plan: StartPlan,
    arguments: Sequence[str],
    per_host: int,
    environment: Mapping[str, str],
    run_folder: str | None,
    lost_s: float = LOST_S,
    limits: Watch | None = None,
    composed: str | None = None,
) -> dict[str, Any]:
    """The order that the agents of all hosts get; `composed` is the text of a composed recipe."""
    return {
        "do": "ranks",
        "hosts": plan.hosts,
        "arguments": list(arguments),
        "per_node": per_host,
        "port": plan.port,
        "environment": dict(environment),
        "run_folder": run_folder,
        "shown": [0],
        "lost_s": lost_s,
        "limits": limits and asdict(limits),
        "composed": composed,
    }


def live_across(
    cluster: AgentCluster, order: Mapping[str, Any], screen: Screen, stop_signals: StopSignals
) -> Attempt:
    """One attempt of the ranks of all hosts of `order`."""
    hosts, per_host = order["hosts"], order["per_node"]
    ends: list[RankEnd] = []
    began, began_unix_s = time.monotonic(), time.time()
    kill_at: float | None = None
    task = cluster.give(order)
    stop_signals.then(task.stop, task.kill)
    for message in Inquiry(task).during(task.messages(order["lost_s"])):
        if kill_at is not None and time.monotonic() > kill_at:
            task.kill()
            kill_at = float("inf")
        if message is None:
            continue
        host = hosts[message["node"]]["name"]
        if message["kind"] == "line":
            screen.line(message["rank"], message["stream"], message["text"])
        elif message["kind"] == "text":
            print(f"{host}: {message['text']}", file=sys.stderr, flush=True)
        elif message["kind"] in ("end", "lost", "problem"):
            end = end_of(message, host, per_host, time.monotonic() - began)
            # What ends after we asked is a consequence, on whichever host.
            was_stopped = end.was_stopped or kill_at == float("inf")
            ends.append(replace(end, was_stopped=was_stopped))
            if end.status != 0 and kill_at is None:
                kill_at = time.monotonic() + patience_s(end)
    stop_signals.then_nothing()
    return attempt_of(ends, began, began_unix_s)


def attempt_of(ends: Sequence[RankEnd], began: float, began_unix_s: float) -> Attempt:
    """An attempt that has just ended. `began` is on the monotonic clock, `began_unix_s` the date.

    Its detect_s counts from the first failure, or from the last sign of life of a rank that hung,
    to the end of all ranks.
    """
    lasted_s = time.monotonic() - began
    first = first_failure(ends)
    detect_s = max(0.0, lasted_s - first.after_s) + first.silent_s if first else 0.0
    return Attempt(began_unix_s, began_unix_s + lasted_s, ends=tuple(ends), detect_s=detect_s)


def end_of(message: dict, host: str, per_host: int, after_s: float) -> RankEnd:
    """The end of a rank; a host that was lost, or could not start, ends as its first rank."""
    if message["kind"] == "end":
        fields = message["end"]
        fields |= {name: tuple(fields[name]) for name in ("last", "stack")}
        return replace(RankEnd(**fields), host=host, after_s=after_s)
    why = message.get("problems") or [message["why"]]
    return RankEnd(
        rank=message["node"] * per_host,
        status=1,
        after_s=after_s,
        host=host,
        is_lost=True,
        last=tuple(f"failed: {host}: {line}" for line in why),
    )


class StopSignals:
    """Signals that ask for the end, and what is done then. `first` is the one that came first.

    A signal that no person repeats may come twice for one request: to the whole process group, and
    passed on by make. So only Ctrl-C counts as asking again at once.
    """

    def __init__(self):
        self.first: int | None = None
        self._first_at = 0.0
        self._stop: Callable[[int], None] = lambda number: None
        self._again: Callable[[], None] | None = None
        self._suspend: Callable[[bool], None] | None = None

    def then(
        self,
        stop: Callable[[int], None],
        again: Callable[[], None] | None = None,
        suspend: Callable[[bool], None] | None = None,
    ) -> None:
        """Set what is done; does it now where a signal came before there was anything to stop."""
        self._stop, self._again, self._suspend = stop, again, suspend
        if self.first is not None:
            stop(self.first)

    def then_nothing(self) -> None:
        """Only remember signals: between two attempts there is nothing to stop."""
        self.then(lambda number: None)

    def then_interrupt(self) -> None:
        """Interrupt what this process does by itself with KeyboardInterrupt."""

        def interrupt(number: int) -> None:
            raise KeyboardInterrupt

        self.then(interrupt)

    def suspended(self, number: int, frame) -> None:
        """Suspend this process and its ranks on Ctrl-Z.

        Ranks on other hosts would be taken for lost meanwhile, so there Ctrl-Z is ignored.
        """
        if self._suspend is None:
            print("Ctrl-Z is ignored: ranks elsewhere need this process", file=sys.stderr)
            return
        self._suspend(True)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._suspend(False)  # somebody typed fg or bg

    def __call__(self, number: int, frame) -> None:
        if self.first is None:
            self.first, self._first_at = number, time.monotonic()
            self._stop(number)
            if self._again is not None:  # ranks are alive
                with contextlib.suppress(OSError):
                    os.write(2, heard_text(number).encode())
        elif number != signal.SIGINT and time.monotonic() - self._first_at < AGAIN_S:
            return
        elif self._again:
            self._again()
        else:
            self._stop(number)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopSignals]:
    """Catch the signals that ask for the end, for as long as ranks live."""
    stop_signals = StopSignals()
    # What is ignored on purpose, as nohup does with SIGHUP, stays ignored.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop_signals) for number in heeded}
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, stop_signals.suspended)
    try:
        yield stop_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
