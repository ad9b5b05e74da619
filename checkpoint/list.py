"""`python -m checkpoint.list RUN`: the checkpoints of a run - step, size, age, layout, condition.

RUN is a run folder or the name of one under runs/. Looks at manifests and sizes;
`checkpoint.verify` reads the bytes. Exit code 0, 1 when one is damaged, 2 when there is no such
run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from checkpoint.blocks import Damaged
from checkpoint.choose import verify
from checkpoint.manifest import NAME, committed, read_manifest


def run_folder(name: str) -> Path | None:
    """The folder of a run given by path or by name."""
    for path in (Path(name), Path("runs") / name):
        if (path / "checkpoints").is_dir():
            return path
    return None


def row(step: int, folder: Path) -> tuple[list[str], list[str]]:
    """(cells of one line, problems)."""
    problems = verify(folder, "sizes")
    try:
        manifest = read_manifest(folder)
        size, ranks = f"{manifest.num_bytes / 2**20:.1f} MiB", str(manifest.world)
        layout = manifest.state.get("layout") or {}
        axes = [f"{key} {layout[key]}" for key in ("pipeline", "data", "context", "tensor", "stage")
                if key in layout]  # fmt: skip
        age = f"{(time.time() - (folder / NAME).stat().st_mtime) / 3600:.1f} h"
    except (Damaged, OSError):
        size = ranks = age = "?"
        axes = []
    condition = "damaged" if problems else "whole"
    return [str(step), size, ranks, age, condition, ", ".join(axes)], problems


def table(rows: list[list[str]]) -> str:
    """Columns aligned, the last one left open."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(c.rjust(w) for c, w in zip(cells, widths, strict=False)), cells[-1]]).rstrip()
        for cells in rows
    )


def main(arguments: list[str]) -> int:
    """Print the table; exit code."""
    parser = argparse.ArgumentParser(prog="checkpoint.list", description="checkpoints of a run")
    parser.add_argument("run", help="run folder, or its name under runs/")
    name = parser.parse_args(arguments).run
    run = run_folder(name)
    if run is None:
        print(f"{name}: no run with checkpoints here or under runs/", file=sys.stderr)
        return 2
    rows, problems = [["step", "size", "ranks", "age", "condition", "layout"]], []
    for step, folder in committed(run / "checkpoints"):
        cells, found = row(step, folder)
        rows.append(cells)
        problems += found
    print(table(rows))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
