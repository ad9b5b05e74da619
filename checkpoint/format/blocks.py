"""Files of a checkpoint are sequences of blocks, each with a digest: any part can be checked alone.

Rule: bytes are compared with their digest before they are interpreted. Files are opened without
following links. Damage raises `Damaged`, with one line per problem that gives path and cause.
Digests are xxh3-128 (xxhash.com); they detect accidents, not forgery. Units: bytes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from base.values import counted

# Small enough that reading one piece of a parameter which a thousand ranks share costs little more
# than the piece itself; large enough that digests are a 60,000th of the data.
BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16
# Blocks read or written at once.
WINDOW_BYTES = 16 * BLOCK_BYTES
# Kinds of damage, in this order: the bytes differ; there are too few, or too many; the file is
# missing; it is a link, a pipe, or a name that leads elsewhere; the disk reports an error; the
# writer had lost the run when it committed; the bytes are whole, but not in this format.
KINDS = ("flipped", "truncated", "grown", "missing", "unsafe", "unreadable", "late", "malformed")
KIND_OF_ERROR = {errno.ENOENT: "missing", errno.ELOOP: "unsafe", errno.ENXIO: "unsafe"}


class Problem(str):
    """One line that describes damage, with its kind and the name of the file, where it is known."""

    kind: str
    file: str

    def __new__(cls, text: str, kind: str = "malformed", file: str = "") -> Problem:
        """`kind` is one of KINDS."""
        problem = super().__new__(cls, text)
        problem.kind, problem.file = kind, file
        return problem


class Damaged(Exception):
    """A checkpoint differs from what was written. `problems` has one line for each difference."""

    def __init__(self, *problems: str, kind: str = "malformed"):
        self.problems = [p if isinstance(p, Problem) else Problem(p, kind) for p in problems]
        super().__init__("\n".join(self.problems))


def digest(data) -> bytes:
    """Return the xxh3-128 digest of a buffer, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def root(digests: Sequence[bytes]) -> str:
    """Return the hexadecimal digest of a file, computed from those of its blocks in order."""
    return digest(b"".join(digests)).hex()


def split_digests(text: str, num_bytes: int, path: Path) -> list[bytes]:
    """Split the hexadecimal text of a file's digests. Raises Damaged unless they are as many as a
    file of `num_bytes` has blocks.
    """
    try:
        joined = bytes.fromhex(text)
    except (TypeError, ValueError):
        raise Damaged(f"{path}: its index holds no block digests") from None
    if len(joined) != DIGEST_BYTES * -(-num_bytes // BLOCK_BYTES):
        raise Damaged(
            f"{path}: {num_bytes} bytes need another number of digests than its index has"
        )
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading and give its descriptor. Raises Damaged when it is missing, a
    link, not a regular file, or cannot be read; OSErrors inside become Damaged, too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        kind = KIND_OF_ERROR.get(error.errno, "unreadable")
        raise Damaged(f"{path}: {error.strerror}", kind=kind) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Damaged(f"{path}: not a regular file", kind="unsafe")
        yield descriptor
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}", kind="unreadable") from None
    finally:
        os.close(descriptor)


def check_size(descriptor: int, path: Path, num_bytes: int) -> None:
    """Raise Damaged unless the open file has exactly `num_bytes`."""
    found = os.fstat(descriptor).st_size
    if found != num_bytes:
        kind = "truncated" if found < num_bytes else "grown"
        raise Damaged(f"{path}: {found} bytes where {num_bytes} were written", kind=kind)


def read_blocks(
    descriptor: int, path: Path, first: int, buffer: memoryview, digests: Sequence[bytes]
) -> None:
    """Fill `buffer` with the file from block `first` on, and check each block that is read.

    `buffer` ends where a block or the file ends. Raises Damaged; the buffer then holds nothing
    usable.
    """
    start, done = first * BLOCK_BYTES, 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], start + done)
        except OSError as error:
            text = f"{path}: {error.strerror} at byte {start + done}"
            raise Damaged(text, kind="unreadable") from None
        if count == 0:
            raise Damaged(f"{path}: ends at byte {start + done}", kind="truncated")
        done += count
    bad = [
        first + i
        for i in range(-(-len(buffer) // BLOCK_BYTES))
        if digest(buffer[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) != digests[first + i]
    ]
    if bad:
        where = f"{counted(len(bad), 'block')}, the first at byte {bad[0] * BLOCK_BYTES}"
        raise Damaged(f"{path}: differs from its digests in {where}", kind="flipped")


def check_file(
    path: Path, num_bytes: int, digests: Sequence[bytes], blocks: Sequence[int] | None = None
) -> None:
    """Read a file, or only `blocks` of it, and compare with its digests. Raises Damaged."""
    buffer = memoryview(bytearray(min(WINDOW_BYTES, max(num_bytes, 1))))
    with opened(path) as descriptor:
        check_size(descriptor, path, num_bytes)
        per_read = WINDOW_BYTES // BLOCK_BYTES if blocks is None else 1
        for first in range(0, len(digests), per_read) if blocks is None else blocks:
            size = min(per_read * BLOCK_BYTES, num_bytes - first * BLOCK_BYTES)
            read_blocks(descriptor, path, first, buffer[:size], digests)
