"""Plans how to train a recorded run again, as a list of replay segments.

A replay segment is one start of the copy. It ends at a start, a rewind or a change of conditions
(ranks, code, recipe) of the recorded run.

    recorded          segment 0: steps 1 to 105 on 2 ranks
                      segment 1, rewound to step 80: steps 81 to 120 on 2 ranks, 121 to 200 on 4
    replay segments   (0, to 80), (0, to 105), rewind to 80, (1, to 120), (1, to 200 on 4 ranks)

Rule: every step from which a later replay segment continues is the end of an earlier one, because
only the end of a replay segment has a checkpoint. Pure functions of the record. Units: steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from base.errors import UserError
from checkpoint.lineage import Line, lineage, segments


@dataclass(frozen=True)
class ReplaySegment:
    """One start of the copy: train `segment` up to step `stop` under the conditions of `entry`.

    `opens` is the line of the history that opens the segment (a rewind). It is set for the first
    replay segment of each later segment and has to be written before the start.
    """

    segment: int  # number in the recorded run
    after: int
    stop: int
    entry: dict[str, Any] = field(repr=False)
    opens: Line | None = None


def plan(
    lines: Sequence[Line], entries: Sequence[dict[str, Any]], reached: dict[int, int]
) -> tuple[list[ReplaySegment], dict[int, int]]:
    """Return the replay segments, and a map from recorded segment numbers to those of the copy.

    `entries` are the conditions of the run's starts (environment.json), `reached` is the last
    recorded step of each segment. A segment without a recorded step is left out unless another
    segment continues from it. Raises UserError where the record is not complete enough.
    """
    opened = segments(lines)
    wanted = {span.segment for number in reached for span in lineage(lines, number).spans}
    if not wanted:
        raise UserError("the run has recorded no step")
    numbers = {old: new for new, old in enumerate(sorted(wanted))}
    planned = []
    for old in sorted(wanted):
        line = opened[old]
        if "merged" in line:
            raise UserError(
                f"segment {old} begins with an average of checkpoints (make merge), which no"
                " training makes again; reproduce the run that was averaged:"
                f" RUN={line['parent']['run']}"
            )
        opens = renumbered(line, numbers) if line["parent"] is not None else None
        stops = {
            one["parent"]["step"]
            for one in (opened[number] for number in wanted)
            if one["parent"] is not None and one["parent"]["segment"] == old
        }
        own = of_segment(entries, old)
        planned += between(old, line["first_step"] - 1, reached.get(old), stops, own, opens)
    return planned, numbers


def between(
    segment: int,
    after: int,
    last: int | None,
    stops: set[int],
    entries: Sequence[dict[str, Any]],
    opens: Line | None,
) -> list[ReplaySegment]:
    """Return the replay segments of one segment: it is split at `stops` and at new conditions."""
    if last is None:
        raise UserError(f"segment {segment} has recorded no step, but a later one continues it")
    if not entries or entries[0]["after_step"] > after:
        raise UserError(
            f"environment.json does not say under which conditions segment {segment} began; it was"
            " written by a version that did not record this"
        )
    if max(stops, default=0) > last:
        raise UserError(f"segment {segment}: step {max(stops)} is not on record")
    boundaries = {one["after_step"] for one in entries} | stops | {last}
    ends = sorted(step for step in boundaries if after < step <= last)
    planned = []
    for begin, end in zip([after, *ends], ends, strict=False):
        entry = [one for one in entries if one["after_step"] <= begin][-1]
        planned.append(ReplaySegment(segment, begin, end, entry, opens if begin == after else None))
    return planned


def of_segment(entries: Sequence[dict[str, Any]], segment: int) -> list[dict[str, Any]]:
    """Conditions under which the recorded steps of a segment were trained, in order.

    A start from an earlier checkpoint replaces the conditions of the steps that it trained again.
    """
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if entry.get("segment") == segment:
            kept = [one for one in kept if one["after_step"] < entry["after_step"]] + [entry]
    return kept


def renumbered(line: Line, numbers: dict[int, int]) -> Line:
    """Copy of a segment's history line with the segment numbers of the copy."""
    parent = {"segment": numbers[line["parent"]["segment"]], "step": line["parent"]["step"]}
    return line | {"segment": numbers[line["segment"]], "parent": parent}
