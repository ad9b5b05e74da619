"""Epochs: whose turn it is to write a run, as files that are made once.

    runs/<run>/lease/00000007.json    who took epoch 7, and which checkpoints that attempt found

The one rule: an epoch belongs to whoever made its file, and ends when the next file is made; making
a file that must not exist is one step on every file system. Rank 0 of each attempt makes one.
Nobody
else's word counts: not the clock, not a lock. Units: whole numbers; nanoseconds where named.
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
# Files of older epochs that stay, for people who ask which attempt wrote what.
KEPT = 64


class Fenced(Shared):
    """Another attempt of the run has begun: this one must write nothing more. Raised on all
    ranks.
    """


class Fence(Protocol):
    """What a writer asks before it makes anything final."""

    epoch: int

    def check(self) -> None:
        """Raise Fenced when another attempt has begun."""


class Open:
    """Of a writer that nobody can take over from, as in tests."""

    epoch = 0

    def check(self) -> None:
        """Nothing to ask."""


@dataclass(frozen=True)
class Holder:
    """Who took an epoch. A process is its host, its place in that host, its number, its start."""

    epoch: int
    token: str  # random: two folders of one name may count the same epochs
    host: str  # for people
    boot: str  # of the host's kernel
    namespace: str  # of process numbers: containers of one host have their own
    pid: int
    start: str  # of the process, in the kernel's clock
    lock: int  # inode of the lock file that it held; 0 = this file system has no locks
    folder: int  # inode of the run's lease folder: a copied run is held by nobody
    family: str = ""  # of starts by one supervisor, of which each succeeds the one before
    is_released: bool = False
    # Checkpoints there were when this attempt began: name -> epoch that wrote it, None =
    # unreadable.
    # A later one of an older epoch is the work of a writer that had lost the run.
    found: dict[str, int | None] | None = None

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host} (epoch {self.epoch})"


def path_of(run_folder: Path, epoch: int) -> Path:
    """The file of an epoch."""
    return run_folder / FOLDER / f"{epoch:08d}.json"


def epochs(run_folder: Path) -> list[int]:
    """All that were taken, ascending. Opening the folder makes network file systems look again."""
    try:
        with os.scandir(run_folder / FOLDER) as entries:
            names = [PATTERN.fullmatch(entry.name) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name.group(1)) for name in names if name)


def newest(run_folder: Path) -> int:
    """The epoch that may write; 0 = none was ever taken."""
    return max(epochs(run_folder), default=0)


def read(run_folder: Path, epoch: int) -> Holder | None:
    """Who took `epoch`; None where the file does not say, as when its maker died making it.

    Raises OSError.
    """
    text = path_of(run_folder, epoch).read_bytes()
    try:
        values = json.loads(text)
        return Holder(**values) if values["epoch"] == epoch else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def create(run_folder: Path, holder: Holder) -> bool:
    """Take an epoch; False where somebody else was first. Raises OSError."""
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
    """Say more in the file of an epoch that one holds. Raises OSError."""
    replace_file(path_of(run_folder, holder.epoch), _text(holder))


def _text(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder)) + "\n").encode()


def forget(run_folder: Path, epoch: int) -> None:
    """Remove the files of epochs long past."""
    for old in epochs(run_folder):
        if old <= epoch - KEPT:
            path_of(run_folder, old).unlink(missing_ok=True)


def is_late(run_folder: Path, name: str, epoch: int) -> int | None:
    """The epoch that had the run already when the checkpoint `name` of `epoch` appeared; None for a
    checkpoint to be believed.
    """
    for number in reversed(epochs(run_folder)):
        holder = read(run_folder, number)
        if holder is not None and holder.found is not None:
            known = holder.found.get(name, -1)
            return None if epoch >= number or known in (None, epoch) else number
    return None
