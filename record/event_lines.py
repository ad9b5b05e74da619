"""One event of events.jsonl as one line for a person.

Rule: every event is shown, also one of a kind that this file does not know. Times are UTC, as in
the file. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from base.units import duration
from base.values import counted
from record.failure import Failure

COMMON = ("time", "kind", "attempt", "segment", "launch")  # shown before, or useless to a person


def line_of(event: Mapping[str, Any]) -> str:
    """One event as a line: time, attempt and segment, kind, text."""
    when = f"{event['time'][:10]} {event['time'][11:19]}"
    text = TEXTS.get(event["kind"], plain_text)(event)
    segment = f".{event['segment']}" if event.get("segment") else ""
    return f"{when}  attempt {event['attempt']}{segment:<3} {event['kind']:<12} {text}".rstrip()


def plain_text(event: Mapping[str, Any]) -> str:
    """The text of an event; where it has none, its fields as `name value` without empty ones."""
    if event.get("text"):  # its fields repeat the text, for programs
        return event["text"] + (f" (step {event['step']})" if event.get("step") else "")
    known = {name: value for name, value in event.items() if name not in COMMON}
    return ", ".join(
        f"{name} {plain(value)}" for name, value in known.items() if value not in (None, {}, [])
    )


def plain(value: Any) -> str:
    """A value in short form: four digits, lists in brackets."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def began_text(event: Mapping[str, Any]) -> str:
    """Text of an attempt that begins."""
    where = f"after step {event['after_step']}" if event.get("after_step") else "from the start"
    return f"{where}, {counted(event['world'], 'rank') if 'world' in event else '? ranks'}"


def saved_text(event: Mapping[str, Any]) -> str:
    """Text of a save."""
    size_mib = event["checkpoint_gib"] * 1024
    size = f"{size_mib:,.1f} MiB" if size_mib < 1024 else f"{event['checkpoint_gib']:,.2f} GiB"
    return (
        f"step {event['step']}, {size} in {event['checkpoint_s']:.2f} s, training waited"
        f" {event['checkpoint_stall_s']:.2f} s"
    )


def attempt_text(event: Mapping[str, Any]) -> str:
    """Text of an attempt that is over."""
    if "cause" not in event:
        return began_text(event)
    who = "" if event.get("rank") is None else f", rank {event['rank']}"
    who += f" of {event['host']}" if event.get("host") else ""
    steps = ""
    if event.get("last_step") is not None:
        steps = f"; steps {(event.get('from_step') or 0) + 1} to {event['last_step']}"
    saved = f", saved {event['saved_step']}" if event.get("saved_step") else ", nothing saved"
    lasted = duration(event["ended_unix_s"] - event["began_unix_s"])
    parts = ", ".join(f"{name} {value:.1f}" for name, value in event["seconds"].items() if value)
    why = f": {event['why']}" if event.get("why") else ""
    return f"{event['cause']}{who}{why}{steps}{saved}; {lasted}" + (
        f" ({parts} s)" if parts else ""
    )


def failure_text(event: Mapping[str, Any]) -> str:
    """Text of an attempt that failed: its number, rank, phase and step, and the reason."""
    who = "" if event.get("rank") is None else f", rank {event['rank']}"
    who += f" of {event['host']}" if event.get("host") else ""
    phase = f" in phase {event['phase']}" if event.get("phase") else ""
    error = event.get("error") or {}
    step = f" of step {error['step']}" if error.get("step") else ""
    return f"attempt {event['attempt']}{who}{phase}{step}: {event['why']}"


def exception_text(event: Mapping[str, Any]) -> str:
    """Text of an attempt that ended by an exception of rank 0."""
    failure = Failure.from_dict(event.get("error"))
    if failure is None:
        return plain_text(event)
    phase = f"in phase {failure.phase}" if failure.phase else ""
    step = f" of step {failure.step}: " if failure.step else ": " if phase else ""
    return f"{phase}{step}{failure}"


def end_text(event: Mapping[str, Any]) -> str:
    """Text of a regular end: finished, stopped, preempted or interrupted."""
    known = dict(event)
    is_saved, peaks_gib = known.pop("is_saved", None), known.pop("peak_memory_gib", None) or []
    text = [plain_text(known), {True: "saved", False: "not saved", None: ""}[is_saved]]
    most = max((peak for peak in peaks_gib if peak is not None), default=None)
    text += [f"at most {most:.2f} GiB a rank"] if most is not None else []
    return ", ".join(filter(None, text))


TEXTS = {"began": began_text, "saved": saved_text, "attempt": attempt_text} | dict.fromkeys(
    ("finished", "stopped", "preempted", "interrupted"), end_text
)
TEXTS["failed"] = exception_text
