"""The ranks of one host: started, watched, stopped, their output kept. What a node agent drives.

    start -> output lines, beats ... end of each rank
             one failed: the others get a moment, then stop      one hangs: all are killed at once

The one rule: when `wait` returns none of them attempts, however it went, but one that the kernel
itself cannot end, which is named; and if this process is killed the kernel kills them. torchrun is
not used for this: it hides exit statuses (93 becomes 1), waits 30 s for a stopped process, prints
tracebacks of its own and imports torch first. The variables are torchrun's, so the entry runs under
either. What ranks print goes on without secrets. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from base.parent_death import signal_at_parent_death
from base.redaction import redact, secret_values
from launch.ranks import oom
from launch.ranks.outcome import End
from launch.ranks.watchdog import LOOK_S, Hung, Watchdog, state_of
from recipes.schema import Watch

# After the first failure the others lose their connections and say so; this long they may.
OTHERS_S = 5.0
KNOWN_S = 0.5  # where the first failure leaves no question
GRACE_S = 30.0  # from a request to stop to SIGKILL, where the recipe does not say
# Before the first step there is nothing to save, and a rank may wait for others in C.
START_GRACE_S, BEFORE = 10.0, ("start", "load")
# One request may come twice: to this process by a signal of its own and through its launcher.
AGAIN_S = 3.0
# From the first SIGKILL on: after that a rank sits in the kernel, as in a driver or a file system
# that does not answer. Freeing the memory of a large host takes a minute.
UNENDING_S = 120.0
FLUSH_S = 2.0  # a silent rank's log appears so soon after the run folder
KEPT_LINES = 200
LONGEST_LINE = 65_536
# Where nobody can say which host has the rank that hangs, one whose ranks only wait lets the
# others speak first; else the launcher says it, and soon (launch.ranks.inquiry).
WAITING_S, VERDICT_S = 3.0, 20.0

# (local rank, "out" or "err", line with its end)
Show = Callable[[int, str, bytes], None]


def rank_variables(
    node: int, nodes: int, per_node: int, local: int, address: str, port: int
) -> dict[str, str]:
    """What torchrun would tell a rank, with ranks in the order of the hosts."""
    values = {
        "RANK": node * per_node + local,
        "WORLD_SIZE": nodes * per_node,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


class RunLogs:
    """Log files in a run's folder, opened when the run has made it: a refused run leaves none.

    The folder is this run's own as soon as its `mark` has been written anew.
    """

    def __init__(self, folder: Path | None, mark: str = "recipe.yaml"):
        self._folder, self._mark = folder, mark
        self._before = self._stamp()
        self._files: dict[str, object] = {}
        self._waiting: dict[str, deque[bytes]] = {}
        self._health_monitor = threading.Lock()

    def path(self, name: str) -> str | None:
        """Where the log is, if there is one."""
        return str(self._folder / "logs" / name) if name in self._files else None

    def write(self, name: str, line: bytes) -> None:
        """Add a line to the log `name`; a full disk costs the log, not the run."""
        with self._health_monitor:
            self._waiting.setdefault(name, deque(maxlen=10_000)).append(line)
        self.flush(name)

    def flush(self, *names: str) -> None:
        """Write what waits, of all logs or of some, if the folder has come."""
        with self._health_monitor:
            for name in names or tuple(self._waiting):
                waiting = self._waiting.get(name)
                with contextlib.suppress(OSError):
                    if waiting and (file := self._files.get(name) or self._open(name)):
                        file.write(b"".join(waiting))
                        waiting.clear()

    def close(self) -> None:
        """End all files."""
        self.flush()
        for file in self._files.values():
            file.close()

    def _open(self, name: str):
        if self._folder is None or self._stamp() in (None, self._before):
            return None
        (self._folder / "logs").mkdir(exist_ok=True)
        self._files[name] = open(self._folder / "logs" / name, "ab", buffering=0)  # noqa: SIM115
        return self._files[name]

    def _stamp(self) -> tuple[int, int] | None:
        if self._folder is None:
            return None
        try:
            found = os.stat(self._folder / self._mark)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def patience_s(first: End) -> float:
    """How long the other ranks may go on after the first that failed."""
    is_clear = first.is_lost or first.hung or first.status == -signal.SIGKILL
    return KNOWN_S if is_clear else OTHERS_S


class Ranks:
    """The ranks of this host. `show` gets their output, `ended` each end, both from threads.

    `limits` has them watched (`launch.ranks.watchdog`) and says how long they get when asked to
    end.
    `suspect` tells the launcher of a run on several hosts that silence is heard here (None), and
    then which rank of this host is the likeliest to hang; its answers are `look` and `condemn`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        folder: Path,
        show: Show,
        ended: Callable[[End], None] = lambda end: None,
        logs: RunLogs | None = None,
        keeps_terminal: bool = False,
        limits: Watch | None = None,
        suspect: Callable[[Hung | None], None] | None = None,
    ):
        self._suspect = suspect
        self._show, self._ended, self._logs = show, ended, logs or RunLogs(None)
        self._started = time.monotonic()
        self._events = threading.Condition()
        self._asked: int | None = None  # the signal that everything must end by
        self._asked_at = 0.0
        self._grace_s = limits.grace_s if limits else GRACE_S
        self._hurry = False  # to signal now
        self._is_killed = False  # whatever hangs, all end
        self._is_still = False
        self._hung: Hung | None = None  # on any host
        self._is_asked = False  # silence is heard on another host
        self._verdict: Hung | None = None
        # The signal for the stacks may wake a rank that then ends well: it hung all the same.
        self._blaming = threading.Lock()
        self._ends: list[End] = []
        self._stopping: set[int] = set()
        self._abandoned: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen] = []
        self._secrets = secret_values(environments[0])
        self._oom_kills = oom.kills()
        self._numbers = [int(environment["RANK"]) for environment in environments]
        self._is_all = len(environments) == int(environments[0].get("WORLD_SIZE", 1))
        self._watch = Watchdog(self._numbers, limits) if limits else None
        told = self._watch.environment() if self._watch else {}
        try:
            for local, environment in enumerate(environments):
                # A live line that is drawn over and over needs the terminal itself.
                is_live = keeps_terminal and local == 0 and sys.stdout.isatty()
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=dict(environment) | told,
                    stdin=subprocess.DEVNULL,
                    stdout=None if is_live else subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=die_with_parent,  # noqa: PLW1509  one system call
                )
                self._processes.append(process)
        except OSError:
            for process in self._processes:
                process.kill()
            if self._watch:
                self._watch.close()
            raise
        for local, process in enumerate(self._processes):
            began = f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}"
            line = f"== rank {self._numbers[local]}, process {process.pid}, {began}\n"
            self._logs.write(log_name(self._numbers[local]), line.encode())
            thread = threading.Thread(target=self._follow, args=(local, process), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, by: int = signal.SIGTERM) -> None:
        """Ask every rank to end by a signal, with time to save; asked again later, they are killed
        at once. From anywhere, also from a signal handler."""
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._asked_at = by, now
        elif now - self._asked_at > AGAIN_S:
            self._hurry = self._is_killed = True

    def suspend(self, is_still: bool) -> None:
        """Let all ranks stand still, or go on. From a signal handler."""
        self._is_still = is_still  # then silence says nothing
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGSTOP if is_still else signal.SIGCONT)

    def kill(self) -> None:
        """End every rank at once."""
        self._asked = self._asked or signal.SIGTERM
        self._hurry = self._is_killed = True

    def look(self) -> None:
        """Another host hears silence: say who of this one is the likeliest to hang."""
        self._is_asked = True

    def condemn(self, hung: Hung) -> None:
        """This is the rank that hangs, on whichever host."""
        self._verdict = hung

    def wait(self) -> list[End]:
        """Until no rank lives: the ends of all, in the order in which they came."""
        kill_at, signalled, flush_at, look_at, killed_at = None, None, 0.0, 0.0, None
        try:
            while len(self._ends) < len(self._processes):
                with self._events:
                    self._events.wait(0.1)
                now = time.monotonic()
                if now >= flush_at:
                    self._logs.flush()
                    flush_at = now + FLUSH_S
                if self._asked is not None and signalled is None:
                    signalled = self._asked
                    self._signal(signalled)
                    kill_at = now + self._patience_s()
                if self._watch and now >= look_at and not self._is_resolved():
                    look_at = now + LOOK_S
                    self._look()
                failed = [end for end in self._ends if end.status != 0]
                if failed and kill_at is None:
                    kill_at = now + patience_s(failed[0])
                if self._hurry or (kill_at is not None and now >= kill_at):
                    self._signal(signal.SIGKILL)
                    kill_at, self._hurry = now + 1, False
                    killed_at = killed_at or now
                if killed_at is not None and now - killed_at > UNENDING_S:
                    self._abandon()
        finally:
            self._signal(signal.SIGKILL)
            for thread in self._threads:
                thread.join(timeout=0 if self._abandoned else 5)
            self._logs.close()
            if self._watch:
                self._watch.close()
        return self._ends

    def _abandon(self) -> None:
        """Count ranks that SIGKILL does not end as lost with their host."""
        left = [n for n, process in enumerate(self._processes) if process.poll() is None]
        with self._events:
            known = {end.rank for end in self._ends}
            for local in (n for n in left if self._numbers[n] not in known):
                pid, host = self._processes[local].pid, socket.gethostname()
                text = (
                    f"failed: process {pid} on {host} does not end after SIGKILL"
                    f" ({described(pid)}): a driver or a file system of this host does not answer;"
                    " restart the host"
                )
                self._abandoned.add(local)
                end = self._end_of(local, -signal.SIGKILL, (text,), is_lost=True)
                self._ends.append(end)
                print(f"warning: {text.removeprefix('failed: ')}", file=sys.stderr, flush=True)
                self._ended(end)

    def _is_resolved(self) -> bool:
        """Whether silence says nothing new."""
        return self._hung is not None or self._is_still or self._is_killed

    def _patience_s(self) -> float:
        """How long ranks may take to end when they are asked to."""
        if self._watch and all(self._watch.last(n).phase in BEFORE for n in self._numbers):
            return min(self._grace_s, START_GRACE_S)
        return self._grace_s

    def _look(self) -> None:
        """Kill all where one hangs, after their stacks are in their logs."""
        living = {
            self._numbers[local]: process.pid
            for local, process in enumerate(self._processes)
            if process.poll() is None
        }
        is_silent = self._watch.look(list(living)) is not None
        if not living or not (is_silent or self._is_asked):
            return
        with self._blaming:
            if self._suspect and not self._is_asked:
                self._suspect(None)
            own, stacks = self._watch.blame(living)
            self._hung = self._judged(own)
            for rank, text in stacks.items():
                who = f"rank {self._hung.rank} {self._hung}" if self._hung else "asked to end"
                said = f"== {who}; the stacks of this rank:\n{text.rstrip()}\n"
                self._logs.write(log_name(rank), said.encode())
        self._signal(signal.SIGKILL)

    def _judged(self, own: Hung) -> Hung | None:
        """The rank that hangs, of all hosts; None where another reason came to end all at once."""
        if self._is_all:
            return own
        if self._suspect is None:
            time.sleep(WAITING_S if own.only_waits else 0)
            return own
        self._suspect(own)
        deadline = time.monotonic() + VERDICT_S
        while self._verdict is None and time.monotonic() < deadline:
            if self._is_killed:
                return None
            time.sleep(0.05)
        return self._verdict or own

    def _signal(self, number: int) -> None:
        for local, process in enumerate(self._processes):
            if process.poll() is None:
                if self._hung is None or self._hung.rank != self._numbers[local]:
                    self._stopping.add(local)
                try:
                    # The whole session: a rank may have started compilers or loaders.
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    process.send_signal(number)

    def _follow(self, local: int, process: subprocess.Popen) -> None:
        """Pass the output of one rank on, then report its end."""
        rank = self._numbers[local]
        name = log_name(rank)
        last: deque[str] = deque(maxlen=KEPT_LINES)

        def read(stream, kind: str) -> None:
            while line := stream.readline(LONGEST_LINE):
                line = redact(line.decode(errors="replace"), self._secrets).encode()
                if kind == "err":
                    last.append(line.decode(errors="replace").rstrip("\r\n"))
                self._logs.write(name, line)
                self._show(local, kind, line)

        streams = [(process.stdout, "out"), (process.stderr, "err")]
        readers = [
            threading.Thread(target=read, args=pair, daemon=True) for pair in streams if pair[0]
        ]
        for reader in readers:
            reader.start()
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the rank started and left behind
        for reader in readers:
            # A grandchild may hold the pipe open; what the rank itself said is there by now.
            reader.join(timeout=2)
        self._logs.flush(name)  # the run's folder may have come since the last line
        if local in self._abandoned:
            return
        end = self._end_of(local, status, tuple(last))
        self._ended(end)
        with self._events:
            self._ends.append(end)
            self._events.notify()

    def _end_of(self, local: int, status: int, last: tuple[str, ...], is_lost: bool = False) -> End:
        """How a rank ended, with what is known of its last moments."""
        rank = self._numbers[local]
        beat = self._watch.last(rank) if self._watch else None
        with self._blaming:
            is_hung = self._hung is not None and self._hung.rank == rank
        return End(
            rank=rank,
            status=-signal.SIGKILL if is_hung else status,
            after_s=time.monotonic() - self._started,
            was_stopped=local in self._stopping,
            is_lost=is_lost,
            is_oom=not is_lost and status == -signal.SIGKILL and oom.kills() > self._oom_kills,
            last=last,
            log=self._logs.path(log_name(rank)),
            phase=beat.phase if beat else None,
            step=beat.step if beat else None,
            hung=str(self._hung) if is_hung else None,
            silent_s=self._hung.silent_s if is_hung else 0.0,
            stack=self._hung.stack if is_hung else (),
            only_waits=is_hung and self._hung.only_waits,
        )


def log_name(rank: int) -> str:
    """File name of a rank's log; attempts of a run follow each other in it."""
    return f"rank-{rank:05d}.log"


def described(pid: int) -> str:
    """What the kernel says of a process: its state, and what it waits in."""
    found = [f"state {state}"] if (state := state_of(pid)) else []
    with contextlib.suppress(OSError):
        found.append(f"in {Path(f'/proc/{pid}/wchan').read_text()}")
    return ", ".join(found) or "state unknown"


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies. Between fork and exec."""
    signal_at_parent_death(signal.SIGKILL)
