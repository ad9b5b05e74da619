"""`make checkpoints RUN=`: lists the checkpoints of a run, one per line.

    step  segment  size  ranks  age  verified  val loss  skipped  tags             layout

It looks at manifests and sizes only; `make verify` reads the bytes. `verified` says how much was
read back at the save. `val loss` is the newest one since the save before, with its step where that
is another one; `skipped` is how many steps did not move the weights since then. Tags: best (lowest
validation loss of those with nothing skipped), permanent (`checkpoint.keep_every`), abandoned (the
run was rewound to before it). Exit status 0, 1 when one is damaged, 93 when there is no such run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from base.units import MIB
from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import NAME, all_committed, read_manifest, run_with_checkpoints
from checkpoint.lineage import lineage_of
from checkpoint.load.choosing import verify
from checkpoint.save.retention import best

AXES = ("pipeline", "data", "context", "tensor", "stage")
HEAD = ["step", "segment", "size", "ranks", "age", "verified", "val loss", "skipped", "tags",
        "layout"]  # fmt: skip


def row(
    step: int, segment: int, folder: Path, tags: list[str]
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return (cells of one line, problems, state of the run)."""
    problems = verify(folder, "sizes")
    try:
        manifest = read_manifest(folder)
        age = f"{(time.time() - (folder / NAME).stat().st_mtime) / 3600:.1f} h"
    except (Damaged, OSError, UserError):  # also for one that another version wrote
        cells = [str(step), str(segment), "?", "?", "?", "damaged", "?", "?", " ".join(tags), ""]
        return cells, problems, {}
    state = manifest.state
    layout, health = state.get("layout") or {}, state.get("health") or {}
    knobs = (state.get("recipe") or {}).get("checkpoint") or {}
    every = knobs.get("keep_every") or 0
    if every and step % every == 0:
        tags = ["permanent", *tags]
    loss, skipped = health.get("val_loss"), health.get("skipped_since_save")
    val_step = health.get("val_step")
    measured_at = "" if val_step in (None, step) else f" (step {val_step})"
    cells = [
        str(step),
        str(segment),
        f"{manifest.num_bytes / MIB:.1f} MiB",
        str(manifest.world),
        age,
        "damaged" if problems else knobs.get("verify", "?"),
        "-" if loss is None else f"{loss:.4f}{measured_at}",
        "-" if skipped is None else str(skipped),
        " ".join(tags) or "-",
        ", ".join(f"{key} {layout[key]}" for key in AXES if key in layout),
    ]
    return cells, problems, state


def table(rows: list[list[str]]) -> str:
    """Align the columns to the right, except the last one, which has any width."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(c.rjust(w) for c, w in zip(cells, widths, strict=False)), cells[-1]]).rstrip()
        for cells in rows
    )


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit status."""
    parser = Parser(prog="commands.checkpoints", description="checkpoints of a run")
    parser.add_argument("run", help="run folder, or its name under runs/")
    name = parser.parse_args(arguments).run
    try:
        run = run_with_checkpoints(name)
        current = lineage_of(run)
    except UserError as error:
        return refuse(error)
    rows, states, problems = [], {}, []
    for step, segment, folder in all_committed(run / "checkpoints"):
        is_ours = current.holds(segment, step)
        cells, found, state = row(step, segment, folder, [] if is_ours else ["abandoned"])
        if is_ours and not found:
            states[step] = state
        rows.append(cells)
        problems += found
    healthiest = best(states)
    for cells in rows:
        if cells[0] == str(healthiest) and "abandoned" not in cells[8]:
            cells[8] = "best" if cells[8] == "-" else f"best {cells[8]}"
    print(table([HEAD, *rows]))
    for problem in problems:
        print(problem)
    return FAILED if problems else FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
