"""What asks a run to end early, and how all ranks come to do so after the same step.

    SIGTERM, SIGUSR1, SIGHUP   preempted    save, exit 75: start again when there is room
    SIGINT (Ctrl-C)            interrupted  save, exit 130
    runs/<run>/stop.request    stopped      save, exit 0                     (`make stop`)

The one rule: a signal only raises a flag, and the largest flag of all ranks counts. It travels with
the step, in a message of four bytes beside training's own, sent before the step and read after it:
nobody waits for it, and a request to any rank ends all of them after the next step, or the one
after that. Before training nothing is lost, so the rank ends where it is. A second signal ends it
at once (143 for SIGTERM). Imports torch only to send. Units: seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.exits import FINISHED, INTERRUPTED, REQUEUE

REQUEST = "stop.request"
BETWEEN_LIVES = "asked between two attempts"  # reason of an end that no rank took part in
EARLY = "interrupted before the start; nothing is lost\n"
LOOK_EVERY_S = 1.0  # at the request; on a network file system a look takes a message
# One request may come twice: to this process by a signal of its own and through its launcher.
AGAIN_S = 3.0


@dataclass(frozen=True)
class Ending:
    """How a run ends before its last step; `saves` = with a checkpoint of the step."""

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
    """A signal before training; `ending` says with which status to leave."""

    def __init__(self, ending: Ending):
        super().__init__("asked to end before training")
        self.ending = ending


class Requests:
    """The requests that reached this rank, and what all ranks agree on."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._code, self._heard_at = 0, 0.0
        self._is_importing = self._is_training = False
        self._request: Path | None = None  # rank 0 looks for it
        self._looked_at = float("-inf")
        self._flag: Any = None
        self._group: Any = None
        self._work: Any = None

    def listen(self, is_importing: bool = False) -> None:
        """Catch the signals; what is ignored on purpose, as by nohup, stays ignored. While modules
        are imported a signal ends the process where it is: an exception could get lost in them."""
        self._is_importing = is_importing
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def begin(self, run_folder: Path, timeout_s: float) -> None:
        """Training begins; a collective. From here on a request waits for the end of a step."""
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

    def send(self) -> None:
        """Before a step: tell the others; returns at once."""
        self._look()
        if self._group is not None:
            import torch.distributed as dist

            self._flag.fill_(self._code)
            self._work = dist.all_reduce(
                self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def answer(self, is_last: bool = False) -> Ending | None:
        """After the step: how all ranks end now, the same everywhere; None = they go on, or this
        was the last step anyway."""
        code = self._code
        if self._group is not None:
            self._work.wait()
            code = int(self._flag)
        return None if is_last else ENDINGS.get(code)

    def now(self) -> Ending | None:
        """Between two steps: how all ranks end now; a collective."""
        self.send()
        return self.answer()

    def done(self) -> None:
        """The request was carried out; the next start of the run is not to see it."""
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
            if number == signal.SIGINT and sys.stderr.isatty():
                os.write(2, b"\nending after this step, with a save; Ctrl-C again: at once\n")
        elif number == signal.SIGINT or now - self._heard_at > AGAIN_S:
            os._exit(128 + number)


def ask(run_folder: Path, *, now: bool, who: str) -> None:
    """Ask the run that owns the folder to end after its step; `now` = without a save."""
    new = run_folder / f".{REQUEST}.new"
    new.write_text(json.dumps({"now": now, "who": who, "unix_s": time.time()}) + "\n")
    os.replace(new, run_folder / REQUEST)


def read_request(run_folder: Path) -> dict[str, Any] | None:
    """The request that waits for the run, if there is one; an unreadable one asks for a save."""
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
    """Take a request away."""
    with contextlib.suppress(IsADirectoryError):  # a folder asks for nothing
        (run_folder / REQUEST).unlink(missing_ok=True)


REQUESTS = Requests()
