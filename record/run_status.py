"""The status of a run as its folder shows it, for commands that look at it from outside.

Rule: nothing is guessed. The run's lock says whether it is alive, the heartbeat of rank 0 says what
it does, the history says which steps belong to it, and all numbers come from its record. Abandoned
steps are in no number. Imports no torch. Units: seconds, steps.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.format.manifest import NAME, committed
from checkpoint.lineage import Line, lineage, read, segments
from record.attempts import ENDINGS, is_end, unix_s
from record.presence import is_living, launcher, shown
from record.records import (
    CHECKED_BYTES,
    METRICS,
    METRICS_HAVE,
    newest_records,
    read_events,
)

RECENT = 20  # newest steps from which the speed is computed


@dataclass(frozen=True)
class RunStatus:
    """A run as its folder shows it at `now_s`."""

    folder: Path
    is_running: bool
    seen: Mapping[str, Any]  # the last heartbeat of rank 0
    events: Sequence[Mapping[str, Any]]
    lines: Sequence[Mapping[str, Any]]  # the newest steps of the lineage, oldest first
    line_s: float | None  # time of the newest line
    evaluated: tuple[int, float] | None  # newest evaluation: step, validation loss
    saved: tuple[int, float] | None  # newest checkpoint of the lineage: step, time
    opened: Line | None  # the line of history.jsonl that opened the current segment
    now_s: float
    launcher: str | None = None  # the process that starts it again

    @property
    def step(self) -> int:
        """The newest step that belongs to the run; 0 before the first."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def num_attempts(self) -> int:
        """Attempts of this run, with the one that goes on; a branch does not count its parent's."""
        return len({event["attempt"] for event in self.events})

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is planned to have; None where its record does not say."""
        return self._planned("total_steps", "steps")

    @property
    def last_step(self) -> int | None:
        """The step after which the newest attempt ends: stop_after, or the last one of all."""
        goals = [self._planned("last_step", "stop_after"), self.total_steps]
        known = [goal for goal in goals if goal is not None]
        return min(known) if known else None

    @property
    def is_complete(self) -> bool:
        """Whether the last step of all is trained, and saved where the run saves at its end."""
        total = self.total_steps
        if total is not None and self.saved is not None and self.saved[0] >= total:
            return True
        if self.is_rewound or self.ended_by != "finished":
            return False
        # The newest one: an earlier one may have reached further, before a rewind.
        reached = [event.get("step", 0) for event in self.events if event["kind"] == "finished"]
        return total is None or (reached or [0])[-1] >= total

    @property
    def ended_by(self) -> str | None:
        """The kind of event that ended the newest attempt; None where there is none."""
        own = [e for e in self.events if e["attempt"] == self.events[-1]["attempt"]]
        kinds = [event["kind"] for event in own if event["kind"] in ENDINGS]
        causes = [event["cause"] for event in own if is_end(event)]
        return (kinds or causes or [None])[-1]

    @property
    def is_rewound(self) -> bool:
        """Whether the current segment was opened (rewind, branch) and has no attempt yet."""
        if self.opened is None or self.opened["parent"] is None:
            return False
        begun = {event.get("segment", 0) for event in self.events if event["kind"] == "began"}
        return self.opened["segment"] not in begun

    @property
    def recent(self) -> list[Mapping[str, Any]]:
        """The newest lines of one attempt, without its first step, which warms up."""
        newest = self.lines[-1]["attempt"] if self.lines else None
        return [
            line
            for line in self.lines[-RECENT:]
            if line["attempt"] == newest and not line["first_of_attempt"]
        ]

    @property
    def step_s(self) -> float | None:
        """Median seconds of a recent step; None where only first steps are known."""
        return statistics.median(line["step_s"] for line in self.recent) if self.recent else None

    @property
    def active_s(self) -> float:
        """The time of the run's newest sign of life."""
        signs = [self.line_s or 0.0, self.seen.get("unix_s", 0.0)]
        signs += [unix_s(event) for event in self.events[-1:]]
        return max(signs) or (self.folder / "recipe.yaml").stat().st_mtime

    @property
    def word(self) -> str:
        """The state in one word or two."""
        if self.is_running:
            return "running" if self.seen.get("step") else "starting"
        if self.launcher:
            return "restarting"
        if self.is_complete:
            return "finished"
        if self.is_rewound:
            return "branch" if "run" in self.opened["parent"] else "rewound"
        if not self.events:
            return "not begun"
        ended = self.ended_by
        if ended == "finished":  # but not complete: stop_after
            return "stopped"
        return (ended or "killed").replace("_", " ")

    def _planned(self, fact: str, knob: str) -> int | None:
        """A number of steps: as the newest attempt resolved it, or as the recipe has it."""
        known = [e[fact] for e in self.events if e["kind"] == "began" and e.get(fact) is not None]
        if known:
            return known[-1]
        found = re.search(rf"^{knob}: (\d+)$", recipe_text(self.folder), re.M)
        return int(found[1]) if found else None


def status_of(folder: Path) -> RunStatus:
    """Read the status of a run from its folder. Raises UserError where its history is damaged."""
    metrics = folder / METRICS
    saved = committed(folder / "checkpoints")
    newest = (saved[-1][0], (saved[-1][1] / NAME).stat().st_mtime) if saved else None
    lines, evaluated = newest_lines(folder)
    opened = segments(read(folder))
    return RunStatus(
        folder,
        is_living(folder),
        shown(folder),
        read_events(folder),
        lines,
        metrics.stat().st_mtime if metrics.exists() else None,
        evaluated,
        newest,
        opened[-1] if opened else None,
        time.time(),
        launcher(folder),
    )


def newest_lines(folder: Path) -> tuple[list[dict[str, Any]], tuple[int, float] | None]:
    """The newest RECENT + 1 steps of the lineage, oldest first, and the newest validation loss.

    Only the end of the file is read, however long it is.
    """
    history = read(folder)
    chain = lineage(history) if segments(history) else None
    found, evaluated = [], None
    for _, line in newest_records(folder / METRICS, METRICS_HAVE, CHECKED_BYTES):
        if not isinstance(line, dict):
            continue
        if chain is not None and not chain.holds(line["segment"], line["step"]):
            continue
        if len(found) <= RECENT:
            found.append(line)
        if evaluated is None and line.get("val_loss") is not None:
            evaluated = (line["step"], line["val_loss"])
        if evaluated and len(found) > RECENT:
            break
    return found[::-1], evaluated


def recipe_text(folder: Path) -> str:
    """The text of the run's recipe, read without a parser, because it may be damaged."""
    return (folder / "recipe.yaml").read_text(errors="replace")


def start_command(folder: Path, ranks_of: Path | None = None) -> str:
    """The command that starts the run in `folder` (under runs/), with its number of ranks.

    `ranks_of` is the folder of the run whose ranks are meant; default: the same run.
    """
    world = world_of(ranks_of or folder)
    nproc = f" NPROC={world}" if world and world > 1 else ""
    return f"make pretrain RECIPE=runs/{folder.name}/recipe.yaml{nproc}"


def world_of(folder: Path) -> int | None:
    """Number of ranks of the newest attempt; None where it is not known."""
    try:
        return len(json.loads((folder / "layout.json").read_text())["places"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
