"""The code that a run was trained with, put together again from its record.

    commit = HEAD and the same diff -> this folder     else -> git worktree of the commit + the diff

The one rule: the folder of the project is never touched; a worktree is made beside it, sees its
corpora/ and runs/, and goes away at the end. What cannot be had again is said, not guessed.
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
    """Where the recorded code stands; `notes` say in what it may differ from the one recorded."""

    root: Path
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def recorded_code(
    root: Path, entries: Sequence[dict[str, Any]], log: Callable[[str], None]
) -> Iterator[Code]:
    """The code of the first of `entries` (conditions of starts, see record.environment). Raises
    UserError where a commit is known but cannot be had.
    """
    wanted, now = entries[0], code(root)
    notes = several(entries)
    if wanted["commit"] is None:
        notes.append("the record knows no commit: the code is that of now")
    elif any(wanted[name] != now[name] for name in ("commit", "diff", "untracked")):
        with worktree(root, wanted, log) as (place, more):
            yield Code(place, notes + more)
        return
    yield Code(root, notes)


def several(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A note where the code changed between starts of the run."""
    kinds = {(one["commit"], (one["diff"] or {}).get("sha256")) for one in entries}
    if len(kinds) == 1:
        return []
    return [f"it was trained with {len(kinds)} versions of the code; the first is used for all"]


@contextlib.contextmanager
def worktree(
    root: Path, wanted: dict[str, Any], log: Callable[[str], None]
) -> Iterator[tuple[Path, list[str]]]:
    """A worktree of a commit with the recorded diff on top, and notes."""
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
    """Put the recorded uncommitted changes on top; a note where that is not possible."""
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
    """Copy files that git did not know then, where they are the same now; notes on the others."""
    notes = []
    for name, known in wanted.items():
        source, to = root / name, place / name
        if known is None or short_hash(source) != known:
            notes.append(f"{name}, which git did not know, is not here as it was")
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to)
    return notes


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a git command."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
