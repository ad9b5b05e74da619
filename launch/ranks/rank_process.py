"""One rank of this host as a process: its variables, its output, the signals it gets.

Rule: a rank dies with the process that started it, and what it started dies with it. torchrun is
not used for this: it hides exit statuses (93 becomes 1), waits 30 s for a stopped process, prints
tracebacks of its own and imports torch first. The variables are torchrun's, so pretrain.py runs
under either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from base.parent_death import signal_at_parent_death
from base.redaction import redact

KEPT_LINES = 200
LONGEST_LINE = 65_536
LAST_OUTPUT_S = 2.0  # for the rest of the output; a grandchild may hold the pipe open


def rank_variables(
    node: int, nodes: int, per_node: int, local: int, address: str, port: int
) -> dict[str, str]:
    """The variables that torchrun sets for a rank, with ranks in the order of the hosts."""
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


class RankProcess:
    """A rank that was started. `last` is the end of its error output.

    `was_stopped` = a signal of the launcher ended it; `is_abandoned` = SIGKILL did not end it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        has_terminal: bool,
    ):
        self.rank = int(environment["RANK"])
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.was_stopped = self.is_abandoned = False
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if has_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  one system call
        )

    @property
    def pid(self) -> int:
        """Its process number."""
        return self.process.pid

    @property
    def is_living(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal to its whole session: a rank may have started compilers or loaders."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            self.process.send_signal(number)

    def follow(self, show: Callable[[str, bytes], None], secrets: Sequence[str]) -> int:
        """Pass its output on, without `secrets`, until it ends; returns its status as Popen has it.

        `show(kind, line)` gets "out" or "err" and a line with its end, from two threads.
        """

        def read(stream, kind: str) -> None:
            while line := stream.readline(LONGEST_LINE):
                line = redact(line.decode(errors="replace"), secrets).encode()
                if kind == "err":
                    self.last.append(line.decode(errors="replace").rstrip("\r\n"))
                show(kind, line)

        streams = [(self.process.stdout, "out"), (self.process.stderr, "err")]
        readers = [
            threading.Thread(target=read, args=pair, daemon=True) for pair in streams if pair[0]
        ]
        for reader in readers:
            reader.start()
        status = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what the rank started and left behind
        for reader in readers:
            reader.join(timeout=LAST_OUTPUT_S)
        return status


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies. Between fork and exec."""
    signal_at_parent_death(signal.SIGKILL)
