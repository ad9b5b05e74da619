"""Short names for what TensorBoard shows: a folder of links, one for each curve.

    runs/tiny/tensorboard/segment-00             ->  tiny
    runs/tiny/tensorboard/segment-01-after-80    ->  tiny (after rewind to 80)
    runs/tiny-by-lr/tensorboard/optim.lr=0.001   ->  tiny-by-lr: lr=0.001

Rule: each training is shown once. The runs that a comparison made are hidden where the comparison
is shown, because its variants have their curves. A comparison of runs that existed shows only its
report beside them. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

from compare.folder import WHAT
from compare.variants import run_name

FOLDER, REPORT = "tensorboard", "report"
SEGMENT = re.compile(r"segment-(\d+)(?:-after-(\d+))?")


def named(runs: Path, only: str = "") -> dict[str, Path]:
    """Name in TensorBoard -> folder of event files, of all runs in `runs` or of `only` one."""
    if only:
        folder = runs / only
        is_comparison = (folder / WHAT).is_file()
        return variants(folder, prefix="") if is_comparison else segments(folder)
    found: dict[str, Path] = {}
    hidden: list[str] = []
    for folder in sorted(path.parent for path in runs.glob(f"*/{FOLDER}")):
        if (folder / WHAT).is_file():
            made = members(folder)
            curves = variants(folder, prefix=f"{folder.name}: ")
            found |= {name: path for name, path in curves.items()
                      if made is not None or path.name == REPORT}  # fmt: skip
            hidden += made or []
        else:
            found |= segments(folder)
    names = {
        folder.name
        for folder in runs.iterdir()
        if folder.name.startswith(tuple(hidden)) and not (folder / WHAT).is_file()
    }
    return {
        name: path
        for name, path in found.items()
        if not hidden or path.parents[1].name not in names
    }


def segments(folder: Path) -> dict[str, Path]:
    """The segments of a run; the first one has the run's name."""
    found: dict[str, Path] = {}
    paths = [path for path in (folder / FOLDER).iterdir() if SEGMENT.fullmatch(path.name)]
    for path in sorted(paths, key=lambda path: int(SEGMENT.fullmatch(path.name)[1])):
        number, after = SEGMENT.fullmatch(path.name).groups()
        name = f"{folder.name} (after rewind to {after or 0})" if found else folder.name
        found[name if name not in found else f"{name[:-1]}, segment {int(number)})"] = path
    return found


def variants(folder: Path, prefix: str) -> dict[str, Path]:
    """The variants of a comparison and its report, in the order of their names."""
    paths = sorted(path for path in (folder / FOLDER).iterdir() if path.is_dir())
    short = {path: re.sub(r"\b(?:\w+\.)+(\w+=)", r"\1", path.name) for path in paths}
    count = Counter(short.values())
    return {
        f"{prefix}{short[path] if count[short[path]] == 1 else path.name}": path for path in paths
    }


def members(folder: Path) -> list[str] | None:
    """Beginnings of the names of the runs that a comparison made; None: it is of older runs."""
    try:
        made = json.loads((folder / WHAT).read_text(encoding="utf-8"))
        if made.get("kind") == "runs":
            return None
        slugs = [variant["slug"] for variant in made.get("variants", ())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [run_name(folder.name, slug, 1).removesuffix("1") for slug in slugs]


def link(place: Path, wanted: dict[str, Path]) -> None:
    """Make the links in `place` those of `wanted`; TensorBoard may read the folder meanwhile."""
    for path in place.iterdir():
        if path.name not in wanted or path.resolve() != wanted[path.name].resolve():
            path.unlink()
    for name, target in wanted.items():
        if not os.path.lexists(place / name):
            os.symlink(target.resolve(), place / name, target_is_directory=True)


def new_place() -> Path:
    """A new empty folder for links."""
    return Path(tempfile.mkdtemp(prefix="tensorboard-"))
