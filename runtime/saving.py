"""The schedule of saves, and what the ranks exchange before each save.

    every step    poll: take the report of a save that ended in its thread; report one that is stuck
    a due step    exchange: is one still in flight? are copies of weights equal? what do saves cost?
                  -> wait for it, or leave this save out -> save, in the step or in a thread
    the last one  tried again for ten minutes where it fails: no later step saves its weights

Rule: what all ranks must do alike - save, wait, leave out, stop - follows from the step and from
numbers that all of them exchanged; what one rank alone sees is only reported. Units: steps,
seconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import Shared
from base.values import counted
from checkpoint.comm import Comm
from checkpoint.format.manifest import folder_name
from checkpoint.format.state import RunState, random_states
from checkpoint.save import replicas
from checkpoint.save.commit import SaveReport
from checkpoint.save.interval import Cost, Pace, Timer, is_due, limit_s
from checkpoint.save.lease import Lease
from checkpoint.save.retention import Keep
from recipes.schema import Recipe
from record.heartbeat import HEART
from runtime import save_writers
from runtime.engine.engine import Engine
from runtime.process.process import Process
from runtime.resolve import Resolved
from runtime.save_writers import BackgroundWriter, Note, SaveTask, StepWriter, describe_ranks
from runtime.saved_state import SavedState

# Before each new try of the last save: somebody may make room.
LAST_PAUSES_S = (5, 10, 20, 40, 80, 160, 320)


class Unsaved(OSError):
    """The last step is trained and its weights are in no checkpoint: an attempt that failed."""


@dataclass(frozen=True)
class Edge:
    """One rank's part of the exchange before a save."""

    waited_s: float  # for the save before, which was in flight; 0 = it was not
    doing: str | None  # what the thread of that save does; None: it has ended
    summary: dict[str, int]  # of weights that other ranks hold too
    cost: Cost


class Saver:
    """Saves one run, on every rank. As a context manager it ends the save in flight."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        resolved: Resolved,
        stream: Any,  # data.stream.stream.Stream
        engine: Engine,
        ranks: Comm,
        process: Process,
        lease: Lease | None = None,  # rank 0's
    ):
        self.folder, self.wanted, self.lease = folder, recipe.checkpoint, lease
        self.engine, self.ranks, self.process = engine, ranks, process
        self.last_step = resolved.last_step if self.wanted.at_end else 0
        self.tell: Callable[[SaveReport | Note], None] = lambda news: None  # rank 0: the record
        self.sync_record: Callable[[], None] = lambda: None  # rank 0: before a checkpoint exists
        self.state = SavedState(recipe, resolved, stream)
        self.pace = None
        mtbf_hours = recipe.cluster.mtbf_hours
        if self.wanted.interval == "auto" and mtbf_hours is not None:
            self.pace = Pace(mtbf_hours * 3600)
        # Rank 0's clock decides for all ranks, see record.requests.
        self.timer = Timer(limit_s(self.wanted.interval, self.wanted.minutes, mtbf_hours))
        interval = self.wanted.interval
        self._fixed_steps = 0 if interval == "auto" else interval
        self.writer: StepWriter | BackgroundWriter
        is_async = {"async": True, "sync": False}.get(self.wanted.mode)
        if process.device.type == "cuda" if is_async is None else is_async:
            stuck_s = self.wanted.stuck_s
            self.writer = BackgroundWriter(ranks, process, stuck_s, self._ended, self._tell)
        else:
            self.writer = StepWriter(ranks, self._ended)
        self._report: SaveReport | None = None  # of the newest save that ended or was left out
        self._stall_s: float | None = None  # of the last save, without waiting and making memory

    def go_on(self, state: RunState) -> None:
        """Continue from the checkpoint that was loaded."""
        self.state.go_on(state)
        if self.pace:
            self.pace.go_on(state.step, state.saving)

    def is_due(self, step: int, is_asked: bool = False, is_time_up: bool = False) -> bool:
        """True where a save follows update `step`; `is_asked` = the run ends early after it.

        `is_time_up` is what rank 0's timer says, the same on all ranks. A trial that saves nothing
        (no interval, `at_end` false) does not save when it is asked to end either.
        """
        if is_time_up:
            return True
        if self.pace:
            planned = self.pace.is_due(step, self.last_step)
        else:
            planned = is_due(step, self._fixed_steps, self.last_step)
        keeps = self.wanted.at_end or self.wanted.interval != 0
        return planned or (is_asked and keeps)

    def poll(self) -> None:
        """At each step's end, on every rank: look after the save in flight."""
        if self.pace:
            self.pace.edge()
        self.writer.poll()

    def save(self, step: int, health: dict[str, int]) -> None:
        """Save the state after update `step`, or begin to; a collective. The result is told later.

        Raises Shared where copies of weights differ and the recipe says to stop.
        """
        began = time.perf_counter()
        self.timer.restart()
        own = self.engine.replicas() if self.ranks.world > 1 else []
        edge = self._edge(own)
        edges = self.ranks.exchange(edge, "edge of a save")
        behind = self.writer.in_flight
        if behind is not None and self._is_left_out(step, behind, edges, began):
            return
        self.writer.ready()
        self._compare(step, own, edges)
        if self.pace and self.pace.decide(step, [one.cost for one in edges]):
            self._tell_interval(step)
        self._begin(step, health, began)
        self._stall_s = time.perf_counter() - began - edge.waited_s - self.writer.made_s

    def drain(self) -> str | None:
        """Wait for the save in flight as long as it makes progress; a collective.

        For an end that all ranks come to alike. Returns why the newest save is not there; None: it
        is there, or there was none.
        """
        return self.writer.finish() or (None if self._report is None else self._report.problem)

    def last(
        self, step: int, health: dict[str, Any], asked: Callable[[], Any]
    ) -> tuple[str | None, Any]:
        """Make sure that `step`, whose save was begun, is saved: no other step follows it.

        A collective. Returns why it is not saved (None: it is), and the answer of `asked()`, which
        all ranks agree on, where it ended the tries.
        """
        pauses = iter(LAST_PAUSES_S)
        while True:
            problem = self.writer.finish()
            if problem or self._report.ok:
                return problem, None
            seconds = next(pauses, 0)
            if not seconds:
                return self._report.problem, None
            text = f"step {step} is the last one: its save is tried again in {seconds} s"
            self.tell(Note("save_again", text, {"step": step, "seconds": seconds}))
            for _ in range(seconds):
                HEART.beat("save", step)
                time.sleep(save_writers.POLL_S)
                if ending := asked():
                    return self._report.problem, ending
            self._begin(step, health, time.perf_counter(), again=True)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.writer.finish_after(error)

    def _tell(self, note: Note) -> None:
        self.tell(note)  # which is set after the writer is made

    def _ended(self, report: SaveReport) -> None:
        """Take the report of a save that has ended."""
        # A later save may have been left out meanwhile: this report does not make it good.
        if self._report is None or report.step >= self._report.step:
            self._report = report
        self.state.saved(report)
        self.tell(report)

    def _edge(self, own: list[replicas.Replica]) -> Edge:
        """Wait for the save in flight as long as it is allowed; returns this rank's part."""
        waited_s, doing = self.writer.wait_before_next()
        save_s = self._report.seconds if self._report and self._report.ok else None
        step_s = self.pace.step_s() if self.pace else None
        return Edge(waited_s, doing, replicas.summary(own), Cost(self._stall_s, save_s, step_s))

    def _is_left_out(self, step: int, behind: int, edges: list[Edge], began: float) -> bool:
        """Report the wait for the save of step `behind`; True where it has not ended on all ranks,
        so that the save of `step` is left out.
        """
        waited_s = max(one.waited_s for one in edges)
        if waited_s:
            text = f"the save of step {step} waited {waited_s:.2g} s for that of step {behind}"
            facts = {"step": step, "behind": behind, "seconds": waited_s}
            self.tell(Note("save_waited", text, facts))
        still = {rank: one.doing for rank, one in enumerate(edges) if one.doing}
        if not still:
            return False
        stall_s = time.perf_counter() - began
        problem = f"that of step {behind} is still being written by {describe_ranks(still)}"
        final = self.folder / "checkpoints" / folder_name(step)
        self._report = SaveReport(step, final, False, problem, 0, stall_s, stall_s)
        self.tell(self._report)
        if self.pace:
            self.pace.postpone(step)
        return True

    def _compare(self, step: int, own: list[replicas.Replica], edges: list[Edge]) -> None:
        """Report each group of ranks whose copies of weights differ. Raises Shared."""
        holders = replicas.differing([one.summary for one in edges])
        drifts = replicas.locate(own, holders, self.ranks) if holders else []
        for drift in drifts:
            facts = dataclasses.asdict(drift)
            self.tell(Note("drift", f"step {step}: {drift}", {"step": step, **facts}))
        if drifts and self.wanted.on_drift == "stop":
            raise Shared(
                f"stopped after step {step}, which is not saved: {drifts[0]}. A bit has flipped in"
                " memory, on a link or in an arithmetic unit; test these hosts (make doctor). The"
                " same command goes on from the newest checkpoint, whose copies were equal"
            )

    def _tell_interval(self, step: int) -> None:
        pace = self.pace
        facts = {"step": step, "interval": pace.interval, "next": pace.next}
        facts |= {"stalls_s": pace.stalls_s, "saves_s": pace.saves_s, "mtbf_s": pace.mtbf_s}
        every = counted(pace.interval, "step")
        text = f"a save every {every} from step {step} on (checkpoint.interval=auto)"
        self.tell(Note("interval", text, facts))

    def _begin(self, step: int, health: dict[str, Any], began: float, again: bool = False) -> None:
        """Save, or begin to; `again` after a failure."""
        saving = self.pace.as_dict() if self.pace else {}
        state = self.state.after(step, health, self.engine.optimizer_step(), saving)
        task = SaveTask(
            (self.folder, step, self.engine.fragments(), state.as_dict()),
            dict(
                local={"random": random_states(self.process.device)},
                keep=Keep(newest=self.wanted.keep, every=self.wanted.keep_every),
                fence=self.lease,
                verify=self.wanted.verify,
                again=again,
                sync_record=self.sync_record,
            ),
        )
        self.writer.begin(task, began)
