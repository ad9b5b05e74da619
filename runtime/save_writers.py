"""The two ways in which a save is written: within the step that it follows, or in a thread.

    StepWriter         begin() returns when the save has ended
    BackgroundWriter   begin() copies the state; a thread writes it while training goes on

Both have the same methods, so runtime.saving.Saver does not ask which one it has. Rule: whether a
save is in flight is what all ranks have agreed on (`in_flight`), never what one rank sees of its
own thread. Units: seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from base.errors import Shared
from checkpoint.comm import Comm, RankComm
from checkpoint.save.background import WAITS, Background
from checkpoint.save.commit import SaveReport, save
from record.heartbeat import HEART
from runtime.process.process import Process

# How long the threads of a save wait for each other. A dead process is noticed at once, a silent
# host by training's own collectives; a slow disk is no reason to give a save up.
PATIENCE_S = 7 * 86400.0
POLL_S = 1.0
# Time for a save in flight when this rank fails: less than the launcher gives it until SIGKILL.
GRACE_S = 20.0


@dataclass(frozen=True)
class Note:
    """An event to be recorded, with a line for a person."""

    kind: str
    text: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class SaveTask:
    """The arguments of one call of `checkpoint.save.commit.save`, without its process group."""

    arguments: tuple[Any, ...]  # run folder, step, fragments, state
    options: dict[str, Any]

    @property
    def step(self) -> int:
        """The update whose state is saved."""
        return self.arguments[1]


class StepWriter:
    """Writes each save within the step that it follows. `ended` takes the report of each save."""

    in_flight: int | None = None  # never: a save has ended when `begin` returns
    made_s = 0.0

    def __init__(self, ranks: Comm, ended: Callable[[SaveReport], None]):
        self._ranks, self._ended = ranks, ended

    def begin(self, task: SaveTask, began: float) -> None:
        """Save; a collective."""
        self._ended(save(*task.arguments, self._ranks, **task.options))

    def poll(self) -> None:
        """Nothing is in flight."""

    def wait_before_next(self) -> tuple[float, str | None]:
        """Nothing is in flight."""
        return 0.0, None

    def ready(self) -> None:
        """Nothing is in flight."""

    def finish(self) -> str | None:
        """Nothing is in flight."""
        return None

    def finish_after(self, error: BaseException | None) -> None:
        """Nothing is in flight."""


class BackgroundWriter:
    """Writes saves in a thread, one at a time. `ended` takes the report of each save that ended.

    `ranks` is the process group of the training thread. A save that has been in flight for more
    than `stuck_s` is reported once, by `tell`.
    """

    def __init__(
        self,
        ranks: Comm,
        process: Process,
        stuck_s: float,
        ended: Callable[[SaveReport], None],
        tell: Callable[[Note], None],
    ):
        self.stuck_s = stuck_s
        self.in_flight: int | None = None  # as all ranks agree; this rank's own may have ended
        self.background = Background(RankComm(PATIENCE_S))
        self._ranks, self._process = ranks, process
        self._ended, self._tell = ended, tell
        self._is_reported = False  # that the save in flight is stuck

    @property
    def made_s(self) -> float:
        """Seconds of the last `begin` that went into memory for the copy, which is made once."""
        return self.background.made_s

    def begin(self, task: SaveTask, began: float) -> None:
        """Copy the state and let the thread begin; `began` is when the stall began."""
        self.background.begin(*task.arguments, since=began, **task.options)
        self.in_flight, self._is_reported = task.step, False

    def poll(self) -> None:
        """Take the report of a save that has ended; report one that is stuck."""
        if self.background.in_flight is not None:
            self._take(0.0)
            self._report_stuck()

    def wait_before_next(self) -> tuple[float, str | None]:
        """Wait for the save in flight, as long as it is allowed.

        Returns the seconds of waiting, and what the thread does where the save has not ended.
        """
        if self.background.in_flight is not None:
            self._take(0.0)
        if self.background.in_flight is None:
            return 0.0, None
        is_allowed = self.background.age_s < self.stuck_s
        began = time.perf_counter()
        doing = self._wait()
        return time.perf_counter() - began if is_allowed else 0.0, doing

    def ready(self) -> None:
        """All ranks agree that no save is in flight."""
        self.in_flight = None

    def finish(self) -> str | None:
        """Wait for the save in flight as long as it makes progress; a collective.

        Returns why it is still in flight, None where it has ended.
        """
        while True:
            HEART.beat("end")  # a save may take longer than the phase in which the end was found
            doing = self._wait()
            answers = self._ranks.exchange((doing, self.background.idle_s), "end of saves")
            still = {rank: doing for rank, (doing, _) in enumerate(answers) if doing}
            if not still:
                return None
            if all(answers[rank][1] >= self.stuck_s for rank in still):
                return f"step {self.in_flight} is still being written by {describe_ranks(still)}"
            time.sleep(min(POLL_S, self.stuck_s))

    def finish_after(self, error: BaseException | None) -> None:
        """Give the save in flight time after `error`.

        An error that all ranks raise alike leaves it the time that a save may take; an error of
        this rank alone leaves it GRACE_S.
        """
        if self.background.in_flight is None:
            return
        HEART.beat("end")
        rest_s = self.stuck_s - self.background.age_s
        try:
            self._take(rest_s if isinstance(error, Shared) else min(rest_s, GRACE_S))
        except RuntimeError as lost:  # of the other ranks; the cause is being raised already
            print(f"the save in flight is lost: {lost}", file=sys.stderr)

    def _wait(self) -> str | None:
        """Wait for the save in flight, as long as it is allowed; what the thread does, or None."""
        self._take(self.stuck_s - self.background.age_s)
        doing = self.background.doing
        if doing is None:
            self._take(0.0)  # it may have ended since
        else:
            self._report_stuck()
        return doing

    def _take(self, wait_s: float) -> None:
        report = self.background.take(wait_s)
        if report is not None:
            self._is_reported = False
            self._ended(report)

    def _report_stuck(self) -> None:
        """Report, once per save, that it has been in flight for too long."""
        age_s = self.background.age_s
        if self._is_reported or age_s <= self.stuck_s:
            return
        self._is_reported = True
        step, doing = self.background.in_flight, self.background.doing or "ends"
        text = (
            f"the save of step {step} has not ended after {age_s:.0f} s"
            f" (checkpoint.stuck_s={self.stuck_s}); rank {self._process.rank}: {doing}."
            " No other save begins until it ends"
        )
        self._tell(Note("save_stuck", text, {"step": step, "seconds": age_s, "doing": doing}))
        if not self._process.is_first and doing != WAITS:
            print(f"warning: {text}", file=sys.stderr, flush=True)


def describe_ranks(still: dict[int, str]) -> str:
    """Ranks and what they do, for a person: first those that do not wait for another rank."""
    apart = {rank: doing for rank, doing in still.items() if doing != WAITS}
    shown = list((apart or still).items())[:4]
    more = f", {len(still)} ranks in all" if len(still) > len(shown) else ""
    return ", ".join(f"rank {rank} ({doing})" for rank, doing in shown) + more
