"""environment.json: the conditions of every start: code, versions, hardware, layout, recipe.

    {"commit": ..., "diff": {...}, "torch": ..., "layout": {...}, "recipe": {...},
     "segment": 1, "after_step": 80, "began": "2026-...", "earlier": [{...}, ...]}

With it, another person can put the same code and the same layout together again. The newest start
stands at the top; earlier starts with other conditions follow under `earlier`, oldest first.
Uncommitted changes are kept as a diff of limited size. Files that git does not track are named with
their hashes and never copied. Text that looks like a secret is masked, and `reason` says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from base.durable import replace_file
from base.redaction import redact, redacted, secret_values
from record.history import now
from record.run_folder import device_name, processor, versions

FILE = "environment.json"
MOST_DIFF_BYTES = 256 << 10
MOST_UNTRACKED = 200  # files that are named
MOST_HASHED_BYTES = 16 << 20  # size of the largest file that is hashed
GIT_S = 30  # time limit of one git command: a start does not wait for a slow shared disk
# Files that usually hold secrets. Their diff is not recorded, even where git tracks them.
SECRET_FILES = (".env*", "*.pem", "*.key", "id_rsa*", "*credentials*", ".netrc")
# Fields that say when and where the conditions began to hold, not what they are.
PLACE = ("segment", "after_step", "began", "earlier")


def environment(root: Path, device: Any) -> dict[str, Any]:
    """Commit, uncommitted changes, versions and hardware; `device` = torch.device of rank 0."""
    import torch  # here, because the launcher uses parts of this package and imports no torch

    return {
        **code(root),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": versions(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": processor(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": device_name(device),
    }


def code(root: Path) -> dict[str, Any]:
    """The commit of `root` and its uncommitted changes; nulls where `root` is no repository."""
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.decode().rstrip("\n")).resolve() != root.resolve():
        return {"commit": None, "uncommitted_changes": False, "diff": None, "untracked": {}}
    commit = git(root, "rev-parse", "HEAD")
    unknown = untracked(root)
    changed = difference(root)
    return {
        "commit": None if commit is None else commit.decode().strip(),
        "uncommitted_changes": changed is not None or bool(unknown),
        "diff": changed,
        "untracked": unknown,
    }


def difference(root: Path) -> dict[str, Any] | None:
    """Uncommitted changes of tracked files, as `git apply` takes them; None = there are none.

    `text` is null, and `reason` says why, where it would not be the whole truth.
    """
    secret = [f":(exclude,glob)**/{name}" for name in SECRET_FILES]
    whole = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color")
    if whole is None:
        reason = f"git diff failed, or took more than {GIT_S} s"
        return {"sha256": None, "bytes": None, "text": None, "reason": reason}
    if not whole:
        return None
    data = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color", "--", ".", *secret)
    found = {"sha256": hashlib.sha256(whole).hexdigest(), "bytes": len(whole), "text": None}
    if data is None or len(data) > MOST_DIFF_BYTES:
        return found | {"reason": f"larger than {MOST_DIFF_BYTES} bytes"}
    text = data.decode("utf-8", "replace")
    masked = redact(text, secret_values(os.environ))
    if masked.encode() != whole:
        return found | {"text": masked, "reason": "what looks like a secret is left out"}
    return found | {"text": text, "reason": None}


def untracked(root: Path) -> dict[str, str | None]:
    """Files that git neither tracks nor ignores: name -> start of the SHA-256, None where large."""
    listed = git(root, "ls-files", "--others", "--exclude-standard", "-z") or b""
    names = [name for name in listed.decode("utf-8", "replace").split("\0") if name]
    found: dict[str, str | None] = {}
    for name in names[:MOST_UNTRACKED]:
        found[name] = short_hash(root / name)
    if len(names) > MOST_UNTRACKED:
        found[f"and {len(names) - MOST_UNTRACKED} more"] = None
    return found


def short_hash(path: Path) -> str | None:
    """The first 16 digits of a file's SHA-256; None where it cannot be read, or is large."""
    try:
        if path.stat().st_size > MOST_HASHED_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def record(folder: Path, found: dict[str, Any], segment: int, after_step: int) -> None:
    """Record the conditions of a start, unless the segment's last start had the same."""
    known = read(folder)
    same = [entry for entry in known if entry.get("segment") == segment][-1:]
    plain = redacted(json.loads(json.dumps(found)), secret_values(os.environ))
    if same and conditions(same[0]) == plain:
        return
    place = {"segment": segment, "after_step": after_step, "began": now()}
    text = json.dumps({**plain, **place, "earlier": known}, indent=2) + "\n"
    replace_file(folder / FILE, text.encode())


def read(folder: Path) -> list[dict[str, Any]]:
    """The conditions of a run's starts, oldest first; none where the file is absent or damaged."""
    try:
        newest = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return [*newest.get("earlier", []), {k: v for k, v in newest.items() if k != "earlier"}]
    except (OSError, ValueError, AttributeError):
        return []


def conditions(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry without the fields that say when and where it began."""
    return {key: value for key, value in entry.items() if key not in PLACE}


def git(root: Path, *arguments: str) -> bytes | None:
    """Output of a git command, or None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
