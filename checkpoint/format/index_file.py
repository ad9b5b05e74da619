"""The small files of a checkpoint: names of a rank's files, and its index as JSON.

    rank-00007.bin     tensors of rank 7, written and read by storage.py
    rank-00007.json    its index: which pieces lie where, a digest of each block of the .bin file

Rule: the text of an index is compared with the digest in the manifest before it is parsed. No
torch is imported here, so that commands which only look at checkpoints start at once. Units: bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from checkpoint.format.blocks import Damaged, check_size, digest, opened, root, split_digests

# Fields of an index, with their types.
COLUMNS = {"format": int, "rank": int, "bytes": int, "groups": list, "digests": str, "local": dict}

# A hook that is called before each open, write, fsync, rename, exchange and commit, with the name
# of that moment and the rank. Tests kill or delay a process there.
Point = Callable[[str, int], None]


def nothing(name: str, rank: int) -> None:
    """The usual `point`: does nothing."""


def data_name(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{rank:05d}.bin"


def index_name(rank: int) -> str:
    """Return the name of the file with a rank's index."""
    return f"rank-{rank:05d}.json"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to OSErrors raised inside, also by calls that know only a descriptor."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_file(path: Path, data: bytes, rank: int, point: Point, what: str) -> None:
    """Create a file with `data` and fsync it. Raises OSError with the path."""
    with naming(path):
        point(f"open {what}", rank)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            point(f"write {what}", rank)
            write_all(descriptor, memoryview(data))
            point(f"fsync {what}", rank)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`; one call of os.write may write less than it was given."""
    while data:
        data = data[os.write(descriptor, data) :]


def read_index(folder: Path, rank: int, entry: Sequence) -> dict:
    """Read the index of a rank. It is compared with its manifest `entry` [bytes, digest] before it
    is parsed. Raises Damaged.
    """
    path = folder / index_name(rank)
    return parse_index(read_checked(path, *entry), path)


def parse_index(text: bytes, path: Path) -> dict:
    """Parse the checked text of an index. Raises Damaged unless it has exactly the fields of
    one.
    """
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: it is not JSON ({error})") from None
    if not isinstance(index, dict) or {k: type(v) for k, v in index.items()} != COLUMNS:
        raise Damaged(f"{path}: it is not the index of a rank")
    return index


def read_checked(path: Path, num_bytes: int, expected: str) -> bytes:
    """Read a whole small file. Raises Damaged unless it has the size and digest of the manifest."""
    with opened(path) as descriptor:
        check_size(descriptor, path, num_bytes)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(num_bytes + 1)
    if len(data) != num_bytes or digest(data).hex() != expected:
        raise Damaged(f"{path}: differs from its digest", kind="flipped")
    return data


def file_digests(folder: Path, rank: int, index: dict, entry: Sequence) -> list[bytes]:
    """Return the digests of the blocks of a rank's data file. Raises Damaged unless they agree with
    the manifest.
    """
    path = folder / data_name(rank)
    num_bytes, expected = entry
    digests = split_digests(index["digests"], num_bytes, path)
    if index["bytes"] != num_bytes or root(digests) != expected:
        raise Damaged(f"{path}: its index and the manifest disagree")
    return digests
