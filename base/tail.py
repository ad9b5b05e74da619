"""Lines of a file, read from its end, in a time that does not grow with the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 16


def newest_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte at which it begins, line without its newline) of each whole line, newest first.

    Bytes after the last newline are no line. Yields nothing where there is no file.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        at, rest, is_whole = file.seek(0, os.SEEK_END), b"", False
        while at > 0:
            size = min(max(BLOCK_BYTES, len(rest)), at)  # a file of zeros is one long line
            at -= size
            file.seek(at)
            data = file.read(size) + rest
            if not is_whole:
                data = data[: data.rfind(b"\n") + 1]
                is_whole = bool(data)
            first, *others = data[:-1].split(b"\n") if data else (b"",)
            begins = at + len(data)
            for line in reversed(others):
                begins -= len(line) + 1
                yield begins, line
            rest = data[: len(first) + 1]
        if rest:
            yield 0, rest[:-1]


def whole_bytes(path: Path) -> int:
    """Number of bytes of a file up to the end of its last whole line."""
    begins, line = next(newest_lines(path), (-1, b""))
    return begins + len(line) + 1
