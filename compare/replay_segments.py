"""How to train a run again: the replay segments between its starts, rewinds and changes of
conditions.

    recorded   segment 0: steps 1 to 105 on 2 ranks; segment 1 from step 80: 81 to 120 on 2 ranks,
               then 121 to 200 on 4
    replay segments       (0, to 80), (0, to 105), turn back to 80, (1, to 120), (1, to 200 on 4)

The one rule: a replay segment ends where the next one has to begin, so that every place that a
later replay segment goes
on from has a checkpoint. Pure: from what a run folder says to a list. Units: steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from base.errors import UserError
from checkpoint.lineage import Line, lineage, segments


@dataclass(frozen=True)
class ReplaySegment:
    """One start: train `segment` up to `stop` under the conditions of `entry`. `opens` is the line
    of the history that has to stand there before, for the first replay segment of a later segment.
    """

    segment: int  # as recorded
    after: int
    stop: int
    entry: dict[str, Any] = field(repr=False)
    opens: Line | None = None


def plan(
    lines: Sequence[Line], entries: Sequence[dict[str, Any]], reached: dict[int, int]
) -> tuple[list[ReplaySegment], dict[int, int]]:
    """The replay segments, and the numbers that the segments get: recorded -> new.

    `entries` are the conditions of the run's starts (environment.json), `reached` the last recorded
    step of each segment. Segments that recorded nothing and that nothing goes on from are left out.
    Raises UserError where the record does not say enough.
    """
    opened = segments(lines)
    wanted = {span.segment for number in reached for span in lineage(lines, number).spans}
    if not wanted:
        raise UserError("the run has recorded no step")
    numbers = {old: new for new, old in enumerate(sorted(wanted))}
    replay_segments = []
    for old in sorted(wanted):
        line = opened[old]
        opens = renumbered(line, numbers) if line["parent"] is not None else None
        stops = {
            one["parent"]["step"]
            for one in (opened[number] for number in wanted)
            if one["parent"] is not None and one["parent"]["segment"] == old
        }
        own = of_segment(entries, old)
        replay_segments += between(old, line["first_step"] - 1, reached.get(old), stops, own, opens)
    return replay_segments, numbers


def between(
    segment: int,
    after: int,
    last: int | None,
    stops: set[int],
    entries: Sequence[dict[str, Any]],
    opens: Line | None,
) -> list[ReplaySegment]:
    """The replay segments of one segment: cut at `stops` and where conditions changed."""
    if last is None:
        raise UserError(f"segment {segment} has recorded no step, but a later one goes on from it")
    if not entries or entries[0]["after_step"] > after:
        raise UserError(
            f"environment.json does not say under which conditions segment {segment} began; a"
            " version that did not record this wrote it"
        )
    if max(stops, default=0) > last:
        raise UserError(f"segment {segment}: step {max(stops)} is not on record")
    cuts = {one["after_step"] for one in entries} | stops | {last}
    ends = sorted(cut for cut in cuts if after < cut <= last)
    replay_segments = []
    for begin, end in zip([after, *ends], ends, strict=False):
        entry = [one for one in entries if one["after_step"] <= begin][-1]
        replay_segments.append(
            ReplaySegment(segment, begin, end, entry, opens if begin == after else None)
        )
    return replay_segments


def of_segment(entries: Sequence[dict[str, Any]], segment: int) -> list[dict[str, Any]]:
    """The conditions that recorded steps were trained under: what started again from an earlier
    checkpoint replaces what it trained again.
    """
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if entry.get("segment") == segment:
            kept = [one for one in kept if one["after_step"] < entry["after_step"]] + [entry]
    return kept


def renumbered(line: Line, numbers: dict[int, int]) -> Line:
    """A segment's line under its new number, as part of one run."""
    parent = {"segment": numbers[line["parent"]["segment"]], "step": line["parent"]["step"]}
    return line | {"segment": numbers[line["segment"]], "parent": parent}
