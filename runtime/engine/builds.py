"""Folder and locks of the extensions that torch compiles.

    own folder     .cache/torch_extensions/py3.11-torch2.13.0+cpu-deepspeed0.19.8/<operator>/
    lock           <operator>/lock, held with flock by the process that builds

Rule: a lock never blocks a start without a message. torch's own lock is a file: a killed build
leaves it behind, and later starts wait for it without an end; two environments that share a folder
disturb each other. Here each environment has a folder of its own. The lock of a dead process is
taken over at once. While a live process holds the lock, the waiting process prints so. A lock of
torch's own kind does not name its process, so it is waited for only until nothing beside it has
changed for IDLE_LIMIT_S.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from base.errors import UserError
from base.paths import CACHE

VARIABLE = "TORCH_EXTENSIONS_DIR"
IDLE_LIMIT_S = 900.0  # one file takes a compiler minutes, never a quarter of an hour
SAY_AFTER_S = 5.0
SAY_EVERY_S = 60.0
LOOK_EVERY_S = 0.2
MARK = b"held with flock\n"  # content of our locks; torch's are empty


def prepare() -> None:
    """Choose the folder, unless the user has chosen one; make torch use the locks of this file."""
    from torch.utils.file_baton import FileBaton

    if VARIABLE not in os.environ:
        folder = own_folder()
        # Where the project is read-only, torch's own choice below the home stays.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                os.environ[VARIABLE] = str(folder)
    FileBaton.try_acquire = acquire


def own_folder() -> Path:
    """The folder of this environment; its name has the three versions that a build depends on."""
    versions = [f"py{sys.version_info[0]}.{sys.version_info[1]}"]
    for package in ("torch", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(package + importlib.metadata.version(package))
    return CACHE / "torch_extensions" / "-".join(versions)


def acquire(baton, log: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> bool:
    """Take the lock of a `FileBaton`, after waiting for its holder; returns True.

    The build that follows finds what another process has built meanwhile. Raises UserError where
    the lock is torch's own and nothing beside it has changed for IDLE_LIMIT_S.
    """
    path = Path(baton.lock_file_path)
    began = time.monotonic()
    say_at = began + SAY_AFTER_S
    while True:
        with contextlib.suppress(FileExistsError):
            baton.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            with contextlib.suppress(OSError):  # a file system without locks: as torch does it
                fcntl.flock(baton.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(baton.fd, MARK)
            return True
        if remove_abandoned(path):
            log(f"operator {path.parent.name}: a killed build left its lock behind; building anew")
            continue
        if (quiet_s := idle_s(path.parent)) > IDLE_LIMIT_S:
            raise UserError(
                f"operator {path.parent.name}: another process holds {path} and has built nothing"
                f" for {quiet_s / 60:.0f} min; it was probably killed: remove that file, or let"
                " make doctor do it"
            )
        if time.monotonic() > say_at:
            log(
                f"operator {path.parent.name} is being built by another process; waiting for its"
                f" lock since {time.monotonic() - began:.0f} s ({path})"
            )
            say_at += SAY_EVERY_S
        time.sleep(LOOK_EVERY_S)


def remove_abandoned(path: Path) -> bool:
    """Remove a lock of this kind whose process is gone; returns True where it was removed."""
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # it is held, or cannot be asked
        # Under the lock: another process may have removed this file and made a new one.
        with contextlib.suppress(FileNotFoundError):
            if file.read() == MARK and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                path.unlink()
                return True
    return False


def idle_s(folder: Path) -> float:
    """Seconds since anything in a build folder changed."""
    changed = []
    for path in (folder, *folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            changed.append(path.stat().st_mtime)
    return time.time() - max(changed, default=time.time())
