"""Starts the ranks of a run and stays until none lives: on this host, or on a cluster.

    here(words, ...)            several ranks of this machine
    across(cluster, plan, ...)  ranks on many hosts, through their agents

The one rule: the exit status is that of `launch.outcome`, a signal to this process is one to all
ranks, and asking twice kills them. Units: seconds.
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

from launch import agent, network
from launch.cluster import Cluster
from launch.outcome import End
from launch.preflight import Plan
from launch.ranks import AGAIN_S, OTHERS_S, Ranks, RunLogs
from launch.screen import Screen
from recipes.schema import Watch

# All ask the ranks to save and end; SIGUSR1 is what batch systems announce the end of a job with.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def here(
    words: Sequence[str],
    ranks: int,
    root: Path,
    run_folder: Path | None,
    port: int | None,
    limits: Watch | None = None,
) -> int:
    """Run `python WORDS` on `ranks` ranks of this machine; returns the exit status."""
    screen = Screen(ranks)
    environments = agent.environments(
        dict(os.environ),
        node=0,
        nodes=1,
        per_node=ranks,
        address="127.0.0.1",
        port=port or network.free_port(),
    )

    def show(local: int, kind: str, line: bytes) -> None:
        screen.line(local, kind, line.decode(errors="replace"))

    command = [sys.executable, *words]
    logs = RunLogs(run_folder)
    with signals() as asked:
        group = Ranks(
            command, environments, root, show, logs=logs, keeps_terminal=True, limits=limits
        )
        asked.then(group.stop, group.kill)
        ends = group.wait()
    return screen.finish(ends, asked.first)


def across(
    cluster: Cluster,
    plan: Plan,
    words: Sequence[str],
    per_host: int,
    environment: Mapping[str, str],
    run_folder: str | None,
    screen: Screen | None = None,
    limits: Watch | None = None,
) -> int:
    """Run `python WORDS` on `per_host` ranks of every host; returns the exit status."""
    num_ranks = per_host * len(plan.hosts)
    screen = screen or Screen(num_ranks)
    order = {
        "do": "ranks",
        "hosts": plan.hosts,
        "words": list(words),
        "per_node": per_host,
        "port": plan.port,
        "environment": dict(environment),
        "run_folder": run_folder,
        "shown": [0],
        "limits": limits and asdict(limits),
    }
    ends: list[End] = []
    began = time.monotonic()
    kill_at: float | None = None
    with signals() as asked:
        work = cluster.give(order)
        asked.then(work.stop, work.kill)
        for message in work.messages():
            if kill_at is not None and time.monotonic() > kill_at:
                work.kill()
                kill_at = float("inf")
            if message is None:
                continue
            host = plan.hosts[message["node"]]["name"]
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
                    kill_at = time.monotonic() + OTHERS_S
    return screen.finish(ends, asked.first)


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

    def then(self, stop: Callable[[int], None], again: Callable[[], None] | None = None) -> None:
        """What to do; also now, where a signal came before there was anything to stop."""
        self._stop, self._again = stop, again
        if self.first is not None:
            stop(self.first)

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
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
