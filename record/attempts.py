"""The attempts of a run in events.jsonl: each start of all ranks leaves one line when it is over.

    began        rank 0, as soon as its record is open         first_step   when a step is on record
    attempt         whoever started the ranks, when all have ended: cause, rank, host, steps,
    seconds

The one rule: every attempt has one `attempt` line. Where nobody was left to write it (torchrun, a
killed
launcher) the next start writes it, from what the attempt itself has left. Imports no torch, and
reads
only the end of metrics.jsonl. Units: steps, seconds; `_unix_s` is the time of day.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint.format.manifest import committed
from record import records

# Events of rank 0 that say how its attempt ended, and the cause that they stand for.
ENDINGS = {
    "finished": "finished",
    "stopped": "stopped",
    "interrupted": "stopped",
    "preempted": "preempted",
    "rewound": "rewound",
    "gave_up": "gave_up",
    "failed": "failed",
}


@dataclass(frozen=True)
class Mark:
    """How far a run has come: the newest step on record and the newest checkpoint."""

    segment: int
    step: int
    saved_step: int
    attempt: int | None = None  # that put the step on record


@dataclass(frozen=True)
class Ended:
    """How all ranks ended, as their launcher saw it. `rank` on `host` was first to fail."""

    cause: str
    status: int
    began_unix_s: float
    ended_unix_s: float
    restart_s: float = 0.0  # from the end of the attempt before
    detect_s: float = 0.0  # from the first failure to the end of all ranks
    rank: int | None = None
    host: str | None = None
    phase: str | None = None  # of that rank, when it was last heard
    why: str | None = None  # it hung


def mark(folder: Path) -> Mark:
    """How far the run in `folder` has come; zeros where there is nothing yet."""
    (line,) = records.last_lines(folder / records.METRICS) or [{}]
    saved = committed(folder / "checkpoints")
    return Mark(
        line.get("segment", 0),
        line.get("step", 0),
        saved[-1][0] if saved else 0,
        line.get("attempt"),
    )


def next_number(folder: Path) -> int:
    """Number of the attempt that begins now, from 1; no line of a step is of a later one."""
    newest = records.last_lines(folder / records.METRICS, 1, ("attempt",))
    return 1 + max((line["attempt"] for line in [*records.read_events(folder), *newest]), default=0)


def close(folder: Path, launch: str, ended: Ended, is_ours: bool) -> dict[str, Any] | None:
    """Write the line of the attempt that `launch` started; returns it.

    An attempt that ended before rank 0 had a record gets a line, too, unless it was refused or had
    nothing to do. Without `is_ours` only an attempt that did begin is written down: the folder may
    be
    another start's.
    """
    if not (folder / records.EVENTS).is_file():
        return None
    events = records.read_events(folder)
    began = next((e for e in events if e["kind"] == "began" and e.get("launch") == launch), None)
    if began is None and (not is_ours or ended.cause in ("refused", "finished", "stopped")):
        return None
    attempt = began["attempt"] if began else next_number(folder)
    own = [event for event in events if event["attempt"] == attempt]
    if ended.cause == "finished" and any(event["kind"] == "stopped" for event in own):
        ended = replace(ended, cause="stopped")
    if ended.cause == "refused" and began:  # nobody refused it: it ended for good by itself
        ended = replace(ended, cause="gave_up")
    fields = vars(ended) | steps_of(folder, began, own)
    fields["seconds"] = seconds_of(ended, began, own)
    del fields["restart_s"], fields["detect_s"]
    records.repair(folder / records.EVENTS, lambda text: None)
    records.record_event(folder, "attempt", attempt=attempt, **fields)
    return {"attempt": attempt, **fields}


def steps_of(folder: Path, began: Mapping | None, own: list[dict[str, Any]]) -> dict[str, Any]:
    """Where an attempt went on from, how far it came and what it could save."""
    now = mark(folder)
    first = began["after_step"] if began else None
    is_stepped = began is not None and now.attempt == began["attempt"]
    saved = [event["step"] for event in own if event["kind"] == "saved"]
    return {
        "from_step": first,
        "last_step": now.step if is_stepped else first,
        "saved_step": max([now.saved_step, *saved]) or None,
    }


def seconds_of(ended: Ended, began: Mapping | None, own: list[dict[str, Any]]) -> dict[str, float]:
    """Parts of an attempt that are no training; they do not overlap.

    restart: from the attempt before; start: imports, checks, joining, the engine; load: the
    checkpoint; first_step; detect: from the first failure to the end of the last rank.
    """
    found = {"restart": ended.restart_s, "detect": ended.detect_s}
    if began:
        load_s = sum(event.get("load_s", 0) for event in own if event["kind"] == "resumed")
        found["load"] = load_s
        found["start"] = max(0.0, unix_s(began) - ended.began_unix_s - load_s)
        stepped = [unix_s(event) for event in own if event["kind"] == "first_step"]
        if stepped:
            found["first_step"] = max(0.0, stepped[0] - unix_s(began))
    else:
        found["start"] = max(0.0, ended.ended_unix_s - ended.began_unix_s - ended.detect_s)
    return {name: round(value, 3) for name, value in found.items()}


def complete(folder: Path) -> None:
    """Write the line of each attempt that began and has none; its launcher is gone. Only for the
    writer of the run."""
    events = records.read_events(folder)
    written = {event["attempt"] for event in events if event["kind"] == "attempt"}
    for began in [e for e in events if e["kind"] == "began" and e["attempt"] not in written]:
        own = [event for event in events if event["attempt"] == began["attempt"]]
        endings = [ENDINGS[event["kind"]] for event in own if event["kind"] in ENDINGS]
        last = max([unix_s(own[-1]), _modified(folder, began["attempt"])])
        first_s = min(began.get("started_unix_s", last), unix_s(began))
        ended = Ended(endings[-1] if endings else "killed", None, first_s, last)
        fields = vars(ended) | steps_of(folder, began, own)
        del fields["restart_s"], fields["detect_s"]
        fields["seconds"] = seconds_of(ended, began, own)
        records.record_event(
            folder, "attempt", attempt=began["attempt"], written_later=True, **fields
        )


def process_began_unix_s() -> float:
    """When this process was started; now where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return round(time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK"), 3)


def unix_s(event: Mapping[str, Any]) -> float:
    """The time of an event."""
    return datetime.datetime.fromisoformat(event["time"]).timestamp()


def _modified(folder: Path, attempt: int) -> float:
    """When the last step of an attempt was written, if that is still the newest; else 0."""
    path = folder / records.METRICS
    return path.stat().st_mtime if mark(folder).attempt == attempt else 0.0
