"""The heartbeat of a rank: one small file, rewritten in place, that says what the rank is doing.

    start -> load -> step <-> evaluate, save -> end        phases
    "<rank> <phase> <step> <monotonic s> <parts> <steps> <part s>"   the line, of one length

Rule: a beat is one system call of the thread that trains, and no other thread beats for it. A rank
that hangs, also one that is stuck in C and holds the interpreter's lock, stops beating, and
launch.ranks.watchdog notices. SIGUSR2 writes the stacks of all threads into a file beside the beat;
this works without the interpreter's lock.

Imports no torch. Units: seconds. `parts` = micro-batches of the step, because its time grows with
them. `steps` = steps begun in this attempt, and `part s` = seconds per micro-batch of the last
whole step, without its evaluations and saves: a reader that looks rarely still knows how many steps
there were and how long one takes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from base.run_variables import BEATS
from record.failure import Failure, failure_of, write_failure

LENGTH = 80  # bytes of a beat
FAILURE = ".failure"  # suffix of the file in which the launcher finds the exception of a rank
SHOWN = ".beat"  # file in the run folder: what rank 0 is doing, for `make status` on any host
SHOWN_LENGTH = 200
SHOWN_EVERY_S = 5.0
PHASES = {"eval": "evaluate", "save": "save"}  # phase of the loop's clock -> phase of the beat
Item = TypeVar("Item")


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank, as it stands in the file. `at` is on the rank's own clock.

    `steps` = steps that the rank has begun in this attempt; `part_s` = seconds that each
    micro-batch of its last whole step took, 0 before there is one.
    """

    phase: str = "start"
    step: int = 0
    at: float = 0.0
    parts: int = 1
    steps: int = 0
    part_s: float = 0.0

    def line(self, rank: int) -> str:
        """The line of the file: always of one length, so that a beat needs no space on a disk."""
        text = f"{rank} {self.phase} {self.step} {self.at:.3f} {self.parts}"
        return f"{f'{text} {self.steps} {self.part_s:.6f}':<{LENGTH - 1}}\n"


def read_beat(path: Path) -> Beat | None:
    """The beat in a file; None where there is no complete one."""
    try:
        _rank, phase, step, at, parts, steps, part_s = path.read_text().split()
        return Beat(phase, int(step), float(at), max(1, int(parts)), int(steps), float(part_s))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Doing:
    """What a rank does now. `part` = a phase of the loop's clock; `step_s` since the step began."""

    phase: str
    step: int
    part: str
    micro_batch: int  # from 1; 0 = not known
    micro_batches: int
    step_s: float


class Heart:
    """The beats of this process; none before `begin`, and none where no launcher reads them."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._rank, self._phase, self._step, self._parts = 0, "start", 0, 1
        self._steps, self._part_s = 0, 0.0
        self._trained_s, self._beat_at = 0.0, now()  # of this step, in the phase "step" alone
        self._file: int | None = None
        self._shown: int | None = None
        self._shown_phase, self._shown_at = "", float("-inf")
        self._part, self._micro_batch, self._step_began = "", 0, now()
        self.failure: Failure | None = None  # the exception that ends this rank
        self._failure_path: Path | None = None

    def begin(self, environ: Mapping[str, str] = os.environ) -> None:
        """Beat from now on where a launcher reads; where none does, SIGUSR2 dumps to stderr."""
        folder, rank = environ.get(BEATS), environ.get("RANK", "0")
        self._rank = rank = int(rank) if rank.isdigit() else 0
        target: Any = sys.stderr
        if folder:
            path = Path(folder) / f"rank-{rank:05d}"
            self._failure_path = path.with_suffix(FAILURE)
            with contextlib.suppress(OSError):  # the launcher's folder is gone: nobody reads
                self._file = os.open(path.with_suffix(".beat"), os.O_WRONLY | os.O_CREAT, 0o600)
                target = os.open(path.with_suffix(".stacks"), os.O_WRONLY | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no usable stderr
            faulthandler.register(signal.SIGUSR2, file=target, all_threads=True)
        self.beat("start")

    def beat(self, phase: str, step: int | None = None, parts: int | None = None) -> None:
        """Record that this rank is in `phase`; step and parts stay as they are if not given."""
        now = self._now()
        if self._phase == "step":
            self._trained_s += now - self._beat_at
        self._beat_at = now
        if step is not None and step != self._step:
            self._part_s, self._trained_s = self._trained_s / self._parts, 0.0
            self._steps += phase == "step"
            self._step_began, self._micro_batch = now, 0
        self._phase = phase
        self._step = self._step if step is None else step
        self._parts = self._parts if parts is None else parts
        if self._file is not None:
            beat = Beat(phase, self._step, now, self._parts, self._steps, self._part_s)
            with contextlib.suppress(OSError):  # a lost beat must not end the run
                os.pwrite(self._file, beat.line(self._rank).encode(), 0)
        if self._shown is not None:
            self._show()

    def show_in(self, run_folder: Path) -> None:
        """Also write what this rank does into the run's folder, every few seconds (rank 0 only)."""
        with contextlib.suppress(OSError):
            self._shown = os.open(run_folder / SHOWN, os.O_WRONLY | os.O_CREAT, 0o644)
            self._show()

    def at_micro_batch(self, number: int) -> None:
        """Note that micro-batch `number` of the step, from 1, begins; costs no system call."""
        self._micro_batch = number

    def doing(self) -> Doing:
        """What this rank does now; any thread may ask."""
        return Doing(
            self._phase,
            self._step,
            self._part,
            self._micro_batch,
            self._parts,
            self._now() - self._step_began,
        )

    def around(self, phase: Callable[[str], Any]) -> Callable[[str], Any]:
        """Wrap the clock's `phase`: each part is noted, and evaluations and saves also beat."""

        @contextlib.contextmanager
        def beating(name: str) -> Iterator[None]:
            part, self._part = self._part, name
            before = self._phase
            if name in PHASES:
                self.beat(PHASES[name])
            try:
                with phase(name):
                    yield
            finally:
                self._part = part
                if name in PHASES:
                    self.beat(before)

        return beating

    @contextlib.contextmanager
    def reporting(self, *not_failures: type[BaseException]) -> Iterator[None]:
        """Keep the exception that leaves the block as this rank's `failure`, for the launcher.

        Only the first one counts. Exceptions of the types `not_failures` are none, and neither are
        requests to end (KeyboardInterrupt, SystemExit).
        """
        try:
            yield
        except Exception as error:
            if self.failure is None and not isinstance(error, not_failures):
                self.failure = failure_of(error, self._phase, self._step or None)
                if self._failure_path is not None:
                    with contextlib.suppress(OSError):
                        write_failure(self._failure_path, self.failure)
            raise

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items` with a beat before each, so that a long phase does not look like a hang."""
        for item in items:
            self.beat(self._phase)
            yield item

    def _show(self) -> None:
        now = self._now()
        if self._phase == self._shown_phase and now - self._shown_at < SHOWN_EVERY_S:
            return
        self._shown_phase, self._shown_at = self._phase, now
        fields = {
            "phase": self._phase,
            "step": self._step,
            "unix_s": round(time.time(), 1),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        with contextlib.suppress(OSError):  # a full disk, or a file system that went away
            text = json.dumps(fields)
            os.pwrite(self._shown, f"{text:<{SHOWN_LENGTH - 1}}\n".encode(), 0)


HEART = Heart()
