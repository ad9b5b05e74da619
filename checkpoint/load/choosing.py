"""Finds the checkpoints of a run, checks them, and decides from which one to resume.

Rule: rank 0 looks at the folder, and all ranks use its answer. Ranks that looked for themselves
could see different states of a network file system and load different steps. Where rank 0 finds
damage, other hosts look as well (rank_views.py). A damaged checkpoint is passed over with a
message. If checkpoints exist but none is whole, that is an error, never a start from step 0. Units:
steps, bytes.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from checkpoint.comm import Alone, Comm, broadcast
from checkpoint.format.blocks import Damaged, Problem, check_file, opened
from checkpoint.format.index_file import (
    data_name,
    file_digests,
    index_name,
    read_index,
)
from checkpoint.format.manifest import (
    NAME,
    STEP_PATTERN,
    Manifest,
    committed,
    none_is_whole,
    read_manifest,
    size_problems,
)
from checkpoint.load.rank_views import second_look

# Blocks of each file that a sampled check reads, beside the first and the last one.
SAMPLE_BLOCKS = 6
DEPTHS = ("sizes", "sampled", "full")
ASIDE = re.compile(rf"{STEP_PATTERN.pattern}\.damaged-\d+", re.ASCII)  # see `set_aside`


@dataclass(frozen=True)
class Found:
    """A checkpoint that may be loaded."""

    step: int
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint, if there is one, and the newer damaged ones."""

    found: Found | None
    damaged: list[tuple[Path, list[str]]]  # (folder, problems), newest first


def verify(folder: Path, depth: str = "sampled", seed: int | None = None) -> list[Problem]:
    """Return the problems of one checkpoint folder, one line per file; none when it is whole.

    `sizes` checks the manifest and the size of every file; `sampled` also reads each index and some
    blocks of each data file; `full` reads every byte. Raises ValueError for another depth.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth={depth}: one of {', '.join(DEPTHS)}")
    try:
        manifest = read_manifest(folder)
    except Damaged as damage:
        return damage.problems
    except UserError as error:  # another version of the project wrote it
        return [Problem(line) for line in error.problems]
    if depth == "sizes":
        return size_problems(folder, manifest)
    problems = []
    for rank in range(manifest.world):
        try:
            check_rank(folder, rank, manifest.files, depth, seed)
        except Damaged as damage:
            problems += damage.problems
    return problems


def unnamed(folder: Path) -> list[str]:
    """Return the names in a checkpoint folder that its manifest does not list. Nothing reads these
    files. Returns none where the folder cannot be read.
    """
    try:
        known = {NAME, *read_manifest(folder).files}
        return sorted(entry.name for entry in os.scandir(folder) if entry.name not in known)
    except (OSError, Damaged, UserError):
        return []


def check_rank(
    folder: Path, rank: int, files: dict[str, list], depth: str, seed: int | None = None
) -> None:
    """Read one rank's index and a sample, or all, of its data. Raises Damaged."""
    entry = files[data_name(rank)]
    path = folder / data_name(rank)
    digests = file_digests(folder, rank, read_index(folder, rank, files[index_name(rank)]), entry)
    blocks: Sequence[int] | None = None
    if depth == "sampled" and len(digests) > SAMPLE_BLOCKS + 2:
        inner = random.Random(seed).sample(range(1, len(digests) - 1), SAMPLE_BLOCKS)
        blocks = [0, *sorted(inner), len(digests) - 1]
    drop_from_cache(path)
    check_file(path, entry[0], digests, blocks)


def drop_from_cache(path: Path) -> None:
    """Ask the kernel to drop a file's clean pages from its cache, so that a read goes to the
    disk.
    """
    with opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def choose(run_folder: Path, comm: Comm, depth: str = "sizes", below: int | None = None) -> Choice:
    """Choose the newest whole checkpoint of a step under `below`, the same on all ranks; a
    collective.
    """
    checkpoints = run_folder / "checkpoints"

    def look() -> Choice:
        return newest_whole(checkpoints, lambda path, _: verify(path, depth), below)

    while True:
        choice = _first_looks(comm, look, checkpoints, "choice of the checkpoint")
        seen = {folder.name: problems for folder, problems in choice.damaged}
        mine = seen if comm.rank == 0 else {}
        if not second_look(comm, mine, lambda name: verify(checkpoints / name, depth), checkpoints):
            return choice


def newest(run_folder: Path, comm: Comm, depth: str = "sizes") -> Choice:
    """Like `choose`, for a run about to start: `found` is None only where none was ever committed.

    Raises UserError on all ranks when there are checkpoints and none of them is whole.
    """
    choice = choose(run_folder, comm, depth)
    if choice.found is None and choice.damaged:
        raise none_is_whole(choice.damaged)
    return choice


def newest_whole(
    checkpoints: Path,
    problems_of: Callable[[Path, Manifest], Sequence[str]],
    below: int | None = None,
) -> Choice:
    """Go through the checkpoints of the current lineage from the newest to the oldest, and choose
    the first one (of a step under `below`) with a valid manifest and no `problems_of`.

    Every decision about where a run resumes is made here. Raises UserError for a checkpoint that
    another version of the project wrote.
    """
    damaged: list[tuple[Path, list[str]]] = []
    for step, folder in reversed(committed(checkpoints)):
        if below is not None and step >= below:
            continue
        try:
            manifest = read_manifest(folder)
            problems = problems_of(folder, manifest)
        except Damaged as damage:
            problems = damage.problems
        if not problems:
            return Choice(Found(step, folder, manifest), damaged)
        damaged.append((folder, list(problems)))
    return Choice(None, damaged)


def find_checkpoint(run_folder: Path, step: int | None = None) -> Found:
    """Find the checkpoint of `step`, or the newest one, in a single process. Raises UserError."""
    if step is not None:
        return at_step(run_folder, step, Alone())
    found = newest(run_folder, Alone()).found
    if found is None:
        raise UserError(f"{run_folder}: this run has no checkpoint yet")
    return found


def set_aside(damaged: Sequence[Path]) -> list[str]:
    """Rename damaged checkpoints, so that their steps can be saved again; return a line about each.

    Only the writer of the run does this, after an older checkpoint was loaded. Nothing is deleted,
    because a checkpoint also looks damaged while its disk is away. Raises UserError.
    """
    lines = []
    for folder in damaged:
        numbers = (n for n in range(1, 10_000) if not os.path.lexists(f"{folder}.damaged-{n}"))
        target = folder.with_name(f"{folder.name}.damaged-{next(numbers)}")
        try:
            os.rename(folder, target)
        except OSError as error:
            raise UserError(
                f"{folder} is damaged and could not be set aside ({error.strerror}); move it away"
            ) from None
        lines.append(f"{folder.name} is kept as {target.name}; its step will be saved again")
    return lines


def at_step(run_folder: Path, step: int, comm: Comm, depth: str = "sizes") -> Found:
    """Find the checkpoint of `step`, the same on all ranks; a collective. Raises UserError when it
    is missing or damaged.
    """
    checkpoints = run_folder / "checkpoints"

    def look() -> tuple[Path, list[Problem], Found | None]:
        steps = dict(committed(checkpoints))
        if step not in steps:
            there = ", ".join(str(one) for one in sorted(steps)) or "none"
            raise UserError(f"step={step}: {run_folder} has no such checkpoint; it has: {there}")
        problems = verify(steps[step], depth)
        found = None if problems else Found(step, steps[step], read_manifest(steps[step]))
        return steps[step], problems, found

    while True:
        folder, problems, found = _first_looks(comm, look, checkpoints, "checkpoint asked for")
        mine = {folder.name: problems} if problems and comm.rank == 0 else {}
        if not second_look(comm, mine, lambda name: verify(checkpoints / name, depth), checkpoints):
            break
    if problems:
        raise UserError(*problems)
    return found


def _first_looks(comm: Comm, look: Callable[[], Any], checkpoints: Path, what: str) -> Any:
    """Run `look` on rank 0 and return its result on every rank. Where it fails, all raise
    UserError.
    """
    found, problems = None, None
    if comm.rank == 0:
        try:
            found = look()
        except (Damaged, UserError) as error:
            problems = error.problems
        except OSError as error:
            problems = [f"{error.filename or checkpoints}: {error.strerror}"]
    found, problems = broadcast(comm, (found, problems), what)
    if problems:
        raise UserError(*problems)
    return found
