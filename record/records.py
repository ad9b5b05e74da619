"""The line files of a run (metrics.jsonl, events.jsonl, ...): one strict-JSON object per line.

Rule: a line is whole or it is not there. Lines are appended one by one, each in one write. A line
that a killed process left half-written at the end of a file is ignored by readers, and the next
writer drops it with a message. Each line ends with a digest of its text. A line that was damaged
later stays where it is, and readers skip it: no run stops for it. `damage` reports it.

Strict JSON knows no NaN and no infinity: a non-finite number is written as null and its field is
named in an extra field `non_finite`, a list, present only where there is one:
{"loss": null, "non_finite": ["loss"]}.

Units: times are UTC, ISO 8601 with milliseconds and a Z.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from base.jsonl import append_line, decode, drop_torn_line
from base.redaction import redacted, secret_values
from base.tail import newest_lines
from base.values import counted
from checkpoint import lineage

TAIL_BYTES = 1 << 17  # more than dozens of lines of metrics
# Size of the end of each file that a start checks: thousands of lines. To read the whole record of
# a million steps would take minutes in every attempt.
CHECKED_BYTES = 4 << 20
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DEVICES = "devices.jsonl"  # one line per GPU and reading; nothing is removed at a restart
LEDGER = "ledger/steps.jsonl"  # data.stream.ledger writes it
RANKS = "ranks.jsonl"  # each rank's own seconds, every few steps; nothing is removed at a restart
# Fields that every version has written into each line.
METRICS_HAVE, EVENTS_HAVE = ("segment", "step", "attempt"), ("time", "kind", "attempt")
LEDGER_HAVE = ("step", "data_step", "samples", "batch_hash", "tokens")
OLD_NAMES = {"life": "attempt", "first_of_life": "first_of_attempt"}
HAVE = {
    METRICS: METRICS_HAVE, EVENTS: EVENTS_HAVE, LEDGER: LEDGER_HAVE, DEVICES: (), RANKS: ()
}  # fmt: skip


def repair(path: Path, log: Callable[[str], None] = print) -> bool:
    """Drop the half-written last line of `path` and log that; True if there was one."""
    dropped = drop_torn_line(path)
    if dropped:
        log(f"{path}: dropped {counted(dropped, 'byte')} of a half-written last line")
    return dropped > 0


def make_way(path: Path, log: Callable[[str], None] = print) -> None:
    """Move away what stands in the place of a line file and cannot be read, and report it.

    Examples are a folder of that name, or a bad sector in the part that a start reads. Raises
    OSError where moving does not help.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - CHECKED_BYTES))
            file.read()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EIO):
            raise
        numbers = (n for n in range(1, 10_000) if not Path(f"{path}.before-{n}").exists())
        kept = Path(f"{path}.before-{next(numbers)}")
        os.rename(path, kept)
        log(f"warning: {path} could not be read ({error.strerror}); it is {kept.name} now")


def read_lines(path: Path, needed: Collection[str] = ()) -> list[dict[str, Any]]:
    """The records of a line file that have the fields `needed`.

    Damaged lines and a half-written last line are skipped.
    """
    return list(_records(path, needed))


def _records(path: Path, needed: Collection[str]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            found = read_line(line[:-1], needed) if line.endswith(b"\n") else ""
            if isinstance(found, dict):
                yield found


def newest_records(
    path: Path, needed: Collection[str] = (), most_bytes: float = math.inf
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (first byte, record or problem) of each line, newest first.

    Only lines that begin in the last `most_bytes` of the file are read.
    """
    from_byte = path.stat().st_size - most_bytes if path.is_file() else 0
    for begins, line in newest_lines(path):
        if begins < from_byte:
            return
        yield begins, read_line(line, needed)


def damage(path: Path, needed: Collection[str] = (), most_bytes: float = math.inf) -> str | None:
    """Text about the damage in a line file, or in its last `most_bytes`; None = it is whole."""
    if path.is_dir():
        return f"{_shown(path)} is a folder, and what it held is missing here"
    found = newest_records(path, needed, most_bytes)
    bad = [(begins, problem) for begins, problem in found if isinstance(problem, str)]
    if not bad:
        return None
    several = f"{len(bad)} lines are" if bad[1:] else "a line is"
    begins, problem = bad[-1]
    return (
        f"{_shown(path)}: {several} damaged and left out: their content is missing here"
        f" (line {_number_of(path, begins)}: {problem})"
    )


def _number_of(path: Path, begins: int) -> int:
    """Number, from 1, of the line that begins at byte `begins`."""
    number = 1
    with open(path, "rb") as file:
        while begins > 0:
            block = file.read(min(1 << 20, begins))
            number, begins = number + block.count(b"\n"), begins - len(block)
    return number


def _shown(path: Path) -> str:
    return LEDGER if path.name == Path(LEDGER).name else path.name


def notes(folder: Path, most_bytes: float = CHECKED_BYTES) -> list[str]:
    """Warnings about damaged lines in the records of a run, or in the end of each file."""
    return [f"warning: {text}" for text in _damages(folder, most_bytes)]


def losses(folder: Path, after_step: int) -> list[str]:
    """Texts about damaged or missing lines, for an attempt that begins after `after_step`.

    Only the last CHECKED_BYTES of each file are read.
    """
    found_losses, chain = _damages(folder, CHECKED_BYTES), lineage.lineage_of(folder)
    for name in (METRICS, LEDGER) if (folder / LEDGER).is_file() else (METRICS,):
        found = newest_records(folder / name, HAVE[name], CHECKED_BYTES)
        lines = chain.own(line for _, line in found if isinstance(line, dict))
        steps = {line["step"] for line in lines if line["step"] <= after_step}
        is_all = not steps or (folder / name).stat().st_size <= CHECKED_BYTES
        missing = after_step - (0 if is_all else min(steps) - 1) - len(steps)
        if missing > 0:
            found_losses.append(
                f"{name} lacks {missing} of the steps up to {after_step}: they were trained, and"
                " their lines are gone"
            )
    starts = {0, *(line["first_step"] - 1 for line in lineage.segments(lineage.read(folder)))}
    first = next(iter(read_events(folder, "began")), {})
    if first.get("after_step", 0) not in starts:  # it went on from an attempt without any line
        found_losses.append(f"{EVENTS} lacks the attempts before attempt {first['attempt']}")
    return found_losses


def _damages(folder: Path, most_bytes: float) -> list[str]:
    """Texts about the damage in each file, one per damaged file."""
    texts = (damage(folder / name, needed, most_bytes) for name, needed in HAVE.items())
    return [text for text in texts if text]


def read_line(line: bytes, needed: Collection[str] = ()) -> dict[str, Any] | str:
    """The record of a line, or its problem as text."""
    try:
        record = parse_line(line)
    except ValueError as problem:
        return f"{problem}"
    absent = [name for name in needed if name not in record]
    return f"it has no {', '.join(absent)}" if absent else record


def last_lines(path: Path, most: int = 1, needed: Collection[str] = ()) -> list[dict[str, Any]]:
    """The newest records of a line file, oldest first: at most `most` of them.

    Only the last TAIL_BYTES are read, however long the file is, and damaged lines are skipped.
    Empty where there is no file.
    """
    try:
        found = newest_records(path, needed, TAIL_BYTES)
        records = itertools.islice((one for _, one in found if isinstance(one, dict)), most)
        return list(records)[::-1]
    except OSError:
        return []


def parse_line(line: str | bytes) -> dict[str, Any]:
    """The record of a line, under the names of today.

    Raises ValueError for what `base.jsonl.decode` refuses: a wrong digest, or no JSON object.
    """
    return with_new_names(decode(line.encode() if isinstance(line, str) else line))


def with_new_names(record: dict[str, Any]) -> dict[str, Any]:
    """A record of an older version under the names of today (an attempt was called a life)."""
    if "life" not in record or "attempt" in record:
        return record
    named = {OLD_NAMES.get(name, name): value for name, value in record.items()}
    named["kind"] = OLD_NAMES.get(named.get("kind"), named.get("kind"))
    if named["kind"] is None:
        del named["kind"]
    return named


def truncate_after(path: Path, segment: int, step: int) -> int:
    """Remove the lines of `segment` past `step` from the end of a metrics file; returns how many.

    A run that goes on from a checkpoint of step k writes k+1, k+2, ... again, and (segment, step)
    must stay unique. Damaged lines stay.
    """
    removed, kept, stay = 0, 0, []
    for begins, line in newest_lines(path):
        found = read_line(line, METRICS_HAVE)
        if isinstance(found, str):
            stay.append(line + b"\n")
        elif found["segment"] == segment and found["step"] > step:
            removed += 1
        else:
            break
        kept = begins
    if removed:
        with open(path, "r+b") as file:
            file.truncate(kept)
            file.seek(kept)
            file.write(b"".join(reversed(stay)))
            file.flush()
            os.fsync(file.fileno())
    return removed


def read_metrics(
    path: Path, segment: int | None = None, fields: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, sorted by segment and step, each step once.

    `path` is the file or the run folder. `segment=None` reads all segments. With `fields` only
    these and METRICS_HAVE are kept of each line, because all lines of a long run take gigabytes.
    Where a step has two lines (in a copy taken between two attempts), the later attempt's is kept.
    A half-written last line is ignored.
    """
    path = Path(path)
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for line in _records(path / METRICS if path.is_dir() else path, METRICS_HAVE):
        key = (line["segment"], line["step"])
        if key not in lines or line["attempt"] >= lines[key]["attempt"]:
            wanted = line if fields is None else (*METRICS_HAVE, *fields)
            lines[key] = {name: line[name] for name in wanted if name in line}
    return [lines[key] for key in sorted(lines) if segment is None or key[0] == segment]


def record_event(folder: Path, kind: str, *, attempt: int, **fields: Any) -> None:
    """Append an event to events.jsonl: UTC time, kind, attempt and `fields`, without secrets."""
    fields = redacted(fields, secret_values(os.environ))
    record(Path(folder) / EVENTS, kind=kind, attempt=attempt, **fields)


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
