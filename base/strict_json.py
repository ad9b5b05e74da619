"""Strict reading of a JSON file: RFC 8259, UTF-8 without byte-order mark, no key twice.

Comments, trailing commas and NaN are refused. Python's reader keeps the last of two equal keys and
DeepSpeed's accepts comments; a file that passes here means the same to both. Every refusal names
line and column, both counted from 1.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from base.errors import UserError

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


def read(path: Path, shown: str) -> dict[str, Any]:
    """The object in the file; `shown` is its name in messages. Raises UserError."""
    # Read UTF-8 text.
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{shown}: {error.strerror}") from None
    if raw.startswith(b"\xef\xbb\xbf"):
        raise UserError(f"{shown}: line 1 column 1: a byte-order mark; save as UTF-8 without BOM")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise UserError(f"{shown}: line {line} column {column}: not UTF-8 text") from None
    # Parse it.
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise UserError(f"{shown}: nested too deeply") from None
    except json.JSONDecodeError as error:
        reason, position = _reason(text, error)
        raise UserError(f"{shown}: {_place(text, position)}: {reason}") from None
    except _NotANumber as error:
        position = text.find(str(error))
        raise UserError(f"{shown}: {_place(text, position)}: {error} is not JSON") from None
    except ValueError:  # Python reads no integers of more than 4300 digits
        position = re.search(r"\d{4000}", text).start()
        raise UserError(f"{shown}: {_place(text, position)}: a number of too many digits") from None
    if not isinstance(value, dict):
        raise UserError(f"{shown}: line 1 column 1: must be an object, {{...}}")
    twice = duplicates(text)
    if twice:
        raise UserError(
            *(f"{shown}: {_place(text, at)}: key {key} is given twice" for key, at in twice)
        )
    return value


def duplicates(text: str) -> list[tuple[str, int]]:
    """(key, offset) of each second appearance of a key in one object of valid JSON."""
    found = []
    open_objects: list[set[str] | None] = []
    tokens = list(TOKEN.finditer(text))
    for token, following in itertools.pairwise(tokens):
        mark = token.group()
        if mark == "{":
            open_objects.append(set())
        elif mark == "[":
            open_objects.append(None)
        elif mark in "}]":
            open_objects.pop()
        elif mark.startswith('"') and following.group() == ":":
            keys = open_objects[-1]
            assert keys is not None, "a key outside an object in valid JSON"
            key = json.loads(mark)
            if key in keys:
                found.append((mark, token.start()))
            keys.add(key)
    return found


class _NotANumber(ValueError):
    pass


def _no_constant(name: str) -> None:
    raise _NotANumber(name)


def _reason(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """(reason, offset) of a syntax error.

    Python reports the place after a comment or a trailing comma; this names the comment or comma.
    """
    rest = text[error.pos :].lstrip()
    at = len(text) - len(rest)
    before = text[:at].rstrip()
    if rest.startswith(("//", "/*", "#")):
        return "comments are not JSON", at
    if rest.startswith(("}", "]", ",")) and before.endswith(","):
        return "a trailing comma", len(before) - 1
    return error.msg, error.pos


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"line {line} column {column}"
