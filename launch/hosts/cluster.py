"""Agents on many hosts as one thing: give them an order, read their messages, stop them.

    AgentCluster.give(order) -> AgentTask:  messages() ... stop(signal) ... kill()

Rule: when `messages` ends, no agent is alive: a lost connection is a message too (`lost`). The
supervisor drives this; nothing is decided here. Units: seconds.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from launch.hosts.carriers import Carrier, carriers
from launch.hosts.hostfile import Host
from launch.ranks.rank_process import die_with_parent
from launch.ranks.ranks import GRACE_S

PULSE_S = 2.0
# After the last message of an agent its connection should close; else it is cut.
CLOSING_S = 10.0
SSH_FAILED = 255  # ssh's own status; others come from what it started
Message = dict[str, Any]


@dataclass(frozen=True)
class AgentCluster:
    """Hosts and the way to reach them. `ssh` is the command with the user's options."""

    hosts: Sequence[Host]
    root: Path
    via: str = "ssh"
    ssh: str = "ssh"

    def give(self, order: Message) -> AgentTask:
        """Start an agent on every host with `order`. Raises UserError where none can start."""
        order = {"hosts": [{"name": host.name} for host in self.hosts], **order}
        return AgentTask(carriers(self.via, self.hosts, self.root, order, self.ssh), order, self)

    def ask(self, order: Message, timeout_s: float) -> dict[int, list[Message]]:
        """Give an order and collect the answers of each host.

        Raises UserError that names every host that could not answer.
        """
        task = self.give(order)
        answers: dict[int, list[Message]] = {node: [] for node in range(len(self.hosts))}
        problems: dict[int, list[str]] = {}
        deadline = time.monotonic() + timeout_s
        try:
            for message in task.messages():
                if message is None:
                    if time.monotonic() > deadline:
                        break
                elif message["kind"] == "lost":
                    problems[message["node"]] = [message["why"]]
                elif message["kind"] == "problem":
                    problems[message["node"]] = message["problems"]
                elif message["kind"] != "text":
                    answers[message["node"]].append(message)
        finally:
            task.kill()
        for node, host in enumerate(self.hosts):
            if node not in problems and not any(m["kind"] == "done" for m in answers[node]):
                problems[node] = [f"no answer within {timeout_s:.0f} s"]
            problems[node] = [f"{host.name}: {line}" for line in problems.get(node, [])]
        wrong = [line for node in sorted(problems) for line in problems[node]]
        if wrong:
            raise UserError(*wrong)
        return answers


class AgentTask:
    """One order that agents carry out. Messages come as they were sent, with `at` (when) added."""

    def __init__(self, ways: Sequence[Carrier], order: Message, cluster: AgentCluster):
        self._hosts = cluster.hosts
        self._grace_s = (order.get("limits") or {}).get("grace_s", GRACE_S)
        self._queue: queue.Queue[Message] = queue.Queue()
        self._spoke: set[int] = set()  # hosts whose agent has started
        self._open = set(range(len(self._hosts)))  # hosts that have not sent their last message
        self._processes: list[tuple[Carrier, subprocess.Popen]] = []
        self._lock = threading.RLock()  # a signal handler may come in between
        self._stopped_at: float | None = None
        self._heard: dict[int, float] = {}  # host -> when, of those that have sent a pulse
        self._cut_off: set[int] = set()
        self._looked_at = time.monotonic()
        line = json.dumps(order) + "\n"
        try:
            for way in ways:
                self._processes.append((way, self._start(way, line, cluster.root)))
        except OSError as error:
            self.kill()
            raise UserError(f"{way.command[0]}: {error.strerror}") from None
        self._living = len(self._processes)
        threading.Thread(target=self._pulse, daemon=True).start()

    def messages(self, lost_s: float | None = None) -> Iterator[Message | None]:
        """Messages of the agents until none is alive; None now and then so that a caller can act.

        An agent that has sent a pulse and then is silent for `lost_s` is lost, and is cut off.
        """
        while self._living or not self._queue.empty():
            yield from self._silent(lost_s)
            try:
                message = self._queue.get(timeout=0.2)
            except queue.Empty:
                message = None
                overdue = self._stopped_at is not None and (
                    time.monotonic() - self._stopped_at > self._grace_s + CLOSING_S
                )
                if overdue:
                    self.kill()
            if message and message["kind"] not in ("closed", "text"):
                self._spoke.add(message["node"])
            if message and message["kind"] != "closed":
                node, is_pulse = message["node"], message["kind"] == "pulse"
                if is_pulse or node in self._heard:
                    self._heard[node] = time.monotonic()
                if is_pulse or node in self._cut_off:
                    message = None
            if message and message["kind"] == "closed":
                self._living -= 1
                yield from self._missing(message)
                continue
            if message and message["kind"] == "done":
                self._open.discard(message["node"])
                if not self._open:
                    self._close_inputs()
            yield message

    def stop(self, by: int = signal.SIGTERM) -> None:
        """Ask all ranks to end by a signal, with time to save."""
        self._stopped_at = self._stopped_at or time.monotonic()
        self.send({"stop": int(by)})

    def kill(self) -> None:
        """End all at once: the ranks through their agents, then the connections."""
        self.send({"kill": True})
        self._close_inputs()
        threading.Thread(target=self._cut, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a request to all agents. With pdsh, which has no input, it ends them."""
        self._write((json.dumps(message) + "\n").encode())

    def unheard_s(self) -> dict[int, float]:
        """Seconds of silence of each host that has not sent its last message; may be inf."""
        now = time.monotonic()
        return {node: now - self._heard.get(node, float("-inf")) for node in self._open}

    def give_up(self, node: int, why: str) -> Message:
        """Cut a host off and return the message `lost` for it."""
        self._heard.pop(node, None)
        self._cut_off.add(node)
        self._open.discard(node)
        for way, process in self._processes:
            if way.nodes == (node,):
                process.kill()
        return {"node": node, "kind": "lost", "why": why, "at": time.time()}

    def _start(self, way: Carrier, line: str, root: Path) -> subprocess.Popen:
        process = subprocess.Popen(
            way.command,
            cwd=root,
            stdin=subprocess.PIPE if way.takes_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the launcher, which asks the ranks to end
            preexec_fn=die_with_parent,  # noqa: PLW1509  one system call
        )
        last: deque[str] = deque(maxlen=20)
        readers = [
            threading.Thread(target=self._read, args=(way, stream, last), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        threading.Thread(
            target=self._follow, args=(way, process, readers, last), daemon=True
        ).start()
        if way.takes_input:
            with contextlib.suppress(OSError):
                _write_all(process.stdin, line.encode())
        return process

    def _read(self, way: Carrier, stream, last: deque[str]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\r\n")
            at = time.time()
            message = _message(line, way.nodes)
            if message is None:
                if line.strip():
                    last.append(line)
                    message = {"node": way.nodes[0], "kind": "text", "text": line}
                else:
                    continue
            self._queue.put({**message, "at": at})

    def _follow(self, way: Carrier, process: subprocess.Popen, readers, last) -> None:
        status = process.wait()
        for reader in readers:
            reader.join(timeout=2)
        self._queue.put(
            {"kind": "closed", "nodes": way.nodes, "status": status, "last": list(last)}
        )

    def _silent(self, lost_s: float | None) -> Iterator[Message]:
        """`lost` for every host whose pulse has stopped."""
        now = time.monotonic()
        paused_s, self._looked_at = now - self._looked_at, now
        if paused_s > PULSE_S:  # this process was stopped: it has not listened
            self._heard = dict.fromkeys(self._heard, now)
        if lost_s is None:
            return
        for node in [n for n, at in self._heard.items() if now - at > lost_s]:
            is_open = node in self._open
            why = f"nothing was heard of it for {lost_s:.0f} s (cluster.lost_s)"
            lost = self.give_up(node, why)
            if is_open:
                yield lost

    def _missing(self, closed: Message) -> Iterator[Message]:
        """`lost` for every host of a closed connection that has not sent its last message."""
        for node in closed["nodes"]:
            if node in self._open:
                self._open.discard(node)
                last = "; ".join(closed["last"][-3:])
                why = f"the connection ended with status {closed['status']}"
                why += f": {last}" if last else ""
                if node not in self._spoke and closed["status"] not in (0, SSH_FAILED):
                    why += "; every host needs the project and its interpreter under the same path"
                yield {"node": node, "kind": "lost", "why": why, "at": time.time()}

    def _write(self, data: bytes) -> None:
        with self._lock:
            for way, process in self._processes:
                if way.takes_input:
                    with contextlib.suppress(OSError, ValueError):
                        _write_all(process.stdin, data)
                elif data.strip():  # pdsh: only its end reaches the hosts
                    process.terminate()

    def _close_inputs(self) -> None:
        with self._lock:
            for way, process in self._processes:
                if way.takes_input:
                    with contextlib.suppress(OSError, ValueError):
                        process.stdin.close()

    def _cut(self) -> None:
        deadline = time.monotonic() + CLOSING_S
        for _, process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()

    def _pulse(self) -> None:
        """Send a blank line now and then: silence would mean that the network is gone."""
        while any(process.poll() is None for _, process in self._processes):
            time.sleep(PULSE_S)
            self._write(b"\n")


def _write_all(stream, data: bytes) -> None:
    """Write all data: an unbuffered pipe may take a long order in parts."""
    while data:
        data = data[stream.write(data) :]


def _message(line: str, nodes: tuple[int, ...]) -> Message | None:
    """The message of an agent in a line; None for anything else, such as a login banner."""
    if not line.startswith('{"node"'):
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if message.get("node") in nodes and "kind" in message else None
