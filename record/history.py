"""history.jsonl: the decisions of a run, append-only: segments, skips, overrides, branches.

    {"kind": "segment", "segment": 0, "parent": null, "first_step": 1, "data_step": 0}
    {"kind": "override", "segment": 0, "first_step": 101, "key": "optim.lr", "stored": 3e-4, ...}
    {"kind": "segment", "segment": 1, "parent": {"segment": 0, "step": 80}, "first_step": 81,
     "data_step": 80, "why": "...", "who": "operator", "since": "2026-11-30T00:10:00Z",
     "skips": [{"effect": "advance", "range": [85, 90], "from_step": 81, "why": ..., ...}]}
    {"kind": "branch", "segment": 1, "step": 120, "to": "tiny-b", ...}

Each line ends with a digest of its text, `"digest": "0123456789abcdef"` (base.jsonl).

Rule: a line is never changed or removed; a later line is about later steps. A rewind and its skips
are one line, so that a kill leaves all of it or nothing. Events without a decision (attempts,
alarms, saves) stand in events.jsonl. Units: steps; ranges [first, end) count data steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from base import jsonl
from base.durable import sync_folder
from base.errors import UserError
from base.jsonl import Line, drop_torn_line, encode
from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import committed, read_manifest, size_problems
from checkpoint.format.state import RunState
from checkpoint.lineage import FILE, lineage, read, segments
from checkpoint.load.allowed_changes import ABSENT, RecipeChange
from recipes.schema import Data

EFFECTS = ("advance", "no_update")  # effects of a skip, as in the recipe's data.skip
WHO = ("operator", "policy", "resume")  # resume: the checkpoint a segment went on from is damaged

Range = tuple[int, int]


def begin(folder: Path, init_from: str | None, after_step: int = 0) -> int:
    """The segment in which a start goes on after `after_step`.

    A new run gets its first segment; `init_from` = where its weights came from. Where the
    checkpoint that the current segment began from is damaged, and an older one had to be loaded, a
    new segment is opened from the older one, so that every record has one place in the lineage.
    """
    lines = read(folder)
    if not lines:
        line = {"kind": "segment", "segment": 0, "parent": None, "first_step": 1, "data_step": 0}
        append(folder, line | ({"init_from": init_from} if init_from else {}))
        return 0
    current = lineage(lines)
    if after_step >= current.after:
        return current.segment
    why = f"the checkpoint of step {current.after} is damaged"
    return rewind(folder, after_step, None, why, "resume")["segment"]


def overrides(folder: Path, changes: Iterable[RecipeChange], after_step: int) -> None:
    """Record deliberate changes of knobs that are in force from the step after `after_step`."""
    segment = lineage(read(folder)).segment
    for change in changes:
        append(
            folder,
            {
                "kind": "override",
                "segment": segment,
                "first_step": after_step + 1,
                "key": change.key,
                "stored": change.stored,
                "now": change.now,
                "since": now(),
            },
        )


@dataclass(frozen=True)
class Target:
    """A point that a run can be rewound to: a committed checkpoint, or the run's start."""

    segment: int
    step: int
    data_step: int  # the data step that comes next
    left_out: tuple[Range, ...] = ()  # data steps that the recipe itself skips


def rewind(
    folder: Path,
    step: int,
    skip: Range | Sequence[Range] | None = None,
    why: str = "",
    who: str = "operator",
    *,
    effect: str = "advance",
    segment: int | None = None,
    names: Mapping[Range, str] = {},
) -> Line:
    """Rewind the run to its checkpoint of `step` (0 = its start), and skip data steps after it.

    Returns the line that opens the new segment. `skip` is one range of data steps or several; each
    begins at or after the target. Skips in force that lie ahead of the target stay in force.
    `segment` chooses a checkpoint of an abandoned segment. The next start of the run goes on from
    there. `names` says how messages call a range; without a name it is given in data steps. The
    caller holds the run's lock. Raises UserError with all problems; nothing was written
    then.
    """
    assert who in WHO, who
    assert effect in EFFECTS, effect
    lines = read(folder)
    ranges = listed(skip)
    target = find(folder, lines, step, segment)
    ahead = carried(lines, target)
    others = [*in_force(lines, target.segment, target.step), *ahead]
    problems = range_problems(ranges, target, others, effect, names)
    if problems:
        raise UserError(*problems)
    facts = {"why": why, "who": who, "since": now()}
    new = [{"effect": effect, "range": list(one), "from_step": step + 1, **facts} for one in ranges]
    line = next_segment(lines, target, [*ahead, *new], facts)
    append(folder, line)  # this is the rewind
    return line


def next_segment(
    lines: Sequence[Line], target: Target, skips: Sequence[Line], facts: Line, **origin: str
) -> Line:
    """The line of a segment that goes on from `target`; `origin` names the run it belongs to."""
    return {
        "kind": "segment",
        "segment": len(segments(lines)),
        "parent": {**origin, "segment": target.segment, "step": target.step},
        "first_step": target.step + 1,
        "data_step": target.data_step,
        **facts,
        "skips": list(skips),
    }


def find(folder: Path, lines: Sequence[Line], step: int, segment: int | None) -> Target:
    """The checkpoint of `step` in the current lineage, or in an abandoned `segment`.

    Raises UserError where there is none, or where it is damaged.
    """
    opened = segments(lines)
    if not opened:
        raise UserError(
            f"run={folder.name}: it has recorded no step; there is nothing to go back to"
        )
    if segment is not None and not 0 <= segment < len(opened):
        raise UserError(f"SEGMENT={segment}: {folder.name} has the segments 0 to {len(opened) - 1}")
    chain = lineage(lines, segment)
    if step == 0:
        return Target(chain.spans[0].segment, 0, 0)
    found = committed(folder / "checkpoints", chain)
    there = [path for one, path in found if one == step]
    if not there:
        steps = ", ".join(str(one) for one, _ in found) or "none"
        where = "" if segment is None else f" of segment {segment}"
        raise UserError(
            f"STEP={step}: {folder.name} has no checkpoint{where} of this step; it has: {steps}"
        )
    try:
        manifest = read_manifest(there[-1])
        problems = size_problems(there[-1], manifest)
        if problems:
            raise Damaged(*problems)
        state = RunState.from_dict(manifest.state)
        left_out = tuple((a, b) for a, b in state.recipe["data"]["skip"]["advance"])
        return Target(state.segment, step, state.data["past"]["data_step"], left_out)
    except (Damaged, KeyError, TypeError) as error:
        raise UserError(f"STEP={step}: {there[-1]} is damaged: {error}") from None


def in_force(
    lines: Sequence[Line], segment: int | None = None, last_step: int | None = None
) -> list[Line]:
    """The skips in force in a segment (default: the current one), oldest first.

    With `last_step` only those that were in force by that step.
    """
    opened = segments(lines)
    if not opened:
        return []
    return [
        skip
        for span in lineage(lines, segment).spans
        for skip in opened[span.segment].get("skips", ())
        if last_step is None or skip["from_step"] <= last_step
    ]


def carried(lines: Sequence[Line], target: Target) -> list[Line]:
    """Skips in force now that are younger than the target and lie ahead of it.

    Data that was skipped once stays skipped. The part of a range that the target has trained on
    already is past, and is cut off.
    """
    inherited, ahead = in_force(lines, target.segment, target.step), []
    for skip in in_force(lines):
        first, end = skip["range"]
        if skip not in inherited and end > target.data_step:
            ahead.append(skip | {"range": [max(first, target.data_step), end],
                                 "from_step": target.step + 1})  # fmt: skip
    return ahead


def range_problems(
    ranges: Sequence[Range],
    target: Target,
    others: Sequence[Line],
    effect: str,
    names: Mapping[Range, str] = {},
) -> list[str]:
    """Problems of ranges that are to be skipped after `target`, one line each."""
    problems = []
    known = [tuple(skip["range"]) for skip in others if skip["effect"] in (effect, "advance")]
    known += target.left_out
    for number, (first, end) in enumerate(ranges):
        shown = names.get((first, end), f"SKIP={first}:{end}")
        if not 0 <= first < end:
            problems.append(f"{shown}: a range has 0 <= first < end, end not included")
            continue
        if first < target.data_step:
            problems.append(
                f"{shown} begins in the past of step {target.step}, which has trained on all data"
                f" steps before {target.data_step}; go back further, or begin with step"
                f" {target.step + 1}"
            )
        for other in ranges[:number]:
            if first < other[1] and other[0] < end:
                second = names.get(other, f"SKIP={other[0]}:{other[1]}")
                problems.append(f"{shown} overlaps {second}; join them into one")
        if is_covered((first, end), known):
            problems.append(f"{shown} is left out already; there is nothing more to skip in it")
    return problems


def is_covered(wanted: Range, ranges: Iterable[Range]) -> bool:
    """Whether the union of ranges holds all of `wanted`."""
    reached = wanted[0]
    for first, end in sorted(ranges):
        if first <= reached < end:
            reached = end
    return reached >= wanted[1]


def listed(skip: Range | Sequence[Range] | None) -> list[Range]:
    """No range, one range or several ranges as a list."""
    if skip is None:
        return []
    one_or_more = list(skip)
    if one_or_more and isinstance(one_or_more[0], int):
        one_or_more = [tuple(one_or_more)]
    return [(int(first), int(end)) for first, end in one_or_more]


def data_with_skips(data: Data, skips: Iterable[Line]) -> Data:
    """The data of a recipe with the skips of the history added to the recipe's own."""
    added = {effect: [] for effect in EFFECTS}
    for skip in skips:
        added[skip["effect"]].append(tuple(skip["range"]))
    if not any(added.values()):
        return data
    both = {effect: (*getattr(data.skip, effect), *ranges) for effect, ranges in added.items()}
    return dataclasses.replace(data, skip=dataclasses.replace(data.skip, **both))


def recorded(lines: Sequence[Line], step: int, recipe: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint's recipe (nested) with the overrides recorded after its `step`.

    Only overrides of the current segment count. A start compares with this recipe, because the
    changes were accepted, also where no later checkpoint holds them.
    """
    current = lineage(lines).segment
    changed = json.loads(json.dumps(recipe))
    for line in lines:
        is_ours = line.get("kind") == "override" and line.get("segment", 0) == current
        if is_ours and line["first_step"] > step:
            put(changed, line["key"], line["now"])
    return changed


def describe(lines: Sequence[Line]) -> list[str]:
    """Lines about the current segment and the skips in force; empty for a run without rewinds."""
    opened = segments(lines)
    if not opened:
        return []
    line, found = opened[-1], []
    if line["parent"] is not None:
        parent = line["parent"]
        run = f" of run {parent['run']}" if "run" in parent else ""
        found.append(
            f"segment {line['segment']}: from step {parent['step']} of segment"
            f" {parent['segment']}{run}{reason(line)}"
        )
    return found + [f"left out: {described(skip)}" for skip in in_force(lines)]


def described(skip: Line, with_reason: bool = True) -> str:
    """A skip as text."""
    first, end = skip["range"]
    what = f"data step {first}" if end == first + 1 else f"data steps {first} to {end - 1}"
    counted = " (counted as steps)" if skip["effect"] == "no_update" else ""
    why = reason(skip) if with_reason else ""
    return f"{what}{counted} from step {skip['from_step']} on{why}"


def reason(line: Line) -> str:
    """Reason, author and time of a line, as far as they are known; what was averaged for it."""
    why = f": {line['why']}" if line.get("why") else ""
    if "merged" in line:
        why = f", the average of steps {', '.join(map(str, line['merged']['steps']))}{why}"
    return why + (f" ({line['who']}, {line['since']})" if "who" in line else "")


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted knob in nested values; the value ABSENT removes it."""
    *names, last = key.split(".")
    for name in names:
        values = values.setdefault(name, {})
    if value == ABSENT:
        values.pop(last, None)
    else:
        values[last] = value


def now() -> str:
    """The time now: UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def append(folder: Path, line: Line) -> None:
    """Append one line durably: after a crash it is whole, or it is not there."""
    path = folder / FILE
    drop_torn_line(path)
    with open(path, "ab", buffering=0) as file:
        jsonl.append(file, encode(line))
        os.fsync(file.fileno())
    sync_folder(folder)
