"""MANIFEST.json: the file that makes a folder a checkpoint, and the names that may stand in it.

    checkpoints/step-00001200/MANIFEST.json
    {"checksum": ..., "step": 1200, "files": {name: [bytes, digest]}, "state": {...}, ...}

The one rule: nothing in a checkpoint is believed before the manifest's own checksum holds; it
covers every byte of the file, itself counted as zeros. Names of files are matched against a fixed
pattern that has no room for a path. Units: bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.values import counted
from checkpoint.format.blocks import Damaged, check_size, digest, opened
from checkpoint.format.epochs import is_late
from checkpoint.lineage import Lineage, lineage_of

FORMAT = 1
NAME = "MANIFEST.json"
FILE_PATTERN = re.compile(r"rank-(\d{5,9})\.(bin|json)", re.ASCII)
STEP_PATTERN = re.compile(r"step-(\d{8,18})(?:-segment-([1-9]\d{0,8}))?", re.ASCII)
# Leftovers of a save or a removal that did not end: <step>.tmp-<epoch>, <step>.gone-<epoch>.
STALE_PATTERN = re.compile(rf"{STEP_PATTERN.pattern}\.(?P<kind>tmp|gone)-(?P<number>\d+)", re.ASCII)
HEAD = '{"checksum":"'
BLANK = "0" * 32
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint says of itself."""

    step: int
    epoch: int  # of the writer's lease
    world: int  # ranks that wrote
    state: dict[str, Any]  # of the run: see state.py
    files: dict[str, list]  # name -> [bytes, digest]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(size for size, _ in self.files.values())


def folder_name(step: int, segment: int = 0) -> str:
    """step-00001200, or step-00001200-segment-1 of a run that was taken back: eight digits, so that
    a listing sorts for people; code compares numbers. Segments never overwrite each other's.
    """
    return f"step-{step:08d}" + (f"-segment-{segment}" if segment else "")


def segment_of(state: Any) -> int:
    """The segment in a run's state; 0 where it has none."""
    return state.get("segment", 0) if isinstance(state, dict) else 0


def encode(manifest: Manifest) -> bytes:
    """The text of the file, checksum first."""
    body = json.dumps(asdict(manifest), separators=(",", ":"), allow_nan=False)
    blank = f'{HEAD}{BLANK}",{body[1:]}\n'.encode()
    return blank.replace(BLANK.encode(), digest(blank).hex().encode(), 1)


def decode(data: bytes, path: Path) -> Manifest:
    """The manifest; Damaged unless checksum, values and names of files are right. Raises UserError
    for a format of another version: such a checkpoint is whole, and nobody's to pass over.
    """
    head = HEAD.encode()
    stored = data[len(head) : len(head) + 32]
    blank = data[: len(head)] + BLANK.encode() + data[len(head) + 32 :]
    if not data.startswith(head) or digest(blank).hex().encode() != stored:
        kind = "flipped" if data.endswith(b"}\n") else "truncated"
        raise Damaged(f"{path}: differs from its checksum", kind=kind)
    try:
        values = json.loads(data)
        del values["checksum"]
        written = values.get("format")
        if written == FORMAT:
            manifest = Manifest(**values)
            _check(manifest)
            return manifest
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: {error}") from None
    except Damaged as damage:
        raise Damaged(f"{path}: {damage}", kind=damage.problems[0].kind) from None
    raise UserError(
        f"{path}: written in format {written!r}, and this version of the project reads format"
        f" {FORMAT}; go on with the version that wrote it"
    )


def _check(manifest: Manifest) -> None:
    numbers = (manifest.step, manifest.epoch, manifest.world)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("step, epoch and world must be whole numbers")
    if len(manifest.files) != 2 * manifest.world:  # before anything of that size is made
        raise ValueError(f"{len(manifest.files)} files are not those of {manifest.world} ranks")
    expected = {
        f"rank-{rank:05d}.{end}" for rank in range(manifest.world) for end in ("bin", "json")
    }
    for name, entry in manifest.files.items():
        if not FILE_PATTERN.fullmatch(name):
            raise Damaged(f"illegal file name {name[:80]!r}", kind="unsafe")
        size, text = entry
        if type(size) is not int or size < 0 or not re.fullmatch(r"[0-9a-f]{32}", text, re.ASCII):
            raise ValueError(f"illegal entry of {name}")
    if set(manifest.files) != expected:
        raise ValueError(f"files are not those of {manifest.world} ranks")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint folder. Raises Damaged, also for a link or another
    step, or one committed by a writer that had lost the run.
    """
    path = folder / NAME
    if folder.is_symlink():
        raise Damaged(f"{folder}: a link, not a folder", kind="unsafe")
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MOST_BYTES:
            raise Damaged(f"{path}: {size} bytes is no manifest", kind="grown")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            manifest = decode(file.read(), path)
    named = STEP_PATTERN.fullmatch(folder.name)
    if named and int(named.group(1)) != manifest.step:
        raise Damaged(f"{path}: is of step {manifest.step}")
    if named and int(named.group(2) or 0) != segment_of(manifest.state):
        raise Damaged(f"{path}: is of segment {segment_of(manifest.state)}")
    after = is_late(folder.parent.parent, folder.name, manifest.epoch)
    if after is not None:
        raise Damaged(
            f"{path}: of epoch {manifest.epoch}, committed when epoch {after} had the run already,"
            " by a process that had been stopped for long; it is no checkpoint",
            kind="late",
        )
    return manifest


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files of a checkpoint that are missing or have another size, one line each; opens all."""
    problems = []
    for name, (num_bytes, _) in manifest.files.items():
        try:
            with opened(folder / name) as descriptor:
                check_size(descriptor, folder / name, num_bytes)
        except Damaged as damage:
            problems += damage.problems
    return problems


def none_is_whole(damaged: Sequence[tuple[Path, list[str]]]) -> UserError:
    """What to say when every checkpoint is damaged: starting at step 0 must be asked for."""
    return UserError(
        *(problem for _, problems in damaged for problem in problems),
        f"{damaged[0][0].parent} holds {counted(len(damaged), 'checkpoint')} and none is whole;"
        " repair one, or"
        " start from step 0 with resume=fresh",
    )


def folder_with_checkpoints(name: str) -> Path | None:
    """A folder given by path or by its name under runs/; it may have been copied without the rest
    of its run, so `lineage.run_folder` asks for more."""
    for path in (Path(name), Path("runs") / name):
        if (path / "checkpoints").is_dir():
            return path
    return None


def committed(checkpoints: Path, lineage: Lineage | None = None) -> list[tuple[int, Path]]:
    """[(step, folder)] in numeric order of what was once committed and belongs to the run's current
    lineage, or to `lineage`. Raises UserError where the run's history is damaged.
    """
    chosen = lineage or lineage_of(checkpoints.parent)
    return [
        (step, path) for step, segment, path in all_committed(checkpoints)
        if chosen.holds(segment, step)
    ]  # fmt: skip


def abandoned(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """[(step, segment, folder)] of what was committed before the run was taken back behind it."""
    chosen = lineage_of(checkpoints.parent)
    return [found for found in all_committed(checkpoints) if not chosen.holds(found[1], found[0])]


def all_committed(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """[(step, segment, folder)] in numeric order, of every segment; stray names and links are no
    step.
    """
    found = []
    try:
        entries = list(os.scandir(checkpoints))
    except FileNotFoundError:
        return []
    for entry in entries:
        match = STEP_PATTERN.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            place = int(match.group(1)), int(match.group(2) or 0)
            found.append((*place, checkpoints / entry.name))
    return sorted(found)


def disown(checkpoints: Path, epoch: int) -> None:
    """Take their names from folders that `epoch` and older ones save into: none of them can be
    committed from now on. Raises OSError.
    """
    for path, kind, number in _stale(checkpoints):
        if kind == "tmp" and number <= epoch:
            os.rename(path, f"{str(path).partition('.tmp-')[0]}.gone-{time.time_ns()}")


def sweep(checkpoints: Path, epoch: int) -> list[str]:
    """Remove what removals left, and unfinished saves of `epoch` and older ones; names that went.

    Never follows links; what cannot be removed stays, since only its own step is in its way.
    """
    gone = []
    for path, kind, number in _stale(checkpoints):
        if kind == "gone" or number <= epoch:
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    shutil.rmtree(path)
                else:
                    path.unlink()
                gone.append(path.name)
    return gone


def _stale(checkpoints: Path) -> list[tuple[Path, str, int]]:
    """[(path, tmp or gone, number)] of leftovers."""
    found = []
    for entry in list(os.scandir(checkpoints)) if checkpoints.is_dir() else ():
        match = STALE_PATTERN.fullmatch(entry.name)
        if match:
            found.append((checkpoints / entry.name, match["kind"], int(match["number"])))
    return found
