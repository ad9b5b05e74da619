"""The line files of a run: one JSON object per line, each with a digest of its own text.

    {"segment": 0, "step": 17, "loss": 4.25, "digest": "0123456789abcdef"}

    fields -> encode -> append (whole, or not at all) -> file -> base.tail -> decode -> fields

Rule: a line is whole or it is not there. A kill leaves at most a part of the last line, without a
newline: readers ignore it, and the next writer removes it (`drop_torn_line`). The digest is the
first half of xxh3-128 over all bytes of the line before `, "digest"`; lines of older versions have
none.

JSON knows no NaN and no infinity: such a number is written as null, and an extra field `non_finite`
lists the names: {"loss": null, "non_finite": ["loss"]}.
"""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from base.tail import whole_bytes

Line = dict[str, Any]

DIGEST = re.compile(rb', "digest": "([0-9a-f]{16})"}')  # the end of a line
LONGEST_END = 32  # bytes that this end takes, and a newline


def encode(fields: Mapping[str, Any]) -> bytes:
    """`fields` as one line, with digest and newline.

    Raises TypeError for what is no plain number, text, list or mapping, such as a tensor.
    """
    non_finite: list[str] = []
    line = {name: _plain(value, name, non_finite) for name, value in fields.items()}
    if non_finite:
        line["non_finite"] = non_finite
    body = json.dumps(line, allow_nan=False).encode()[:-1]
    return body + f', "digest": "{digest(body)}"}}\n'.encode()


def _plain(value: Any, name: str, non_finite: list[str]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if math.isfinite(value):
            return float(value)
        non_finite.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    raise TypeError(
        f"{name} is a {type(value).__name__}: only plain numbers, text, lists and mappings"
    )


def digest(body: bytes) -> str:
    """16 hexadecimal digits for the text of a line, without its last brace."""
    return xxhash.xxh3_128_digest(body)[:8].hex()


def has_digest(text: bytes) -> bool:
    """True where a line ends with a digest, right or wrong."""
    return DIGEST.search(text, max(0, len(text) - LONGEST_END)) is not None


def decode(text: bytes, needs_digest: bool = False) -> Line:
    """The fields of a line, given with or without its newline; the digest is checked and removed.

    Raises ValueError where text and digest disagree, for a line without one where `needs_digest`,
    and for what is no JSON object; NaN and Infinity, which Python would read, are no JSON.
    """
    text = text.removesuffix(b"\n")
    if needs_digest or has_digest(text):
        end = DIGEST.search(text, max(0, len(text) - LONGEST_END + 1))
        body = text[: end.start()] if end else text.removesuffix(b"}")
        if end is None or end.end() != len(text) or end[1].decode() != digest(body):
            stands = f"the digest {end[1].decode()}" if end else "no digest"
            raise ValueError(f"it has {stands}, its text gives {digest(body)}")
        text = body + b"}"
    line = json.loads(text, parse_constant=_no_constant)
    if not isinstance(line, dict):
        raise ValueError(f"a {type(line).__name__} is no JSON object")
    return line


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def append(file: BinaryIO, line: bytes) -> None:
    """Append an encoded line to a file opened with "ab" and buffering=0, in one write.

    Two processes' lines never mix. On a full disk a write can end early without an error; the part
    is then removed again. Raises OSError.
    """
    written = file.write(line)
    if written != len(line):
        file.truncate(os.fstat(file.fileno()).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def append_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Append one line to the file `path`, which need not exist. Raises OSError."""
    with open(path, "ab", buffering=0) as file:
        append(file, encode(fields))


def drop_torn_line(path: Path) -> int:
    """Remove the part of a last line that a kill left; the number of bytes removed."""
    if not path.is_file():
        return 0
    size, kept = path.stat().st_size, whole_bytes(path)
    if kept != size:
        os.truncate(path, kept)
    return size - kept
