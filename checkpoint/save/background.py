"""Saves beside training: the state is copied, then a thread runs the phases of `commit.save`.

    training:  step N | copy | step N+1 | step N+2 | ...        training waits only for the copy
    thread:           '--> prepare, write, commit, verify, prune --> report

Rule: the thread uses nothing that training uses. Its tensors are copies in host memory, the state
and random states are copied with them, its ranks communicate over a group of their own, and it
makes no call to the device. At most one save is in flight, so one copy exists. Hashing and writing
release Python's global lock, so training goes on meanwhile. Units: seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoint.comm import Comm
from checkpoint.format.index import Fragment
from checkpoint.format.index_file import Point, nothing
from checkpoint.save.commit import SaveReport, save
from checkpoint.save.snapshot import Snapshot

WAITS = "waits for the other ranks"


class Background:
    """Saves one run in a thread, one save at a time. Only the thread uses `comm`."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._snapshot = Snapshot()
        self._writer: _Writer | None = None

    @property
    def in_flight(self) -> int | None:
        """Step of the save that was begun and whose report was not taken yet."""
        return None if self._writer is None else self._writer.step

    @property
    def made_s(self) -> float:
        """Part of the last stall that allocated memory for the copy, which happens once."""
        return self._snapshot.made_s

    @property
    def age_s(self) -> float:
        """Time since the save in flight began."""
        return 0.0 if self._writer is None else time.perf_counter() - self._writer.began

    @property
    def idle_s(self) -> float:
        """Time since the thread last reached a new moment of the save."""
        return 0.0 if self._writer is None else time.perf_counter() - self._writer.watched.since

    @property
    def doing(self) -> str | None:
        """Current activity of the thread, such as `write data` or WAITS; None: no save in
        flight.
        """
        return self._writer.watched.doing if self._writer and self._writer.is_alive() else None

    def begin(
        self,
        run_folder: Path,
        step: int,
        fragments: Sequence[Fragment],
        state: dict[str, Any],
        *,
        local: dict[str, Any] | None = None,
        point: Point = nothing,
        since: float | None = None,
        **options: Any,
    ) -> None:
        """Copy the state and start to save it, on all ranks; for the arguments see `commit.save`.

        Changes made after this returns are in no file. Every failure, also of the copy, is in the
        report on all ranks. The stall is counted from `since`, a value of time.perf_counter.
        """
        assert self._writer is None, "one save at a time: take the report of the one in flight"
        began = time.perf_counter() if since is None else since
        point("copy", self.comm.rank)
        try:
            copies: Sequence[Fragment] | Iterator[Fragment] = self._snapshot.take(fragments)
        except Exception as error:  # reported to the other ranks in the phase `write`
            copies = _failing(error)
        state, local = copy.deepcopy((state, local))
        point("start writer", self.comm.rank)

        def action(watched: Watched) -> SaveReport:
            options["point"] = watched.point
            return save(run_folder, step, copies, state, watched, local=local, **options)

        self._writer = _Writer(step, action, Watched(self.comm, point), began)
        self._writer.start()

    def take(self, wait_s: float = 0.0) -> SaveReport | None:
        """Return the report of a save that has ended, once; None while it runs, or where there is
        none.

        Waits at most `wait_s`. Raises the error that ended the thread, such as RuntimeError where
        the ranks lost each other.
        """
        writer = self._writer
        if writer is None:
            return None
        writer.join(max(0.0, wait_s))
        if writer.is_alive():
            return None
        self._writer = None
        if writer.error is not None:
            raise writer.error
        return writer.report


class Watched:
    """Comm and hook of a writer that also record what the writer is doing now."""

    def __init__(self, comm: Comm, point: Point):
        self.comm, self._point = comm, point
        self.rank, self.world = comm.rank, comm.world
        self._now("start")

    def _now(self, doing: str) -> None:
        self.doing, self.since = doing, time.perf_counter()

    def point(self, name: str, rank: int) -> None:
        """Record a moment of the save, and call the hook."""
        self._now(name)
        self._point(name, rank)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Like Comm.exchange, and also record that the writer waits."""
        self._now(WAITS)
        values = self.comm.exchange(value, what)
        self._now(f"after {what}")
        return values


class _Writer(threading.Thread):
    """The thread of one save. It is a daemon, so a write that never returns does not keep the
    process alive.
    """

    def __init__(
        self, step: int, action: Callable[[Watched], SaveReport], watched: Watched, began: float
    ):
        super().__init__(name=f"save of step {step}", daemon=True)
        self.step, self.began, self.stall_s = step, began, time.perf_counter() - began
        self.watched = watched
        self.report: SaveReport | None = None
        self.error: BaseException | None = None
        self._action: Callable[[Watched], SaveReport] | None = action

    def run(self) -> None:
        """Save, and keep the report or the error."""
        try:
            report = self._action(self.watched)
            seconds = time.perf_counter() - self.began
            self.report = dataclasses.replace(report, seconds=seconds, stall_s=self.stall_s)
        except BaseException as error:  # raised again where the report is taken
            self.error = error
        finally:
            self._action = None


def is_writer() -> bool:
    """Return whether the calling thread is one that saves."""
    return isinstance(threading.current_thread(), _Writer)


def _failing(error: Exception) -> Iterator[Fragment]:
    """Give fragments that cannot be read: the first use raises `error`."""
    raise error
    yield
