"""Starts the ranks of a run and stays until none lives: on this host, or on a cluster.

    live_here(arguments, ...)         ranks of this machine: one attempt
    live_across(cluster, ...)     ranks on many hosts, through their agents: one attempt
    here(...), across(...)        the same, told to a person, for an exit status

The one rule: the exit status is that of `launch.ranks.outcome`, a signal to this process is one to
all
ranks, and asking twice kills them. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.hosts import agent, network
from launch.hosts.cluster import Cluster
from launch.hosts.preflight import Plan
from launch.ranks.inquiry import Inquiry
from launch.ranks.outcome import End, first_failure
from launch.ranks.ranks import AGAIN_S, Ranks, RunLogs, patience_s
from launch.ranks.screen import Screen
from recipes.schema import Watch

# SIGUSR1 is SLURM's warning before its time limit: ranks save and ask to be put back in the queue.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LOST_S = 60.0  # a host that is silent for so long is lost


def here(
    arguments: Sequence[str],
    ranks: int,
    root: Path,
    run_folder: Path | None,
    port: int | None,
    limits: Watch | None = None,
) -> int:
    """Run `python WORDS` on `ranks` ranks of this machine, once; returns the exit status."""
    screen = Screen(ranks)
    with signals() as asked:
        lived = live_here(arguments, ranks, root, run_folder, port, screen, asked, limits=limits)
    return screen.finish(lived.ends, asked.first)


def live_here(
    arguments: Sequence[str],
    ranks: int,
    root: Path,
    run_folder: Path | None,
    port: int | None,
    screen: Screen,
    asked: Asked,
    variables: Mapping[str, str] = {},
    limits: Watch | None = None,
) -> Lived:
    """One attempt of `ranks` ranks of this machine, which also get `variables`."""
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
    group = Ranks(command, environments, root, show, logs=logs, keeps_terminal=True, limits=limits)
    asked.then(group.stop, group.kill, group.suspend)
    try:
        ends = group.wait()
    finally:
        asked.then_nothing()
    return Lived.of(ends, began, began_unix_s)


def across(
    cluster: Cluster,
    plan: Plan,
    arguments: Sequence[str],
    per_host: int,
    environment: Mapping[str, str],
    run_folder: str | None,
    screen: Screen | None = None,
    limits: Watch | None = None,
) -> int:
    """Run `python WORDS` on `per_host` ranks of every host, once; returns the exit status."""
    screen = screen or Screen(per_host * len(plan.hosts))
    order = order_of(plan, arguments, per_host, environment, run_folder, limits=limits)
    with signals() as asked:
        lived = live_across(cluster, order, screen, asked)
    return screen.finish(lived.ends, asked.first)


def order_of(
    plan: Plan,
    arguments: Sequence[str],
    per_host: int,
    environment: Mapping[str, str],
    run_folder: str | None,
    lost_s: float = LOST_S,
    limits: Watch | None = None,
) -> dict[str, Any]:
    """What the agents of all hosts are told."""
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
    }


def live_across(cluster: Cluster, order: Mapping[str, Any], screen: Screen, asked: Asked) -> Lived:
    """One attempt of the ranks of all hosts of `order`."""
    hosts, per_host = order["hosts"], order["per_node"]
    ends: list[End] = []
    began, began_unix_s = time.monotonic(), time.time()
    kill_at: float | None = None
    work = cluster.give(order)
    asked.then(work.stop, work.kill)
    for message in Inquiry(work).during(work.messages(order["lost_s"])):
        if kill_at is not None and time.monotonic() > kill_at:
            work.kill()
            kill_at = float("inf")
        if message is None:
            continue
        host = hosts[message["node"]]["name"]
        if message["say"] == "line":
            screen.line(message["rank"], message["stream"], message["text"])
        elif message["say"] == "text":
            print(f"{host}: {message['text']}", file=sys.stderr, flush=True)
        elif message["say"] in ("end", "lost", "problem"):
            end = end_of(message, host, per_host, time.monotonic() - began)
            # What ends after we asked is a consequence, on whichever host.
            was_stopped = end.was_stopped or kill_at == float("inf")
            ends.append(replace(end, was_stopped=was_stopped))
            if end.status != 0 and kill_at is None:
                kill_at = time.monotonic() + patience_s(end)
    asked.then_nothing()
    return Lived.of(ends, began, began_unix_s)


@dataclass(frozen=True)
class Lived:
    """One attempt of all ranks. `detect_s` = from the first failure, or from the last sign of life
    of
    a rank that hung, to the end of all."""

    ends: list[End]
    began_unix_s: float
    ended_unix_s: float
    detect_s: float

    @classmethod
    def of(cls, ends: list[End], began: float, began_unix_s: float) -> Lived:
        """An attempt that has just ended; `began` on the monotonic clock."""
        lasted_s = time.monotonic() - began
        first = first_failure(ends)
        detect_s = max(0.0, lasted_s - first.after_s) + first.silent_s if first else 0.0
        return cls(ends, began_unix_s, began_unix_s + lasted_s, detect_s)


def end_of(message: dict, host: str, per_host: int, after_s: float) -> End:
    """The end of a rank; a host that was lost, or could not start, ends as its first rank."""
    if message["say"] == "end":
        fields = message["end"]
        fields |= {name: tuple(fields[name]) for name in ("last", "stack")}
        return replace(End(**fields), host=host, after_s=after_s)
    why = message.get("problems") or [message["why"]]
    return End(
        rank=message["node"] * per_host,
        status=1,
        after_s=after_s,
        host=host,
        is_lost=True,
        last=tuple(f"failed: {host}: {line}" for line in why),
    )


class Asked:
    """Signals that came. `first` is the one that asked for the end.

    One that no person repeats may come twice for one request: to the whole process group, and
    passed on by make. Only Ctrl-C asks again at once.
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
        """What to do; also now, where a signal came before there was anything to stop."""
        self._stop, self._again, self._suspend = stop, again, suspend
        if self.first is not None:
            stop(self.first)

    def then_nothing(self) -> None:
        """Between two attempts there is nothing to stop."""
        self.then(lambda number: None)

    def then_interrupt(self) -> None:
        """What this process does by itself is broken off with KeyboardInterrupt."""

        def interrupt(number: int) -> None:
            raise KeyboardInterrupt

        self.then(interrupt)

    def suspended(self, number: int, frame) -> None:
        """Ctrl-Z stands still with the ranks of this machine. Those of others would be taken for
        lost, so there it is no use."""
        if self._suspend is None:
            print("Ctrl-Z is ignored: ranks elsewhere need this process", file=sys.stderr)
            return
        self._suspend(True)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._suspend(False)  # somebody said fg or bg

    def __call__(self, number: int, frame) -> None:
        if self.first is None:
            self.first, self._first_at = number, time.monotonic()
            self._stop(number)
            if number == signal.SIGINT and sys.stderr.isatty():
                os.write(2, b"\nending after this step, with a save; Ctrl-C again: at once\n")
        elif number != signal.SIGINT and time.monotonic() - self._first_at < AGAIN_S:
            return
        elif self._again:
            self._again()
        else:
            self._stop(number)


@contextlib.contextmanager
def signals() -> Iterator[Asked]:
    """Catch what asks for the end, for as long as ranks live."""
    asked = Asked()
    # What is ignored on purpose, as nohup does with SIGHUP, stays ignored.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, asked) for number in heeded}
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, asked.suspended)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
