"""The line files of a run (metrics.jsonl, events.jsonl, ...): one strict-JSON object per line.

One rule: a line is whole or it is not there. Lines are appended one by one, each in one write; what
a killed process left half-written at the end of a file is dropped aloud when the next one opens it,
and ignored by readers.

Strict JSON knows no NaN and no infinity: a non-finite number is written as null and its field is
named in an extra field `non_finite`, a list, present only where there is one:
{"loss": null, "non_finite": ["loss"]}.

Units: times are UTC, ISO 8601 with milliseconds and a Z.
"""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from checkpoint.durable import replace_file
from recipes.redaction import redacted, secret_values
from recipes.schema import UserError

TAIL_BYTES = 1 << 17  # more than dozens of lines of metrics
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DEVICES = "devices.jsonl"  # one line per GPU and reading; nothing is removed at a restart
RANKS = "ranks.jsonl"  # own seconds of every rank, every few steps; nothing is removed either
# Fields that every version has written.
METRICS_HAVE, EVENTS_HAVE = ("segment", "step", "life"), ("time", "kind", "life")


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON value")


# One for all lines: json.loads would make one for each, a fifth of its time.
STRICT = json.JSONDecoder(parse_constant=_refuse)


def strict_line(fields: Mapping[str, Any]) -> str:
    """`fields` as one line of strict JSON, with its newline; a tensor is a TypeError."""
    non_finite: list[str] = []

    def plain(value: Any, name: str) -> Any:
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
            return {str(key): plain(item, f"{name}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, f"{name}.{index}") for index, item in enumerate(value)]
        raise TypeError(
            f"{name} is a {type(value).__name__}: only plain numbers, text, lists and mappings"
        )

    record = {name: plain(value, name) for name, value in fields.items()}
    if non_finite:
        record["non_finite"] = non_finite
    return json.dumps(record, allow_nan=False) + "\n"


def append_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Add one line to `path` in a single write, so that two processes' lines never mix."""
    with open(path, "ab", buffering=0) as file:
        write_line(file, strict_line(fields))


def write_line(file: BinaryIO, line: str) -> None:
    """Append a line whole or not at all to an unbuffered file.

    On a full disk a write can end early without an error; the part is then cut off again. Raises
    OSError.
    """
    data = line.encode()
    written = file.write(data)
    if written != len(data):
        file.truncate(os.fstat(file.fileno()).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def repair(path: Path, say: Callable[[str], None] = print) -> bool:
    """Drop the half-written last line of `path`, aloud; True if there was one."""
    if not path.exists():
        return False
    content = path.read_bytes()
    kept = content.rfind(b"\n") + 1
    if kept == len(content):
        return False
    with open(path, "r+b") as file:
        file.truncate(kept)
    say(f"{path}: dropped {len(content) - kept} bytes of a half-written last line")
    return True


def read_lines(path: Path, needed: Collection[str] = ()) -> list[dict[str, Any]]:
    """All records of a line file, each with the fields `needed`; a half-written last line is
    ignored, another is a UserError."""
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    return [read_line(path, f"line {n}", line, needed) for n, line in enumerate(whole, start=1)]


def read_line(path: Path, where: str, line: bytes, needed: Collection[str] = ()) -> dict[str, Any]:
    """One record, found in `path` at `where`. Raises UserError where it is none."""
    try:
        record = parse_line(line)
    except ValueError as problem:
        raise UserError(
            f"{path} {where} is not strict JSON ({problem}); delete that line"
        ) from None
    absent = [name for name in needed if name not in record]
    if absent:
        raise UserError(f"{path} {where} has no {', '.join(absent)}; delete that line")
    return record


def last_lines(path: Path, most: int = 1, needed: Collection[str] = ()) -> list[dict[str, Any]]:
    """The newest records of a line file, however long it is, oldest first: at most `most`, and of
    those what stands whole and undamaged in its last TAIL_BYTES. None where there is no file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    except OSError:
        return []
    _before, *whole = (b"\n" * (size <= TAIL_BYTES) + tail).split(b"\n")[:-1] or [b""]
    found = []
    for line in reversed(whole[-most:]):
        try:
            found.append(read_line(path, "near its end", line, needed))
        except UserError:
            break
    return found[::-1]


def parse_line(line: str | bytes) -> dict[str, Any]:
    """One record, strictly: NaN and Infinity, which json.loads would accept, are a ValueError."""
    record = STRICT.decode(line if isinstance(line, str) else line.decode())
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} is no record")
    return record


def truncate_after(path: Path, segment: int, step: int) -> tuple[int, list[dict[str, Any]]]:
    """Remove the lines of `segment` past `step` from a metrics file, atomically; how many they
    were, and all others.

    A run that goes on from a checkpoint of step k writes k+1, k+2, ... again: (segment, step)
    stays unique.
    """
    records = read_lines(path, METRICS_HAVE)
    kept = [record for record in records if record["segment"] != segment or record["step"] <= step]
    if len(kept) == len(records):
        return 0, kept
    replace_file(path, "".join(map(strict_line, kept)).encode())
    return len(records) - len(kept), kept


def read_metrics(path: Path, segment: int | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl (`path`: it or the run folder) by segment and step, each once.

    Where a step stands there twice (a copy taken between two lives), the line of the later life is
    kept. `segment=None` reads all segments. A half-written last line is ignored.
    """
    path = Path(path)
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for line in read_lines(path / METRICS if path.is_dir() else path, METRICS_HAVE):
        key = (line["segment"], line["step"])
        if key not in lines or line["life"] >= lines[key]["life"]:
            lines[key] = line
    return [lines[key] for key in sorted(lines) if segment is None or key[0] == segment]


def record_event(folder: Path, kind: str, *, life: int, **fields: Any) -> None:
    """Append UTC time, kind (a life, an alarm, a verdict), life and `fields` to events.jsonl,
    without secrets."""
    fields = redacted(fields, secret_values(os.environ))
    record(Path(folder) / EVENTS, kind=kind, life=life, **fields)


def record(path: Path, **fields: Any) -> None:
    """Append UTC time and `fields` to a line file."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    append_line(path, {"time": now, **fields})


def read_events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run's events.jsonl, all or those of one kind."""
    return [
        event
        for event in read_lines(Path(folder) / EVENTS, EVENTS_HAVE)
        if kind is None or event["kind"] == kind
    ]
