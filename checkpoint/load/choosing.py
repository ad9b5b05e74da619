"""Which checkpoints there are, whether they are whole, which to resume from, which to remove.

The one rule: rank 0 looks and everyone is told. Ranks that looked for themselves could see
different things on a network file system and load different steps. A damaged checkpoint is passed
over aloud; when checkpoints exist but none is whole, nothing is chosen in silence: that is an
error. Units: steps, bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from checkpoint.comm import Comm, broadcast
from checkpoint.format.blocks import Damaged, Problem, check_file, opened
from checkpoint.format.epochs import Fence
from checkpoint.format.index_file import (
    Point,
    data_name,
    file_digests,
    index_name,
    nothing,
    read_index,
)
from checkpoint.format.manifest import (
    NAME,
    STEP_PATTERN,
    Manifest,
    abandoned,
    committed,
    none_is_whole,
    read_manifest,
    size_problems,
)

# Blocks of each file that a sampled check reads, besides the first and the last.
SAMPLE_BLOCKS = 6
DEPTHS = ("sizes", "sampled", "full")
ASIDE = re.compile(rf"{STEP_PATTERN.pattern}\.damaged-\d+", re.ASCII)  # what `set_aside` names


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the `newest` ones, each `every` steps for ever (0 = none), and the
    one of best health.
    """

    newest: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if self.newest < 1 or self.every < 0:
            raise ValueError(f"keep at least the newest one, every >= 0: {self}")


KEEP = Keep()


@dataclass(frozen=True)
class Found:
    """A checkpoint that may be loaded."""

    step: int
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint, if there is one, and the newer ones that were passed over."""

    found: Found | None
    damaged: list[tuple[Path, list[str]]]  # (folder, problems), newest first


def verify(folder: Path, depth: str = "sampled", seed: int | None = None) -> list[Problem]:
    """Problems of one checkpoint folder, one line per file; none when it is whole.

    `sizes` checks the manifest and every file's size; `sampled` also each index and some blocks of
    each data file; `full` every byte.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth={depth}: one of {', '.join(DEPTHS)}")
    try:
        manifest = read_manifest(folder)
    except Damaged as damage:
        return damage.problems
    except UserError as error:  # of another version of the project
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
    """Names in a checkpoint that its manifest does not have: nobody reads them, somebody put them
    there. None where the folder cannot be read.
    """
    try:
        known = {NAME, *read_manifest(folder).files}
        return sorted(entry.name for entry in os.scandir(folder) if entry.name not in known)
    except (OSError, Damaged, UserError):
        return []


def check_rank(
    folder: Path, rank: int, files: dict[str, list], depth: str, seed: int | None = None
) -> None:
    """Read back one rank's index and a sample, or all, of its data. Raises Damaged."""
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
    """Ask the kernel to forget a file's clean pages, so that reading it back reads the disk."""
    with opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def choose(run_folder: Path, comm: Comm, depth: str = "sizes", below: int | None = None) -> Choice:
    """The newest whole checkpoint of a step under `below`, the same on all ranks; a collective."""
    checkpoints = run_folder / "checkpoints"
    return _first_looks(
        comm,
        lambda: newest_whole(checkpoints, lambda path, _: verify(path, depth), below),
        checkpoints,
        "choice of the checkpoint",
    )


def newest(run_folder: Path, comm: Comm, depth: str = "sizes") -> Choice:
    """Like `choose`, for a run about to start; no `found` only where none was ever committed.

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
    """Walk the checkpoints of the current lineage from the newest to the oldest, and take the first
    one (of a step under `below`) whose manifest holds and of which `problems_of` reports nothing.

    Every decision about where a run resumes goes through this function. Raises UserError for a
    checkpoint that another version of the project wrote.
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


def set_aside(damaged: Sequence[Path]) -> list[str]:
    """Rename damaged checkpoints, so that their steps can be saved again; a line about each.

    Only for the writer of the run, once an older one is loaded. Nothing is deleted: what looks
    damaged may be a disk that is away. Raises UserError.
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
    """The checkpoint of `step` on all ranks. Raises UserError when it is missing or damaged."""
    checkpoints = run_folder / "checkpoints"

    def look() -> Found:
        steps = dict(committed(checkpoints))
        if step not in steps:
            there = ", ".join(str(one) for one in sorted(steps)) or "none"
            raise UserError(f"step={step}: {run_folder} has no such checkpoint; it has: {there}")
        problems = verify(steps[step], depth)
        if problems:
            raise Damaged(*problems)
        return Found(step, steps[step], read_manifest(steps[step]))

    return _first_looks(comm, look, checkpoints, "checkpoint asked for")


def _first_looks(comm: Comm, look: Callable[[], Any], checkpoints: Path, what: str) -> Any:
    """What `look` finds on rank 0, on every rank. Where it fails, all raise UserError."""
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


def best(states: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The checkpoint of best health among {step: state of the run}; None where nothing tells. Pure.

    Lowest validation loss since the save before (`health.val_loss`), of those before which no step
    was skipped since then (`health.skipped_since_save`); of equal ones the latest.
    """
    found = []
    for step, state in states.items():
        health = state.get("health") or {}
        loss = health.get("val_loss")
        is_number = isinstance(loss, int | float) and not isinstance(loss, bool)
        if is_number and math.isfinite(loss) and health.get("skipped_since_save", 0) == 0:
            found.append((-loss, step))
    return max(found)[1] if found else None


def removable(
    steps: Sequence[int], keep: Keep, verified: int, healthiest: int | None = None
) -> list[int]:
    """Steps that may go, once `verified` is committed and read back. Pure.

    Only older ones go: a checkpoint newer than the verified one is somebody's future, and does not
    count among the newest that stay.
    """
    older = sorted(step for step in steps if step <= verified)
    stay = {verified, healthiest, *older[-keep.newest :]}
    if keep.every:
        stay |= {step for step in older if step % keep.every == 0}
    return [step for step in older if step not in stay]


def prune(
    checkpoints: Path, keep: Keep, verified: int, fence: Fence, point: Point = nothing
) -> list[int]:
    """Remove what `removable` names, and abandoned ones that are outlived; steps that went. Raises
    Fenced before a removal, too.

    A folder loses its final name first: one half removed is never taken for a checkpoint.
    """
    folders = dict(committed(checkpoints))
    gone = removable(list(folders), keep, verified, best(_states(folders)))
    passed = [found for found in abandoned(checkpoints) if outlived(found[0], keep, verified)]
    for path in [*(folders[step] for step in gone), *(path for *_, path in passed)]:
        doomed = checkpoints / f"{path.name}.gone-{fence.epoch}"
        point("rename old", 0)
        fence.check()
        os.rename(path, doomed)
        point("remove old", 0)
        shutil.rmtree(doomed)
    return [*gone, *(step for step, *_ in passed)]


def _states(folders: Mapping[int, Path]) -> dict[int, dict[str, Any]]:
    """State in the manifest of each checkpoint that has a whole one."""
    states = {}
    for step, folder in folders.items():
        with contextlib.suppress(Damaged, UserError):
            states[step] = read_manifest(folder).state
    return states


def outlived(step: int, keep: Keep, verified: int) -> bool:
    """Whether a checkpoint of an abandoned segment may go: the run has come as far again, and a
    person who wants to turn back once more had until then. Pure.
    """
    return step <= verified and not (keep.every and step % keep.every == 0)
