"""`make history`: the lineage of a run as a tree: segments, where each parts from the one before,
what was left out and changed, branches.

    tiny: 2 segments, now in segment 1
    segment 0            steps 1 to 105; steps 81 to 105 abandoned
      segment 1          from step 80: steps 81 to 200  loss spike (operator, 2026-11-30T00:10:00Z)
        left out         data steps 85 to 89 from step 81 on: loss spike (operator, ...)
        branch tiny-b    at step 120

The one rule: it prints what history.jsonl and the ledger say and decides nothing. Units: steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FINISHED
from base.paths import ROOT
from base.values import counted
from checkpoint.lineage import MARK, Line, lineage, read, run_folder, segments
from data.stream.ledger import STEPS_FILE, read_ledger
from record.history import described, reason
from record.records import notes

INDENT = 2


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.history RUN`; returns the exit status."""
    parser = Parser(prog="make history", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    try:
        folder = run_folder(parser.parse_args(arguments).run, ROOT)
        print("\n".join([*tree(folder), *notes(folder)]))
    except UserError as error:
        return refuse(error)
    return FINISHED


def tree(folder: Path) -> list[str]:
    """The lines for a person. Raises UserError where the run has no history."""
    lines = read(folder)
    opened = segments(lines)
    if not opened:
        raise UserError(f"{folder.name}: it has recorded no step yet")
    reached = reached_steps(folder)
    current = lineage(lines)
    several = counted(len(opened), "segment")
    rows = [f"{folder.name}: {several}, now in segment {current.segment}"]
    return rows + grown(folder, lines, 0, reached, 0)


def reached_steps(folder: Path) -> dict[int, tuple[int, int]]:
    """First and last step that the ledger has of each segment."""
    found: dict[int, tuple[int, int]] = {}
    if (folder / "ledger" / STEPS_FILE).is_file():
        for line in read_ledger(folder / "ledger"):
            low, high = found.get(line["segment"], (line["step"], line["step"]))
            found[line["segment"]] = min(low, line["step"]), max(high, line["step"])
    return found


def grown(folder: Path, lines: Sequence[Line], number: int, reached: dict, depth: int) -> list[str]:
    """A segment, what happened in it, and the segments that part from it, deeper."""
    opened = segments(lines)
    line, pad = opened[number], " " * (INDENT * depth)
    inner = pad + " " * INDENT
    rows = [f"{pad}segment {number}{origin(line)}: {extent(lines, number, reached)}{reason(line)}"]
    for skip in line.get("skips", ()):
        is_told = skip.get("since") == line.get("since")  # its reason is the segment's
        rows.append(f"{inner}left out: {described(skip, not is_told)}")
    events = [*changes(lines, number), *branches(folder, lines, number)]
    rows += [f"{inner}{text}" for _, text in sorted(events)]
    for child in opened:
        if child["parent"] is not None and child["parent"]["segment"] == number:
            rows += grown(folder, lines, child["segment"], reached, depth + 1)
    return rows


def origin(line: Line) -> str:
    """Where a segment begins."""
    if line["parent"] is None:
        return f" (weights from {line['init_from']})" if line.get("init_from") else ""
    run = f" of run {line['parent']['run']}" if "run" in line["parent"] else ""
    return f" from step {line['parent']['step']}{run}"


def extent(lines: Sequence[Line], number: int, reached: dict) -> str:
    """The steps that a segment has on record, and which of them belong to the run no more."""
    if number not in reached:
        return "no step on record here"
    first, last = reached[number]
    current = lineage(lines)
    ours = [step for step in range(first, last + 1) if current.holds(number, step)]
    text = f"steps {first} to {last}"
    if len(ours) == last - first + 1:
        return text
    return f"{text}, abandoned{f' from {ours[-1] + 1} on' if ours else ''}"


def changes(lines: Sequence[Line], number: int) -> list[tuple[int, str]]:
    """Deliberate changes in a segment, by the step from which they hold."""
    return [
        (
            line["first_step"],
            f"changed from step {line['first_step']} on: {line['key']}"
            f" {json.dumps(line['stored'])} -> {json.dumps(line['now'])}",
        )
        for line in lines
        if line["kind"] == "override" and line.get("segment", 0) == number
    ]


def branches(folder: Path, lines: Sequence[Line], number: int) -> list[tuple[int, str]]:
    """Runs that went on from a step of a segment, each once."""
    found = {}
    for line in lines:
        if line["kind"] == "branch" and line["segment"] == number:
            gone = "" if (folder.parent / line["to"] / MARK).is_file() else " (not there any more)"
            text = f"branch {line['to']} from step {line['step']}{gone}{reason(line)}"
            found[line["to"]] = line["step"], text
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
