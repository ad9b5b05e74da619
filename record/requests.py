"""Requests to end a run early, and how all ranks come to end after the same step.

    SIGTERM, SIGUSR1, SIGHUP   preempted    save, exit 75: start again when there is room
    SIGINT (Ctrl-C)            interrupted  save, exit 130
    runs/<run>/stop.request    stopped      save, exit 0                     (`make stop`)

Rule: a signal only raises a flag, and the largest flag of all ranks counts. The flag travels with
the step, in a message of four bytes beside the messages of training: it is sent before the step and
read after it, so nobody waits for it. A request to any rank ends all ranks after the next step, or
the one after that. Before training a rank ends at once, because nothing can be lost yet. A second
signal also ends it at once (status 143 for SIGTERM). Imports torch only to send. Units: seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.exits import FINISHED, INTERRUPTED, REQUEUE
from base.run_variables import LAUNCH

REQUEST = "stop.request"
BETWEEN_ATTEMPTS = "asked between two attempts"  # reason of an end in which no rank took part
EARLY = "interrupted before the start; nothing is lost\n"
LOOK_EVERY_S = 1.0  # for the request file; on a network file system each look costs a message
# One request may arrive twice: as a signal to this process, and again through its launcher.
AGAIN_S = 3.0


@dataclass(frozen=True)
class Ending:
    """An end before the last step: its cause, its exit status, and whether it saves the step."""

    cause: str
    status: int
    saves: bool = True


# The larger number wins where ranks were asked different things.
ENDINGS = {
    1: Ending("stopped", FINISHED),
    2: Ending("stopped", FINISHED, saves=False),
    3: Ending("interrupted", INTERRUPTED),
    4: Ending("preempted", REQUEUE),
}
SIGNALS = {signal.SIGINT: 3, signal.SIGTERM: 4, signal.SIGUSR1: 4, signal.SIGHUP: 4}


class AskedEarly(KeyboardInterrupt):
    """Raised by a signal before training; `ending` has the exit status."""

    def __init__(self, ending: Ending):
        super().__init__("asked to end before training")
        self.ending = ending


class Requests:
    """The requests that reached this rank, and what all ranks agree on."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._code, self._heard_at = 0, 0.0
        self._sent = 0  # twice the code, and one more where a save is due
        self.is_save_due = False  # by rank 0's clock, the same on all ranks after `answer`
        self._is_importing = self._is_training = False
        self._request: Path | None = None  # rank 0 looks for it
        self._looked_at = float("-inf")
        self._flag: Any = None
        self._group: Any = None
        self._work: Any = None

    def listen(self, is_importing: bool = False) -> None:
        """Catch the signals; those that are ignored on purpose, as by nohup, stay ignored.

        While modules are imported (`is_importing`) a signal ends the process at once, because an
        exception could be swallowed by the module that is being imported.
        """
        self._is_importing = is_importing
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def begin(self, run_folder: Path, timeout_s: float) -> None:
        """Begin training: from here on a request waits for the end of a step. A collective."""
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            self._request = run_folder / REQUEST
        if dist.get_world_size() > 1:
            # Its own group: it runs beside saves. gloo: no device waits for the flag.
            limit = datetime.timedelta(seconds=timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=limit)
            self._flag = torch.zeros((), dtype=torch.int32)
        self._is_training = True
        if LAUNCH not in os.environ and dist.get_rank() == 0:
            acknowledge()

    def send(self, is_save_due: bool = False) -> None:
        """Send this rank's flag to the others, before a step; returns at once.

        `is_save_due`: the time of rank 0 says that the state after this step is to be saved.
        """
        self._look()
        self._sent = 2 * self._code + (is_save_due and self._request is not None)
        if self._group is not None:
            import torch.distributed as dist

            self._flag.fill_(self._sent)
            self._work = dist.all_reduce(
                self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def answer(self, is_last: bool = False) -> Ending | None:
        """The end that all ranks agree on, after the step; the same on every rank.

        None = they go on, or this was the last step anyway.
        """
        code = self._code
        self.is_save_due = bool(self._sent % 2)
        if self._group is not None:
            self._work.wait()
            code, self.is_save_due = int(self._flag) // 2, bool(int(self._flag) % 2)
        return None if is_last else ENDINGS.get(code)

    def now(self) -> Ending | None:
        """The end that all ranks agree on, between two steps. A collective."""
        self.send()
        return self.answer()

    def done(self) -> None:
        """Remove the request that was carried out, so that the next start does not see it."""
        if self._request is not None:
            forget(self._request.parent)

    def _look(self) -> None:
        if self._request is None or self._now() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._now()
        wanted = read_request(self._request.parent)
        if wanted is not None:
            self._code = max(self._code, 2 if wanted.get("now") else 1)

    def _hear(self, number: int, frame: Any) -> None:
        code, now = SIGNALS[signal.Signals(number)], self._now()
        if not self._heard_at:
            self._code, self._heard_at = max(code, self._code), now
            if self._is_importing:
                os.write(2, EARLY.encode())
                os._exit(ENDINGS[code].status)
            if not self._is_training:
                raise AskedEarly(ENDINGS[code])
        elif number == signal.SIGINT or now - self._heard_at > AGAIN_S:
            os._exit(128 + number)


def acknowledge() -> None:
    """Print a line for each first signal at once, also while the main thread is inside C code.

    Python calls a signal's handler only between two of its own instructions, which may be a whole
    step later. The bytes that the interpreter writes for each signal come at once, and a thread
    reads them. A launcher of this project prints the line itself.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read() -> None:
        seen = set()
        while number := os.read(reader, 1):
            if number[0] in SIGNALS and not seen:
                seen.add(number[0])
                with contextlib.suppress(OSError):
                    os.write(2, heard_text(number[0]).encode())

    threading.Thread(target=read, name="signals", daemon=True).start()


def heard_text(number: int) -> str:
    """The line that acknowledges a signal which asks a run to end."""
    again = "Ctrl-C again" if number == signal.SIGINT else "the same signal again"
    when = "ending after this step, with a save (before the first step: at once)"
    return f"\n{signal.Signals(number).name}: {when}; {again}: at once\n"


def ask(run_folder: Path, *, now: bool, who: str) -> None:
    """Write a request: the run that owns the folder ends after its step; `now` = without a save."""
    new = run_folder / f".{REQUEST}.new"
    new.write_text(json.dumps({"now": now, "who": who, "unix_s": time.time()}) + "\n")
    os.replace(new, run_folder / REQUEST)


def read_request(run_folder: Path) -> dict[str, Any] | None:
    """The request that waits in the folder; None = there is none, {} = it cannot be read.

    A request that cannot be read counts as one for an end with a save.
    """
    try:
        text = (run_folder / REQUEST).read_text()
    except OSError:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def forget(run_folder: Path) -> None:
    """Remove the request."""
    with contextlib.suppress(IsADirectoryError):  # a folder of this name is no request
        (run_folder / REQUEST).unlink(missing_ok=True)


REQUESTS = Requests()
