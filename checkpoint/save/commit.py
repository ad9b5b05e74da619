"""Saving: all ranks write, rank 0 decides once, and one rename commits.

    arguments every rank sends what it is about to save; a difference ends the save here
    prepare   rank 0 removes leftovers and makes step-00001200.tmp-<epoch>/
    write     every rank writes and fsyncs its file and index, and computes digests as it writes
    verify    every rank reads back a sample, or all, of what it wrote
    commit    rank 0 makes the run's record durable, checks that the pieces are complete, writes
              MANIFEST.json, renames the folder
    prune     rank 0 removes old checkpoints

Rule: after each phase every rank learns the outcome of all others, and a failure of one rank is a
failure of all: the save is given up with one message, training goes on, older checkpoints stay. A
folder under its final name is complete, durable and read back, whichever process dies when. Before
anything becomes final, rank 0 asks its fence; where another attempt of the run has begun, all ranks
raise Fenced. Units: seconds, bytes, steps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.durable import sync_folder
from checkpoint.comm import Comm
from checkpoint.format import manifest as manifests
from checkpoint.format.blocks import Damaged
from checkpoint.format.epochs import Fence, Fenced, Open
from checkpoint.format.index import Fragment, holes, merge
from checkpoint.format.index_file import Point, index_name, naming, nothing, read_index, write_file
from checkpoint.format.manifest import Manifest, encode, folder_name, segment_of
from checkpoint.format.storage import write_rank
from checkpoint.load.choosing import check_rank, set_aside
from checkpoint.save.retention import KEEP, Keep, prune

# A rank waits this long for the folder that rank 0 made before it reports it as missing, because
# network file systems show new names late.
LAG_S = 30.0


@dataclass(frozen=True)
class SaveReport:
    """The outcome of a save, the same on all ranks except for the times."""

    step: int
    folder: Path
    ok: bool
    problem: str | None  # why it failed: rank, path, cause
    bytes: int  # of all ranks together
    seconds: float
    stall_s: float  # time for which training waited
    removed: tuple[int, ...] = ()  # steps of older checkpoints that were removed
    notes: tuple[str, ...] = ()  # failures that did no harm


class SaveFailed(Exception):
    """A rank could not do its part. The message is the same on every rank."""


def save(
    run_folder: Path,
    step: int,
    fragments: Sequence[Fragment],
    state: dict[str, Any],
    comm: Comm,
    *,
    local: dict[str, Any] | None = None,
    keep: Keep = KEEP,
    fence: Fence | None = None,
    verify: str = "sampled",
    again: bool = False,
    point: Point = nothing,
    sync_record: Callable[[], None] = lambda: None,
) -> SaveReport:
    """Save the state after update `step`; a collective of all ranks.

    `state` is JSON of the run (that of rank 0 is written), `local` is JSON of this rank, `fence` is
    rank 0's lease. `sync_record` makes the run's record up to this step durable; rank 0 calls it
    before the commit. `verify` is sampled or full. `again` means that this attempt tried this step
    before; a folder that it renamed then without being able to make the name durable is set aside.
    A failure on any rank is reported, not raised. Raises Fenced on all ranks where another attempt
    of the run has begun, and RuntimeError where the ranks lose each other, so that none waits for
    ever.
    """
    began = time.perf_counter()
    fence = fence or Open()
    checkpoints = run_folder / "checkpoints"
    final = checkpoints / folder_name(step, segment_of(state))
    phase = _Phases(comm, point)
    problem, total, removed, notes, temporary = None, 0, (), (), None
    try:
        asked = _arguments(run_folder, step, state, verify, again)
        _refuse_difference(phase("arguments", lambda: asked))
        temporary = phase(
            "prepare", lambda: _prepare(checkpoints, final, fence, again, point), only=0
        )[0]
        written = phase(
            "write", lambda: _write(temporary, fragments, local or {}, comm.rank, point)
        )
        files = {name: entry for part in written for name, entry in part.items()}
        total = sum(size for size, _ in files.values())
        made = Manifest(step, fence.epoch, comm.world, state, files)

        def commit() -> list[str]:
            sync_record()
            return _commit(temporary, final, made, fence, point)

        phase("verify", lambda: check_rank(temporary, comm.rank, files, verify))
        notes = phase("commit", commit, only=0)[0]
        removed, more = phase(
            "prune", lambda: _prune(checkpoints, keep, step, fence, point), only=0
        )[0]
        notes = [*notes, *more]
    except SaveFailed as failure:
        problem = str(failure)
        with contextlib.suppress(SaveFailed):
            phase("give up", lambda: _give_up(temporary, fence), only=0)
    seconds = time.perf_counter() - began
    return SaveReport(
        step, final, problem is None, problem, total, seconds, seconds, tuple(removed), tuple(notes)
    )


def _arguments(
    run_folder: Path, step: int, state: dict[str, Any], verify: str, again: bool
) -> dict[str, Any]:
    """Return the arguments of a save that must be the same on all ranks, for comparison."""
    counts = ("tokens", "optimizer_step", "seed", "recipe_hash")
    return {
        "run folder": str(run_folder),
        "step": step,
        "segment": segment_of(state),
        **{name: state.get(name) for name in counts},
        "verify": verify,
        "again": again,
    }


def _refuse_difference(arguments: Sequence[dict[str, Any]]) -> None:
    """Raise SaveFailed, the same on all ranks, where a rank's arguments differ from rank 0's."""
    for rank, mine in enumerate(arguments):
        differing = [name for name, value in arguments[0].items() if mine[name] != value]
        if differing:
            pairs = [f"{name} {mine[name]} and {arguments[0][name]}" for name in differing]
            raise SaveFailed(
                f"arguments: rank {rank} and rank 0 are about to save different things:"
                f" {'; '.join(pairs)}; nothing was written"
            )


class _Phases:
    """Runs one phase after the other, and exchanges the outcome of each."""

    def __init__(self, comm: Comm, point: Point):
        self.comm, self.point = comm, point

    def __call__(self, what: str, action: Callable[[], Any], only: int | None = None) -> list[Any]:
        """Run `action` (on rank `only` alone) and return the values of all ranks. Raises SaveFailed
        or Fenced on all ranks.
        """
        value, problem, lost = None, None, None
        if only is None or only == self.comm.rank:
            try:
                value = action()
            except Fenced as error:
                lost = str(error)
            except Exception as error:  # of any kind: the other ranks must learn of it
                problem = _cause(error)
        self.point(f"exchange {what}", self.comm.rank)
        outcomes = self.comm.exchange((value, problem, lost), f"checkpoint {what}")
        for _, _, text in outcomes:
            if text:
                raise Fenced(text)
        problems = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(outcomes) if text]
        if problems:
            more = f" (and {len(problems) - 1} other ranks)" if len(problems) > 1 else ""
            raise SaveFailed(f"{what}: {problems[0]}{more}")
        return [value for value, _, _ in outcomes]


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, Damaged):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _prepare(checkpoints: Path, final: Path, fence: Fence, again: bool, point: Point) -> Path:
    """Make, on rank 0, the folder that all ranks write into; its name has the epoch."""
    fence.check()
    checkpoints.mkdir(parents=True, exist_ok=True)
    sync_folder(checkpoints.parent)  # the name `checkpoints` itself must survive a power cut
    if again and os.path.lexists(final):
        set_aside([final])
    if os.path.lexists(final) and not _was_late(final):
        raise FileExistsError(17, "this step is saved already; a checkpoint is never overwritten",
                              str(final))  # fmt: skip
    manifests.sweep(checkpoints, fence.epoch)
    point("open folder", 0)
    temporary = checkpoints / f"{final.name}.tmp-{fence.epoch}"
    with naming(temporary):
        temporary.mkdir()
    return temporary


def _give_up(temporary: Path | None, fence: Fence) -> None:
    """Remove the unfinished folder. Raises Fenced where another attempt has begun: that is then the
    cause of the failure.
    """
    fence.check()
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)


def _was_late(final: Path) -> bool:
    """Set aside a folder of this name that a writer committed after it had lost the run; return
    whether there was one.
    """
    try:
        manifests.read_manifest(final)
    except Damaged as damage:
        if damage.problems[0].kind == "late":
            set_aside([final])
            return True
    return False


def _write(
    temporary: Path, fragments: Sequence[Fragment], local: dict, rank: int, point: Point
) -> dict[str, list]:
    deadline = time.monotonic() + (LAG_S if rank else 0)  # rank 0 made it itself
    while not temporary.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    files = write_rank(temporary, rank, fragments, local, point)
    point("fsync folder", rank)
    sync_folder(temporary)
    return files


def _commit(temporary: Path, final: Path, made: Manifest, fence: Fence, point: Point) -> list[str]:
    """Commit, on rank 0, by the rename of the folder. Returns notes on failures that did no harm.

    A process that is stopped between the last check and the rename finds, when it goes on, that the
    folder is gone: the next attempt renames it before it lists the committed checkpoints.
    """
    # Check that the pieces of all ranks make whole tensors.
    missing = holes(
        merge([read_index(temporary, r, made.files[index_name(r)]) for r in range(made.world)])
    )
    if missing:
        raise Damaged(
            f"{temporary}: the pieces of all ranks do not make whole tensors: {missing[0]}"
        )
    # Write the manifest, and rename the folder.
    new = temporary / f"{manifests.NAME}.new"
    write_file(new, encode(made), 0, point, "manifest")
    with naming(final):
        point("rename manifest", 0)
        os.rename(new, temporary / manifests.NAME)
        point("fsync folder", 0)
        sync_folder(temporary)
        point("commit", 0)
        fence.check()
        try:
            os.rename(temporary, final)
        except FileNotFoundError:
            fence.check()  # its message names the process that has the run now
            raise
        point("fsync parent", 0)
        sync_folder(final.parent)
    try:
        _hint(final, fence, point)
    except OSError as error:
        return [f"the hint 'latest' was not written, which no run depends on: {_cause(error)}"]
    return []


def _prune(
    checkpoints: Path, keep: Keep, step: int, fence: Fence, point: Point
) -> tuple[list[int], list[str]]:
    """Remove older checkpoints: (steps that were removed, a note where one could not be). The new
    checkpoint is valid in either case.
    """
    try:
        return prune(checkpoints, keep, step, fence, point), []
    except OSError as error:
        return [], [f"older checkpoints were not removed: {_cause(error)}"]


def _hint(final: Path, fence: Fence, point: Point) -> None:
    """Write the file `latest` for people and other tools; resuming never reads it."""
    new = final.parent / "latest.new"
    new.unlink(missing_ok=True)
    write_file(new, f"{final.name}\n".encode(), 0, point, "hint")
    point("rename hint", 0)
    fence.check()
    with naming(new):
        os.rename(new, final.parent / "latest")
    sync_folder(final.parent)
