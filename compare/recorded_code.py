"""Restores the code that a run was trained with, from the run's record.

    commit = HEAD and the same diff -> this folder     else -> git worktree of the commit + the diff

Rule: the project's own folder is never changed. The worktree is made in a temporary folder, sees
corpora/ and runs/ through links, and is removed at the end. Code that cannot be restored is
reported, never guessed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import UserError
from record.environment import code, short_hash

SHARED = ("corpora", "runs")


@dataclass
class Code:
    """Folder of the restored code; `notes` name what may differ from the recorded code."""

    root: Path
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def recorded_code(
    root: Path, entries: Sequence[dict[str, Any]], log: Callable[[str], None]
) -> Iterator[Code]:
    """Restore the code of the first of `entries` for the time of the block.

    `entries` are the recorded conditions of the run's starts (record.environment). Raises UserError
    where the recorded commit is not in this repository.
    """
    wanted, now = entries[0], code(root)
    notes = several(entries)
    if wanted["commit"] is None:
        notes.append("the record names no commit: the code of this checkout is used")
    elif any(wanted[name] != now[name] for name in ("commit", "diff", "untracked")):
        with worktree(root, wanted, log) as (place, more):
            yield Code(place, notes + more)
        return
    yield Code(root, notes)


def several(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note where the code changed between two starts of the run."""
    kinds = {(one["commit"], (one["diff"] or {}).get("sha256")) for one in entries}
    if len(kinds) == 1:
        return []
    return [f"it was trained with {len(kinds)} versions of the code; the first is used for all"]


@contextlib.contextmanager
def worktree(
    root: Path, wanted: dict[str, Any], log: Callable[[str], None]
) -> Iterator[tuple[Path, list[str]]]:
    """Make a worktree of the recorded commit and diff for the time of the block; yields its folder
    and notes on what may differ.
    """
    commit = wanted["commit"]
    place = Path(tempfile.mkdtemp(prefix="reproduce-")) / root.name
    done = git(root, "worktree", "add", "--detach", str(place), commit)
    if done.returncode:
        shutil.rmtree(place.parent, ignore_errors=True)
        raise UserError(
            f"the run was trained at commit {commit}, which cannot be checked out here:"
            f" {' '.join(done.stderr.split())}; fetch it first"
        )
    try:
        log(f"code: commit {commit[:12]} in {place}")
        notes = [*apply(place, wanted.get("diff")), *untracked(root, place, wanted["untracked"])]
        for name in SHARED:
            (root / name).mkdir(exist_ok=True)
            (place / name).symlink_to(root / name)
        yield place, notes
    finally:
        for name in SHARED:
            (place / name).unlink(missing_ok=True)
        git(root, "worktree", "remove", "--force", str(place))
        shutil.rmtree(place.parent, ignore_errors=True)


def apply(place: Path, diff: dict[str, Any] | None) -> list[str]:
    """Apply the recorded uncommitted changes; returns a note where they are not on record."""
    if diff is None:
        return []
    if diff["text"] is None or diff["reason"] is not None:
        return [f"its uncommitted changes are not on record ({diff['reason']})"]
    done = subprocess.run(
        ["git", "-C", str(place), "apply", "--whitespace=nowarn", "-"],
        input=diff["text"].encode(), capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"the recorded diff does not apply: {done.stderr.decode().strip()}")
    return []


def untracked(root: Path, place: Path, wanted: dict[str, str | None]) -> list[str]:
    """Copy the untracked files of the record that are unchanged; returns notes on the others."""
    notes = []
    for name, known in wanted.items():
        source, to = root / name, place / name
        if known is None or short_hash(source) != known:
            notes.append(f"{name}, an untracked file of the recorded run, is missing or changed")
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to)
    return notes


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in `root` and return its result; a failure raises nothing."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
