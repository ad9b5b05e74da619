"""MANIFEST.json, the file that makes a folder a checkpoint, and the names of folders and files.

    checkpoints/step-00001200/MANIFEST.json
    {"checksum": ..., "step": 1200, "files": {name: [bytes, digest]}, "state": {...}, ...}

Rule: nothing in a checkpoint is used before the manifest's own checksum holds. It covers every
byte of the file, with the checksum itself counted as zeros. Names of files must match a fixed
pattern that cannot contain a path. Units: bytes.
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
# Leftovers of a save or a removal that was interrupted: <step>.tmp-<epoch>, <step>.gone-<epoch>.
STALE_PATTERN = re.compile(rf"{STEP_PATTERN.pattern}\.(?P<kind>tmp|gone)-(?P<number>\d+)", re.ASCII)
HEAD = '{"checksum":"'
BLANK = "0" * 32
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """The description of a committed checkpoint."""

    step: int
    epoch: int  # of the writer's lease
    world: int  # number of ranks that wrote
    state: dict[str, Any]  # of the run; see state.py
    files: dict[str, list]  # name -> [bytes, digest]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(size for size, _ in self.files.values())


def folder_name(step: int, segment: int = 0) -> str:
    """Return step-00001200, or step-00001200-segment-1 after a rewind.

    Eight digits make listings sort well for people; code compares numbers. The segment in the name
    keeps segments from overwriting each other's checkpoints.
    """
    return f"step-{step:08d}" + (f"-segment-{segment}" if segment else "")


def segment_of(state: Any) -> int:
    """Return the segment in a run's state; 0 where it has none."""
    return state.get("segment", 0) if isinstance(state, dict) else 0


def encode(manifest: Manifest) -> bytes:
    """Return the text of the file, checksum first."""
    body = json.dumps(asdict(manifest), separators=(",", ":"), allow_nan=False)
    blank = f'{HEAD}{BLANK}",{body[1:]}\n'.encode()
    return blank.replace(BLANK.encode(), digest(blank).hex().encode(), 1)


def decode(data: bytes, path: Path) -> Manifest:
    """Parse a manifest. Raises Damaged unless checksum, values and names of files are right.

    Raises UserError for the format of another version: such a checkpoint is whole, so it must not
    be passed over in silence.
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
    if len(manifest.files) != 2 * manifest.world:  # checked before a set of that size is built
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
    """Read the manifest of a committed checkpoint folder.

    Raises Damaged, also where the folder is a link, where its name gives another step or segment,
    and where it was committed by a writer that had lost the run.
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
            f"{path}: epoch {manifest.epoch} committed it when epoch {after} had the run already,"
            " because its process had been stopped for long; it is no checkpoint",
            kind="late",
        )
    return manifest


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Open each file of a checkpoint; return a line for each that is missing or has another
    size.
    """
    problems = []
    for name, (num_bytes, _) in manifest.files.items():
        try:
            with opened(folder / name) as descriptor:
                check_size(descriptor, folder / name, num_bytes)
        except Damaged as damage:
            problems += damage.problems
    return problems


def none_is_whole(damaged: Sequence[tuple[Path, list[str]]]) -> UserError:
    """Return the error for a run of which every checkpoint is damaged: a start at step 0 must be
    asked for.
    """
    return UserError(
        *(problem for _, problems in damaged for problem in problems),
        f"{damaged[0][0].parent} holds {counted(len(damaged), 'checkpoint')} and none is whole;"
        " repair one, or start from step 0 with resume=fresh",
    )


def folder_with_checkpoints(name: str) -> Path | None:
    """Find a folder with checkpoints by its path or its name under runs/; None: there is none.

    The checkpoints may have been copied without the rest of their run; `lineage.run_folder` insists
    on a whole run.
    """
    for path in (Path(name), Path("runs") / name):
        if (path / "checkpoints").is_dir():
            return path
    return None


def run_with_checkpoints(name: str, otherwise: str = "") -> Path:
    """Find a folder with checkpoints by its path or its name under runs/. Raises UserError;
    `otherwise` adds what else the name could be.
    """
    folder = folder_with_checkpoints(name)
    if folder is None:
        neither = f", {otherwise}" if otherwise else ""
        raise UserError(f"RUN={name}: no run with checkpoints here or under runs/{neither}")
    return folder


def committed(checkpoints: Path, lineage: Lineage | None = None) -> list[tuple[int, Path]]:
    """List [(step, folder)], in numeric order, of all checkpoints that were committed and belong to
    the run's current lineage, or to `lineage`. Raises UserError where the history is damaged.
    """
    chosen = lineage or lineage_of(checkpoints.parent)
    return [
        (step, path) for step, segment, path in all_committed(checkpoints)
        if chosen.holds(segment, step)
    ]  # fmt: skip


def abandoned(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """List [(step, segment, folder)] of checkpoints that a rewind has left behind."""
    chosen = lineage_of(checkpoints.parent)
    return [found for found in all_committed(checkpoints) if not chosen.holds(found[1], found[0])]


def all_committed(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """List [(step, segment, folder)] of every segment, in numeric order; other names and links are
    ignored.
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
    """Rename the folders that `epoch` and older ones save into, so that none of them can be
    committed any more. Raises OSError.
    """
    for path, kind, number in _stale(checkpoints):
        if kind == "tmp" and number <= epoch:
            os.rename(path, f"{str(path).partition('.tmp-')[0]}.gone-{time.time_ns()}")


def sweep(checkpoints: Path, epoch: int) -> list[str]:
    """Remove the leftovers of removals, and unfinished saves of `epoch` and older ones; return
    their names.

    Links are never followed. What cannot be removed stays: it only blocks a save of its own step.
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
    """List [(path, tmp or gone, number)] of leftovers."""
    found = []
    for entry in list(os.scandir(checkpoints)) if checkpoints.is_dir() else ():
        match = STALE_PATTERN.fullmatch(entry.name)
        if match:
            found.append((checkpoints / entry.name, match["kind"], int(match["number"])))
    return found
