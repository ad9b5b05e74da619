"""Loading: rank 0 chooses a checkpoint, and every rank reads what its fragments need.

    newest whole one -> indexes, each read by one rank and sent to all -> plan -> checked reads
                 ^                                                              |
                 '------------------ damaged: reported, the next older one -----'

Rule: every read is checked. Every block is compared with its digest before a byte of it is copied,
all ranks together read all blocks, and `load` returns only when every rank found its part whole.
Units: bytes, seconds, steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from checkpoint.comm import Comm, broadcast
from checkpoint.format.blocks import Damaged, Problem
from checkpoint.format.index import Fragment, Index, merge, plan
from checkpoint.format.index_file import (
    data_name,
    file_digests,
    index_name,
    parse_index,
    read_checked,
    read_index,
)
from checkpoint.format.manifest import FILE_PATTERN, Manifest, none_is_whole
from checkpoint.format.storage import read
from checkpoint.load.choosing import Choice, Found, at_step, check_rank, choose, unnamed
from checkpoint.load.rank_views import same_listing, second_look


@dataclass(frozen=True)
class Loaded:
    """The result of a load. Fragments are filled; the caller restores the rest."""

    step: int
    folder: Path
    state: dict[str, Any]
    local: dict[str, Any] | None  # state of this rank; None when another number of ranks wrote it
    bytes: int  # read by this rank
    seconds: float
    damaged: list[tuple[Path, list[str]]]  # newer checkpoints passed over, with their problems
    unnamed: list[str]  # files in the folder that do not belong to the checkpoint


def load(
    run_folder: Path, fragments: Sequence[Fragment], comm: Comm, step: int | None = None
) -> Loaded | None:
    """Fill `fragments` from the newest whole checkpoint, or from that of `step`; a collective.

    Returns None, and leaves fragments as they are, when no checkpoint was ever committed and no
    `step` is given. Raises UserError on all ranks when that step, or every checkpoint, is damaged,
    or when it belongs to another model or optimizer; the contents of fragments are then undefined.
    Raises Shared where ranks see different files (rank_views.py).
    """
    began = time.perf_counter()
    same_listing(comm, run_folder / "checkpoints")
    damaged: list[tuple[Path, list[str]]] = []
    while True:
        if step is None:
            below = damaged[-1][0] if damaged else None
            choice = choose(run_folder, comm, below=_step_of(below))
        else:
            choice = Choice(at_step(run_folder, step, comm), [])
        damaged += choice.damaged
        found = choice.found
        if found is None:
            if damaged:
                raise none_is_whole(damaged)
            return None
        local, count, problems, mine = _attempt(found, fragments, comm)
        if not problems:
            seconds = time.perf_counter() - began
            state = found.manifest.state
            extra = broadcast(
                comm, unnamed(found.folder) if comm.rank == 0 else None, "extra files"
            )
            return Loaded(found.step, found.folder, state, local, count, seconds, damaged, extra)
        if second_look(comm, mine, functools.partial(file_problems, found), found.folder):
            continue
        if step is not None:
            raise UserError(*problems)
        damaged.append((found.folder, problems))


def _step_of(folder: Path | None) -> int | None:
    return None if folder is None else int(folder.name.split("-")[1])


def file_problems(found: Found, name: str) -> list[Problem]:
    """Read one file of a checkpoint completely, and return its problems; none when it is whole."""
    rank = int(FILE_PATTERN.fullmatch(name)[1])
    files = found.manifest.files
    try:
        if name == index_name(rank):
            read_index(found.folder, rank, files[name])
        else:
            check_rank(found.folder, rank, files, "full")
    except Damaged as damage:
        return damage.problems
    return []


def _attempt(
    found: Found, fragments: Sequence[Fragment], comm: Comm
) -> tuple[dict | None, int, list[str], dict[str, list[str]]]:
    """Try to read one checkpoint: (this rank's local state, bytes read, damage found by any rank,
    problems of this rank by file). Raises UserError on all ranks where it does not fit the
    fragments.
    """
    texts, problems, mine = _collect(found, comm)
    if problems:
        return None, 0, problems, mine
    local, count, misfits = None, 0, []
    try:
        names = [index_name(rank) for rank in range(found.manifest.world)]
        indexes = [parse_index(texts[name], found.folder / name) for name in names]
        source = CheckpointReader(found.folder, found.manifest, merge(indexes), indexes)
        count = source.fill(fragments)
        if comm.world == found.manifest.world:
            local = indexes[comm.rank]["local"]
    except Damaged as damage:
        problems = damage.problems
        # A line without a file: the indexes contradict each other, on all ranks alike.
        mine = {line.file: [line] for line in problems if line.file}
    except UserError as error:
        misfits = [f"{found.folder.name}: {line}" for line in error.problems]
    except Exception as error:  # not damage, so no older one is tried; the others must learn of it
        misfits = [f"{found.folder.name}: rank {comm.rank}: {type(error).__name__}: {error}"]
    outcomes = comm.exchange((problems, misfits), "checkpoint read")
    problems, misfits = (
        list(dict.fromkeys(line for outcome in outcomes for line in outcome[i])) for i in (0, 1)
    )
    if misfits:
        raise UserError(*misfits)
    return local, count, problems, mine


def _collect(found: Found, comm: Comm) -> tuple[dict[str, bytes], list[str], dict[str, list[str]]]:
    """Read the texts of all indexes: (texts, problems of all ranks, problems of this rank by file).

    Each file is opened by one rank only and sent to the others.
    """
    texts: dict[str, bytes] = {}
    mine: dict[str, list[str]] = {}
    for rank in range(comm.rank, found.manifest.world, comm.world):
        name = index_name(rank)
        try:
            texts[name] = read_checked(found.folder / name, *found.manifest.files[name])
        except Damaged as damage:
            mine[name] = damage.problems
    outcomes = comm.exchange((texts, mine), "checkpoint indexes")
    merged = {name: text for part, _ in outcomes for name, text in part.items()}
    lines = [line for _, found in outcomes for some in found.values() for line in some]
    return merged, lines, mine


@dataclass
class CheckpointReader:
    """A checkpoint folder opened for reading. Digests are computed per file, when needed."""

    folder: Path
    manifest: Manifest
    index: Index
    indexes: list[dict]

    def digests(self, rank: int) -> list[bytes]:
        """Return the digests of the blocks of a rank's data file."""
        entry = self.manifest.files[data_name(rank)]
        return file_digests(self.folder, rank, self.indexes[rank], entry)

    def fill(self, fragments: Sequence[Fragment]) -> int:
        """Fill fragments and return bytes read. Raises Damaged, or UserError where they do not
        fit.
        """
        return read(self.folder, self.index, self.digests, plan(self.index, fragments), fragments)


def open_checkpoint(found: Found) -> CheckpointReader:
    """Open a checkpoint in a single process, with all its indexes checked. Raises Damaged."""
    manifest = found.manifest
    indexes = [
        read_index(found.folder, rank, manifest.files[index_name(rank)])
        for rank in range(manifest.world)
    ]
    return CheckpointReader(found.folder, manifest, merge(indexes), indexes)
