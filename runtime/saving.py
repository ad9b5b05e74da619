"""When a run saves, and what; and what the ranks tell each other before they do.

    every step    poll: the report of a save that ended beside training; an alarm for one that hangs
    a due step    exchange: is one still in flight? are copies of weights equal? what do saves cost?
                  -> wait for it, or leave this save out -> save, in the step or beside it
    the last one  again and again for ten minutes where it fails: no later step saves its weights

The one rule: what all ranks must do alike - save, wait, leave out, stop - follows from the step and
from numbers that all of them exchanged; what one rank sees alone is only told. Units: steps,
seconds.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import Shared
from base.values import counted
from checkpoint.comm import Comm, RankComm
from checkpoint.format.manifest import folder_name
from checkpoint.format.state import RunState, random_states
from checkpoint.save import replicas
from checkpoint.save.background import WAITS, Background
from checkpoint.save.commit import SaveReport, save
from checkpoint.save.interval import Cost, Pace, is_due
from checkpoint.save.lease import Lease
from checkpoint.save.retention import Keep
from recipes.schema import Recipe
from record import run_folder
from record.heartbeat import HEART
from runtime.engine.engine import Engine
from runtime.process.process import Process
from runtime.resolve import Resolved

# How long the writers of a save wait for each other. A dead process is noticed at once, a silent
# host by training's own collectives; a slow disk is no reason to give a save up.
PATIENCE_S = 7 * 86400.0
POLL_S = 1.0
# Before each new try of the last save: somebody may make room.
LAST_PAUSES_S = (5, 10, 20, 40, 80, 160, 320)
# What a save in flight gets when this rank fails: less than the launcher gives it until SIGKILL.
GRACE_S = 20.0


class Unsaved(OSError):
    """The last step is trained and its weights are in no checkpoint: an attempt that failed."""


@dataclass(frozen=True)
class Note:
    """Something to put on record: an event, and a line for a person."""

    kind: str
    text: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Edge:
    """What a rank tells the others before a save."""

    waited_s: float  # for the save before, which was in flight; 0 = it was not
    doing: str | None  # of that save, where it has not ended; None: it has
    summary: dict[str, int]  # of weights that other ranks hold too
    cost: Cost


class Saver:
    """Saves one run, on every rank. As a context it ends what is in flight."""

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
        self.folder, self.recipe, self.resolved = folder, recipe, resolved
        self.stream, self.engine, self.ranks, self.process = stream, engine, ranks, process
        self.lease = lease
        self.wanted = recipe.checkpoint
        self.last_step = resolved.last_step if self.wanted.at_end else 0
        self.tell: Callable[[SaveReport | Note], None] = lambda news: None  # rank 0: the record
        self.sync_record: Callable[[], None] = lambda: None  # rank 0: before a checkpoint exists
        self.pace = None
        if self.wanted.interval == "auto":
            self.pace = Pace(recipe.cluster.mtbf_hours * 3600)
        self.background = None
        if self.wanted.mode == "async":
            self.background = Background(RankComm(PATIENCE_S))
        self._in_flight: int | None = None  # as all ranks agree; one's own may have ended
        self._is_alarmed = False
        self._report: SaveReport | None = None  # of the newest save that ended or was left out
        self._stall_s: float | None = None  # of the last save, waiting and making memory left out

        self._state: RunState | None = None  # of the newest save that was begun

        self.segment = 0  # of the history
        self.skipped_before = 0  # steps that did not move the weights before the last save
        self.evaluated: tuple[int, Any] | None = None  # step and validation loss, since then

    def go_on(self, state: RunState) -> None:
        """Take up what the checkpoint that was loaded says about the next save."""
        self.skipped_before = state.health["skipped_steps"]
        if self.pace:
            self.pace.go_on(state.step, state.saving)

    def is_due(self, step: int, is_asked: bool = False) -> bool:
        """Whether a save follows update `step`; `is_asked` = the run ends early after it. A trial
        that saves nothing (no interval, `at_end` false) does not save then either."""
        if self.pace:
            planned = self.pace.is_due(step, self.last_step)
        else:
            planned = is_due(step, self.wanted.interval, self.last_step)
        keeps = self.wanted.at_end or self.wanted.interval != 0
        return planned or (is_asked and keeps)

    def poll(self) -> None:
        """At each step's end, on every rank: tell what has become of the save in flight."""
        if self.pace:
            self.pace.edge()
        if self.background and self.background.in_flight is not None:
            self._take(0.0)
            self._alarm()

    def save(self, step: int, health: dict[str, int]) -> None:
        """Save the state after update `step`, or begin to; a collective. What came of it is told.

        Raises Shared where copies of weights differ and the recipe says to stop.
        """
        began = time.perf_counter()
        own = self.engine.replicas() if self.ranks.world > 1 else []
        edge = self._edge(own)
        edges = self.ranks.exchange(edge, "edge of a save")
        behind = self._in_flight
        if behind is not None:
            waited_s = max(one.waited_s for one in edges)
            if waited_s:
                text = f"the save of step {step} waited {waited_s:.2g} s for that of step {behind}"
                facts = {"step": step, "behind": behind, "seconds": waited_s}
                self.tell(Note("save_waited", text, facts))
            still = {rank: one.doing for rank, one in enumerate(edges) if one.doing}
            if still:
                self._leave_out(step, behind, still, time.perf_counter() - began)
                return
        self._in_flight = None
        self._compare(step, own, edges)
        if self.pace and self.pace.decide(step, [one.cost for one in edges]):
            self._tell_interval(step)
        self._begin(step, health, began)
        self._stall_s = time.perf_counter() - began - edge.waited_s
        if self.background:
            self._stall_s -= self.background.made_s

    def drain(self) -> str | None:
        """Wait for the save in flight as long as it moves on; a collective, before an end that all
        ranks come to alike. Why the newest save is not there; None: it is, or there was none.
        """
        return self._resolve() or (None if self._report is None else self._report.problem)

    def last(
        self, step: int, health: dict[str, Any], asked: Callable[[], Any]
    ) -> tuple[str | None, Any]:
        """See to it that `step`, whose save was begun and which no other step follows, is saved; a
        collective. Why it is not, None: it is; and what `asked()` gave, which all ranks agree on,
        where it broke off the tries.
        """
        pauses = iter(LAST_PAUSES_S)
        while True:
            problem = self._resolve()
            if problem or self._report.ok:
                return problem, None
            seconds = next(pauses, 0)
            if not seconds:
                return self._report.problem, None
            text = f"step {step} is the last one: its save is tried again in {seconds} s"
            self.tell(Note("save_again", text, {"step": step, "seconds": seconds}))
            for _ in range(seconds):
                HEART.beat("save", step)
                time.sleep(POLL_S)
                if ending := asked():
                    return self._report.problem, ending
            self._begin(step, health, time.perf_counter(), again=True)

    def _resolve(self) -> str | None:
        """Wait for the save in flight; why it is still in flight, or None, on all ranks."""
        while self.background:
            HEART.beat("end")  # not the phase in which the end was found: a save may take longer
            doing = self._wait()
            answers = self.ranks.exchange((doing, self.background.idle_s), "end of saves")
            still = {rank: doing for rank, (doing, _) in enumerate(answers) if doing}
            if not still:
                break
            if all(answers[rank][1] >= self.wanted.stuck_s for rank in still):
                return f"step {self._in_flight} is still being written by {_doing(still)}"
            time.sleep(min(POLL_S, self.wanted.stuck_s))
        return None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """After an error the save in flight is given time: by what all ranks raise alike as much as
        ever, by what one of them raises alone a little.
        """
        if self.background and self.background.in_flight is not None:
            HEART.beat("end")
            rest_s = self.wanted.stuck_s - self.background.age_s
            try:
                self._take(rest_s if isinstance(error, Shared) else min(rest_s, GRACE_S))
            except RuntimeError as lost:  # the other ranks; the cause is on its way up already
                print(f"the save in flight is lost: {lost}", file=sys.stderr)

    def _wait(self) -> str | None:
        """For the save in flight, as long as it is allowed; what it does, unless it has ended."""
        self._take(self.wanted.stuck_s - self.background.age_s)
        doing = self.background.doing
        if doing is None:
            self._take(0.0)  # it may have ended since
        else:
            self._alarm()
        return doing

    def _take(self, wait_s: float) -> None:
        report = self.background.take(wait_s)
        if report is not None:
            self._is_alarmed = False
            if self._report is None or report.step >= self._report.step:
                self._report = report  # one that was left out meanwhile is not made good by it
            self._ended(report)

    def _ended(self, report: SaveReport) -> None:
        """Tell of a save; what it says need not be said by the next one, where it is there."""
        if report.ok:
            self.skipped_before = self._state.health["skipped_steps"]
            if self.evaluated and self.evaluated[0] <= report.step:
                self.evaluated = None
        self.tell(report)

    def _alarm(self) -> None:
        """Once per save: it has been in flight for too long."""
        age_s = self.background.age_s
        if self._is_alarmed or age_s <= self.wanted.stuck_s:
            return
        self._is_alarmed = True
        step, doing = self.background.in_flight, self.background.doing or "ends"
        text = (
            f"the save of step {step} has not ended after {age_s:.0f} s"
            f" (checkpoint.stuck_s={self.wanted.stuck_s}); rank {self.process.rank}: {doing}."
            " No other save begins until it ends"
        )
        self.tell(Note("save_stuck", text, {"step": step, "seconds": age_s, "doing": doing}))
        if not self.process.is_first and doing != WAITS:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _edge(self, own: list[replicas.Replica]) -> Edge:
        """Wait for the save in flight as long as it is allowed, and say how this rank stands."""
        waited_s, doing = 0.0, None
        if self.background and self.background.in_flight is not None:
            self._take(0.0)
            if self.background.in_flight is not None:
                is_allowed = self.background.age_s < self.wanted.stuck_s
                began = time.perf_counter()
                doing = self._wait()
                waited_s = time.perf_counter() - began if is_allowed else 0.0
        save_s = self._report.seconds if self._report and self._report.ok else None
        step_s = self.pace.step_s() if self.pace else None
        return Edge(waited_s, doing, replicas.summary(own), Cost(self._stall_s, save_s, step_s))

    def _leave_out(self, step: int, behind: int, still: dict[int, str], stall_s: float) -> None:
        problem = f"that of step {behind} is still being written by {_doing(still)}"
        final = self.folder / "checkpoints" / folder_name(step)
        self._report = SaveReport(step, final, False, problem, 0, stall_s, stall_s)
        self.tell(self._report)
        if self.pace:
            self.pace.postpone(step)

    def _compare(self, step: int, own: list[replicas.Replica], edges: list[Edge]) -> None:
        """An alarm for each group of ranks whose copies differ."""
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
        self._state = self._state_after(step, health)
        arguments = (self.folder, step, self.engine.fragments(), self._state.as_dict())
        options = dict(
            local={"random": random_states(self.process.device)},
            keep=Keep(newest=self.wanted.keep, every=self.wanted.keep_every),
            fence=self.lease,
            verify=self.wanted.verify,
            again=again,
            sync_record=self.sync_record,
        )
        if self.background:
            self.background.begin(*arguments, since=began, **options)
            self._in_flight, self._is_alarmed = step, False
        else:
            self._report = save(*arguments, self.ranks, **options)
            self._ended(self._report)

    def _state_after(self, step: int, health: dict[str, Any]) -> RunState:
        """`health` gets what tells a healthy checkpoint: the newest validation loss since the save
        before (null: none, or not finite), its step, and how many steps were skipped since.
        """
        val_step, loss = self.evaluated or (None, math.nan)
        val_loss = float(loss)
        health = health | {
            "val_loss": val_loss if math.isfinite(val_loss) else None,
            "val_step": val_step,
            "skipped_since_save": health["skipped_steps"] - self.skipped_before,
        }
        counted = self.engine.optimizer_step()
        return RunState(
            step=step,
            tokens=self.stream.tokens_after(step),
            optimizer_step=step - health["skipped_steps"] if counted is None else counted,
            seed=self.recipe.seed,
            recipe=dataclasses.asdict(self.recipe),
            data=self.stream.state() | {"past": self.stream.past(step)},
            layout=self.resolved.layout.as_dict(),
            versions=run_folder.versions(),
            segment=self.segment,
            health=health,
            saving=self.pace.as_dict() if self.pace else {},
        )


def _doing(still: dict[int, str]) -> str:
    """Which ranks are where, for a person: first those that no other rank keeps waiting."""
    apart = {rank: doing for rank, doing in still.items() if doing != WAITS}
    shown = list((apart or still).items())[:4]
    more = f", {len(still)} ranks in all" if len(still) > len(shown) else ""
    return ", ".join(f"rank {rank} ({doing})" for rank, doing in shown) + more
