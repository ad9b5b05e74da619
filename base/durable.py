"""Durable files: after a power cut a file is there whole under its name, or it is not there.

Rule: content reaches the disk before the name that makes it valid, and the name reaches the disk
before anything that relies on it. No torch.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file whole, replacing an older one of that name. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` durable. Raises OSError with the path."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make all files and names below `folder` durable. Raises OSError."""
    for place, _, files in os.walk(folder):
        for name in files:
            with open(Path(place, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))
