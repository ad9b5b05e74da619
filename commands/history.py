"""`make history`: prints the lineage of a run as a tree.

It shows the segments, the step where each one begins, what was left out or changed, and branches.

    tiny: 2 segments, now in segment 1
    segment 0            steps 1 to 105; steps 81 to 105 abandoned
      segment 1          from step 80: steps 81 to 200  loss spike (operator, 2026-11-30T00:10:00Z)
        left out         data steps 85 to 89 from step 81 on: loss spike (operator, ...)
        branch tiny-b    at step 120

It prints what history.jsonl and the ledger contain, and decides nothing. Units: steps.
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
    """Return the lines to print. Raises UserError where the run has no history."""
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
    """Return the first and last step that the ledger has of each segment."""
    found: dict[int, tuple[int, int]] = {}
    if (folder / "ledger" / STEPS_FILE).is_file():
        for line in read_ledger(folder / "ledger"):
            low, high = found.get(line["segment"], (line["step"], line["step"]))
            found[line["segment"]] = min(low, line["step"]), max(high, line["step"])
    return found


def grown(folder: Path, lines: Sequence[Line], number: int, reached: dict, depth: int) -> list[str]:
    """Return the lines of a segment, of its events, and of the segments that begin in it,
    indented.
    """
    opened = segments(lines)
    line, pad = opened[number], " " * (INDENT * depth)
    inner = pad + " " * INDENT
    rows = [f"{pad}segment {number}{origin(line)}: {extent(lines, number, reached)}{reason(line)}"]
    for skip in line.get("skips", ()):
        is_same = skip.get("since") == line.get("since")  # the segment's line has its reason
        rows.append(f"{inner}left out: {described(skip, not is_same)}")
    events = [*changes(lines, number), *branches(folder, lines, number)]
    rows += [f"{inner}{text}" for _, text in sorted(events)]
    for child in opened:
        if child["parent"] is not None and child["parent"]["segment"] == number:
            rows += grown(folder, lines, child["segment"], reached, depth + 1)
    return rows


def origin(line: Line) -> str:
    """Describe where a segment begins."""
    if line["parent"] is None:
        return f" (weights from {line['init_from']})" if line.get("init_from") else ""
    run = f" of run {line['parent']['run']}" if "run" in line["parent"] else ""
    return f" from step {line['parent']['step']}{run}"


def extent(lines: Sequence[Line], number: int, reached: dict) -> str:
    """Describe the steps that a segment has on record, and which of them are abandoned."""
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
    """List (first step, text) of deliberate changes in a segment."""
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
    """List (step, text) of runs that went on from a step of a segment, each once."""
    found = {}
    for line in lines:
        if line["kind"] == "branch" and line["segment"] == number:
            gone = "" if (folder.parent / line["to"] / MARK).is_file() else " (not there any more)"
            text = f"branch {line['to']} from step {line['step']}{gone}{reason(line)}"
            found[line["to"]] = line["step"], text
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
