"""Epochs: each attempt of a run takes the next number, and only the newest number may write.

    runs/<run>/lease/00000007.json    who took epoch 7, and which checkpoints that attempt found

Rule: an epoch belongs to the process that created its file, and it ends when the next file is
created. Creating a file that must not exist yet is atomic on every file system. Rank 0 of each
attempt creates one. Clocks and locks do not decide. Units: whole numbers; nanoseconds where named.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from base.durable import replace_file
from base.errors import Shared

FOLDER = "lease"
PATTERN = re.compile(r"(\d{8,18})\.json", re.ASCII)
# Number of older epoch files that are kept, for people who ask which attempt wrote what.
KEPT = 64


class Fenced(Shared):
    """Another attempt of the run has begun, so this one must write nothing more. Raised on all
    ranks.
    """


class Fence(Protocol):
    """The check that a writer makes before anything becomes final."""

    epoch: int

    def check(self) -> None:
        """Raise Fenced when another attempt has begun."""


class Open:
    """Fence of a writer from which nobody can take over, as in tests."""

    epoch = 0

    def check(self) -> None:
        """Do nothing: this writer is always allowed to write."""


@dataclass(frozen=True)
class Holder:
    """The process that took an epoch; host, namespace, pid and start time identify it."""

    epoch: int
    token: str  # random, because two folders of one name may count the same epochs
    host: str  # host name, for people
    boot: str  # boot id of the host's kernel
    namespace: str  # of process ids: each container of a host has its own
    pid: int
    start: str  # when the process started, in the kernel's clock
    lock: int  # inode of the lock file that it held; 0 = this file system has no locks
    folder: int  # inode of the run's lease folder, so that nobody holds a copied run
    family: str = ""  # id of the supervisor, whose starts succeed each other
    is_released: bool = False
    # Checkpoints that existed when this attempt began: name -> epoch that wrote it; None means that
    # its manifest was unreadable. A checkpoint of an older epoch that is not listed here was
    # committed by a writer that had already lost the run.
    found: dict[str, int | None] | None = None

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host} (epoch {self.epoch})"


def path_of(run_folder: Path, epoch: int) -> Path:
    """Return the path of an epoch's file."""
    return run_folder / FOLDER / f"{epoch:08d}.json"


def epochs(run_folder: Path) -> list[int]:
    """Return all epochs taken so far, ascending. Opening the folder makes network file systems
    refresh their cache.
    """
    try:
        with os.scandir(run_folder / FOLDER) as entries:
            names = [PATTERN.fullmatch(entry.name) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name.group(1)) for name in names if name)


def newest(run_folder: Path) -> int:
    """Return the epoch that may write; 0 = none was ever taken."""
    return max(epochs(run_folder), default=0)


def read(run_folder: Path, epoch: int) -> Holder | None:
    """Return the holder of `epoch`; None where the file is incomplete, for example because its
    process died while it wrote. Raises OSError.
    """
    text = path_of(run_folder, epoch).read_bytes()
    try:
        values = json.loads(text)
        return Holder(**values) if values["epoch"] == epoch else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def create(run_folder: Path, holder: Holder) -> bool:
    """Take an epoch. Returns False where another process was first. Raises OSError."""
    path = path_of(run_folder, holder.epoch)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(_text(holder))
        file.flush()
        os.fsync(file.fileno())
    return True


def rewrite(run_folder: Path, holder: Holder) -> None:
    """Replace the file of an epoch that this process holds. Raises OSError."""
    replace_file(path_of(run_folder, holder.epoch), _text(holder))


def _text(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder)) + "\n").encode()


def forget(run_folder: Path, epoch: int) -> None:
    """Remove the files of all but the newest KEPT epochs."""
    for old in epochs(run_folder):
        if old <= epoch - KEPT:
            path_of(run_folder, old).unlink(missing_ok=True)


def is_late(run_folder: Path, name: str, epoch: int) -> int | None:
    """Return the newer epoch that already had the run when the checkpoint `name` of `epoch` was
    committed; None for a checkpoint that is valid.
    """
    for number in reversed(epochs(run_folder)):
        holder = read(run_folder, number)
        if holder is not None and holder.found is not None:
            known = holder.found.get(name, -1)
            return None if epoch >= number or known in (None, epoch) else number
    return None
