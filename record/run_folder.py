"""The folder of a run, `runs/<run>/`: made once, by rank 0, just before training.

    recipe.yaml  layout.json  ds_config.json  environment.json      description of the run
    plan.json                                                       what the plan chose, predicts
    metrics.jsonl  events.jsonl  ledger/  tensorboard/              what happened
    .lock  lease/                                                   who may write

Rule: a run folder has one writer. A lock keeps out other starts on hosts that share locks, and the
lease keeps out all others. Nothing in it is overwritten by another run, and a refused recipe leaves
no folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from base.durable import replace_file
from base.errors import UserError
from base.exits import DO_NOT_RETRY
from base.redaction import redact, redacted, secret_values
from base.run_variables import FAMILY
from base.values import listed
from checkpoint.format import epochs
from checkpoint.save.lease import Lease, refuse_held, take
from record.presence import LOCK
from record.trust import refuse_unsafe

LOCKS: list[Lock] = []  # held until this process ends
# Files and folders that a continued run appends to. Not the logs: a run can go on without them.
ADDED_TO = (
    LOCK,
    "lease",
    "*.jsonl",
    "checkpoints",
    "ledger",
    "ledger/*",
    "tensorboard",
    "tensorboard/*",
)
# Packages whose version can change a result or a speed.
RECORDED_PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "numpy",
    "hydra-core",
    "tensorboard",
)


def open_folder(folder: Path, documents: dict[str, str | dict[str, Any]], is_fresh: bool) -> Lease:
    """Make `folder`, or open the existing one, and become its only writer.

    This process is the writer for as long as it holds the returned lease. `documents` (name ->
    text, or values for JSON) are written whole. With `is_fresh` an existing folder is moved aside
    first. Raises UserError when another process holds the run.
    """
    try:
        return _open_folder(folder, documents, is_fresh)
    except OSError as error:
        path = error.filename2 or error.filename
        raise UserError(f"run={folder.name}: {path}: {error.strerror}") from None


def _open_folder(folder: Path, documents: dict[str, Any], is_fresh: bool) -> Lease:
    refuse_unwritable(folder)
    refuse_unsafe(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    family = os.environ.get(FAMILY, "")
    if is_fresh and folder.exists():
        with contextlib.closing(
            hold(folder, family=family)
        ) as held:  # whoever writes it must have ended
            refuse_held(folder, held.inode, family)
            os.rename(folder, aside(folder))
    folder.mkdir(mode=0o755, exist_ok=True)
    held = hold(folder, family=family)
    LOCKS.append(held)
    lease = take(folder, held.inode, end_fenced, family)
    for name, content in documents.items():
        text = content
        if not isinstance(content, str):
            text = json.dumps(redacted(content), indent=2) + "\n"
        text = redact(text, secret_values(os.environ))
        replace_file(folder / name, text.encode())
    return lease


def end_fenced(problem: str) -> None:
    """End this process at once, because another attempt writes the run now."""
    print(f"refused: {problem}", file=sys.stderr, flush=True)
    os._exit(DO_NOT_RETRY)


@dataclass(frozen=True)
class Lock:
    """A lock file, locked as long as it is open. `inode` identifies it; 0 = no locks here."""

    file: TextIO
    inode: int

    def close(self) -> None:
        """Unlock."""
        self.file.close()


def hold(folder: Path, kind: int = fcntl.LOCK_EX, family: str = "") -> Lock:
    """Lock a run folder.

    Raises UserError where another process on this host, or on one that shares locks with it, holds
    the lock. The exception is a process of the same supervisor (`family`), which has lost its host.
    """
    file = open(folder / LOCK, "a")  # noqa: SIM115  the lock is held by the open file
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(folder)
        if family and holder and holder.family == family:
            return Lock(file, 0)
        file.close()
        who = f" ({holder})" if holder else ""
        raise UserError(
            f"run={folder.name}: another process is writing {folder}{who}; wait for it"
            f" to end, stop it, or choose another name (run={folder.name}-2)"
        ) from None
    except OSError:
        return Lock(file, 0)  # some network file systems have no locks: only the lease guards then
    return Lock(file, os.fstat(file.fileno()).st_ino)


def _holder(folder: Path) -> epochs.Holder | None:
    """The process that holds the run, as far as the lease says; None where it is not known."""
    try:
        holder = epochs.read(folder, epochs.newest(folder))
    except OSError:
        return None
    return None if holder is None or holder.is_released else holder


def refuse_busy(folder: Path) -> None:
    """Raise UserError when the run is busy, cannot be written, or could be changed by strangers.

    Busy = another process holds it now. Asks for a shared lock, so that ranks that ask at the same
    time do not take each other for a writer.
    """
    refuse_unwritable(folder)
    refuse_unsafe(folder)
    if (folder / LOCK).exists():
        family = os.environ.get(FAMILY, "")
        with contextlib.closing(hold(folder, fcntl.LOCK_SH, family)) as held:
            refuse_held(folder, held.inode, family, wait=False)


def refuse_unwritable(folder: Path) -> None:
    """Raise UserError when the run's folder, or a file it appends to, cannot be written.

    Without this check the first save would find out, which is too late.
    """
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not parent.is_dir():
        raise UserError(f"run={folder.name}: {parent} is no folder; move it away")
    if not is_writable(parent):
        raise UserError(f"run={folder.name}: no permission to write {folder} in {parent}")
    inside = [path for pattern in ADDED_TO for path in sorted(folder.glob(pattern))]
    locked = [path for path in inside if not is_writable(path)]
    if locked:
        names = listed([str(locked[0]), *(path.name for path in locked[1:])], 1)
        raise UserError(
            f"run={folder.name}: no permission to write {names}; have their owner change"
            f" that, or choose another name (run={folder.name}-2)"
        )


def is_writable(path: Path) -> bool:
    """Whether this user may add to a file, or put files into a folder."""
    return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)


def aside(folder: Path) -> Path:
    """A free name beside `folder`, to which its present content can be moved."""
    numbers = (n for n in range(1, 10_000) if not Path(f"{folder}.before-{n}").exists())
    return Path(f"{folder}.before-{next(numbers)}")


def processor() -> str | None:
    """The CPU's name as Linux gives it; None on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def versions() -> dict[str, str | None]:
    """Versions of the packages that can change a result; None where one is not installed."""
    return {name: _version(name) for name in RECORDED_PACKAGES}


def device_name(device: Any) -> str | None:
    """The GPU's name as torch gives it; None for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
