"""The attempts of a run in events.jsonl: each start of all ranks leaves one line when it is over.

    began        rank 0, as soon as its record is open
    first_step   rank 0, when the first step of the attempt is on record
    attempt      the launcher, when all ranks have ended: cause, rank, host, steps, seconds

Rule: every attempt has one `attempt` line. Where no launcher is left to write it (torchrun, or a
launcher that was killed), the next start writes it from what the attempt left on disk. Imports no
torch, and reads only the end of metrics.jsonl. Units: seconds, steps; `_unix_s` is the time of day.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from base.run_variables import LAUNCH
from checkpoint.format.manifest import committed
from record import records
from record.failure import Failure

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
# Causes that count as a failure of the run, not as an end that somebody asked for.
FAILURES = ("killed", "hung", "lost_host", "out_of_memory", "failed")
# Fields of Attempt in its line of events.jsonl; `attempt`, `seconds` and the steps stand beside.
WRITTEN = (
    "cause", "status", "began_unix_s", "ended_unix_s", "rank", "host", "phase", "why", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a run has come: its newest step on record and its newest checkpoint."""

    segment: int = 0
    step: int = 0
    saved_step: int = 0
    attempt: int | None = None  # the attempt that trained the newest step


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended: `status` as Popen gives it (negative = signal), `after_s` on one clock.

    `was_stopped` = a signal of the launcher ended it; `is_lost` = its host did not report an end;
    `is_oom` = the kernel killed it because memory ran out. `last` = the end of its error output.
    `phase` and `step` = its last sign of life. `hung` = why the watchdog killed it, after
    `silent_s` without a sign of life, and `stack` = its innermost frames; `only_waits` = it may
    have waited for another host.
    """

    rank: int
    status: int
    after_s: float
    host: str = ""
    was_stopped: bool = False
    is_lost: bool = False
    is_oom: bool = False
    last: tuple[str, ...] = ()
    log: str | None = None
    phase: str | None = None
    step: int | None = None
    hung: str | None = None
    silent_s: float = 0.0
    stack: tuple[str, ...] = ()
    only_waits: bool = False
    error: dict[str, Any] | None = None  # the fields of its Failure


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: from the start of its processes to the end of the last one.

    The launcher fills the first three groups, `close` adds the fourth, `record.goodput` reads all
    of them back and adds the last. A field that is not known is None.
    """

    began_unix_s: float
    ended_unix_s: float
    ends: tuple[RankEnd, ...] = ()
    # How it ended. `rank` on `host` failed first, in `phase`; `why` is the reason as text, and
    # `error` has the fields of its exception (record.failure).
    cause: str | None = None  # None = it goes on
    status: int | None = None
    rank: int | None = None
    host: str | None = None
    phase: str | None = None
    why: str | None = None
    error: Mapping[str, Any] | None = None
    # Time without training that only the launcher can measure.
    restart_s: float = 0.0  # from the end of the attempt before
    detect_s: float = 0.0  # from the first failure to the end of all ranks
    # What it left on record.
    number: int | None = None  # None = it has no line
    from_step: int | None = None  # None = it ended before rank 0 had opened the record
    last_step: int | None = None
    saved_step: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    progress: Progress = Progress()  # of the whole run, when the attempt was over
    # The lines of its steps, and the seconds for which training waited at each save.
    lines: Sequence[Mapping[str, Any]] = ()
    stalls_s: Sequence[float] = ()

    @property
    def has_begun(self) -> bool:
        """Whether rank 0 came as far as opening the record."""
        return self.from_step is not None

    @property
    def is_failure(self) -> bool:
        """Whether something broke."""
        return self.cause in FAILURES

    @property
    def num_steps(self) -> int:
        """Steps that it trained, also those that a later attempt trained again."""
        return (self.last_step or 0) - (self.from_step or 0)

    def written(self) -> dict[str, Any]:
        """Its fields as they stand in its line of events.jsonl."""
        fields = {name: getattr(self, name) for name in WRITTEN}
        steps = {name: getattr(self, name) for name in ("from_step", "last_step", "saved_step")}
        return fields | steps | {"seconds": dict(self.seconds)}


def progress_of(folder: Path) -> Progress:
    """How far the run in `folder` has come; zeros where there is nothing yet."""
    (line,) = records.last_lines(folder / records.METRICS) or [{}]
    saved = committed(folder / "checkpoints")
    return Progress(
        line.get("segment", 0),
        line.get("step", 0),
        saved[-1][0] if saved else 0,
        line.get("attempt"),
    )


def next_number(folder: Path) -> int:
    """Number of the attempt that begins now, from 1; no line of a step has a later one."""
    newest = records.last_lines(folder / records.METRICS, 1, ("attempt",))
    return 1 + max((line["attempt"] for line in [*records.read_events(folder), *newest]), default=0)


def close(folder: Path, launch: str, attempt: Attempt, is_ours: bool) -> Attempt:
    """Write the line of the attempt that `launch` started; returns the attempt with its number.

    An attempt that ended before rank 0 had a record gets a line, too, unless it was refused or had
    nothing to do. Without `is_ours` only an attempt that did begin gets a line, because the folder
    may belong to another start. Where no line is written, `number` stays None.
    """
    if not (folder / records.EVENTS).is_file():
        return attempt
    events = records.read_events(folder)
    began = next((e for e in events if e["kind"] == "began" and e.get("launch") == launch), None)
    if began is None and (not is_ours or attempt.cause in ("refused", "finished", "stopped")):
        return attempt
    number = began["attempt"] if began else next_number(folder)
    own = [event for event in events if event["attempt"] == number]
    if attempt.cause == "finished" and any(event["kind"] == "stopped" for event in own):
        attempt = replace(attempt, cause="stopped")
    if attempt.cause == "refused" and began:  # nobody refused it: it ended for good by itself
        attempt = replace(attempt, cause="gave_up")
    attempt = _completed(folder, replace(attempt, number=number), began, own)
    records.repair(folder / records.EVENTS, lambda text: None)
    records.record_event(folder, "attempt", attempt=number, **attempt.written())
    return attempt


def complete(folder: Path) -> None:
    """Write the line of each attempt that began and has none, because its launcher is gone.

    Only the writer of the run may call this.
    """
    events = records.read_events(folder)
    written = {event["attempt"] for event in events if event["kind"] == "attempt"}
    for began in [e for e in events if e["kind"] == "began" and e["attempt"] not in written]:
        number = began["attempt"]
        own = [event for event in events if event["attempt"] == number]
        endings = [ENDINGS[event["kind"]] for event in own if event["kind"] in ENDINGS]
        last = max([unix_s(own[-1]), _modified(folder, number)])
        first_s = min(began.get("started_unix_s", last), unix_s(began))
        cause = endings[-1] if endings else "killed"
        attempt = Attempt(first_s, last, cause=cause, number=number)
        errors = [event["error"] for event in own if event.get("error")]
        if errors and cause in ("failed", "gave_up"):
            attempt = with_failure(attempt, Failure.from_dict(errors[-1]))
        attempt = _completed(folder, attempt, began, own)
        records.record_event(
            folder, "attempt", attempt=number, written_later=True, **attempt.written()
        )


def record_nothing_left(folder: Path, step: int, world: int) -> None:
    """Record an attempt that found nothing to train, because `step` is saved and the last one.

    Without it the record would end with the attempt before, which may have been killed between its
    last save and its end. Nothing is written where that attempt ended well. Only the writer of the
    run may call this.
    """
    complete(folder)
    ends = [event for event in records.read_events(folder) if is_end(event)]
    if ends and ends[-1]["cause"] in ("finished", "stopped"):
        return
    number = next_number(folder)
    launch = {"launch": os.environ[LAUNCH]} if LAUNCH in os.environ else {}
    began_s = process_began_unix_s()
    records.record_event(
        folder, "began", attempt=number, after_step=step, world=world, started_unix_s=began_s,
        **launch,
    )  # fmt: skip
    records.record_event(folder, "finished", attempt=number, step=step, is_saved=True)
    if not launch:  # no launcher waits to write the attempt's line
        complete(folder)


def _completed(
    folder: Path, attempt: Attempt, began: Mapping | None, own: list[dict[str, Any]]
) -> Attempt:
    """The attempt with its steps and seconds, from its own events."""
    now = progress_of(folder)
    first = began["after_step"] if began else None
    is_stepped = began is not None and now.attempt == began["attempt"]
    saved = [event["step"] for event in own if event["kind"] == "saved"]
    return replace(
        attempt,
        from_step=first,
        last_step=now.step if is_stepped else first,
        saved_step=max([now.saved_step, *saved]) or None,
        seconds=seconds_of(attempt, began, own),
        progress=now,
    )


def seconds_of(
    attempt: Attempt, began: Mapping | None, own: list[dict[str, Any]]
) -> dict[str, float]:
    """Parts of an attempt that are no training; they do not overlap.

    restart: from the attempt before; start: imports, checks, joining, the engine; load: the
    checkpoint; first_step; detect: from the first failure to the end of the last rank.
    """
    found = {"restart": attempt.restart_s, "detect": attempt.detect_s}
    if began:
        load_s = sum(event.get("load_s", 0) for event in own if event["kind"] == "resumed")
        found["load"] = load_s
        found["start"] = max(0.0, unix_s(began) - attempt.began_unix_s - load_s)
        stepped = [unix_s(event) for event in own if event["kind"] == "first_step"]
        if stepped:
            found["first_step"] = max(0.0, stepped[0] - unix_s(began))
    else:
        found["start"] = max(0.0, attempt.ended_unix_s - attempt.began_unix_s - attempt.detect_s)
    return {name: round(value, 3) for name, value in found.items()}


def with_failure(attempt: Attempt, failure: Failure | None) -> Attempt:
    """The attempt with the exception that ended it: in `error`, and as text in `why`."""
    if failure is None:
        return attempt
    return replace(
        attempt,
        phase=failure.phase or attempt.phase,
        why=attempt.why or str(failure),
        error=asdict(failure),
    )


def is_end(event: Mapping[str, Any]) -> bool:
    """Whether an event is the line of an attempt that is over.

    Runs of older versions wrote `attempt` when an attempt began, without a cause.
    """
    return event["kind"] == "attempt" and "cause" in event


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
    return path.stat().st_mtime if progress_of(folder).attempt == attempt else 0.0
