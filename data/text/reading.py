"""Reading one unit of the input: a stream of records, one for each row, line or document.

    bytes -> lines -> JSON -> text        Parquet, datasets -> column of bytes -> text
    text file -> whole, or cut at blank lines, lines, or a delimiter

Rule: a record is a text or a stated problem, with its place; nothing is passed over. Lines end at
byte 0x0A and nowhere else (one 0x0D before it is removed). A damaged file (cut, or not of the kind
that its name states) is never a bad line: it stops the build.

Units: rows count from 0, lines from 1 within a unit (the caller adds the lines before it), byte
offsets from the start of the (unpacked) file.
"""

from __future__ import annotations

import bz2
import decimal
import functools
import gzip
import io
import json
import lzma
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from base.errors import UserError
from data.text.inputs import InputFile, open_dataset
from data.text.settings import Settings
from data.text.unit_plan import Unit

BLOCK_BYTES = 1 << 20
MOST_LINE_BYTES = 1 << 30  # a line or document beyond it is a file without line ends, not text
BATCH_ROWS = 256
BOM = b"\xef\xbb\xbf"
UNPACKERS = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lambda raw: _Members(raw, lzma.LZMADecompressor),
    ".bz2": lambda raw: _Members(raw, bz2.BZ2Decompressor),
}
LONG_WINDOW = "requires too much memory"  # the error of zstd's own library, whose limit is 128 MiB

WEB_PAGE = (b"<!doctype html", b"<html")  # how a page begins, in lower case

Advance = Callable[[int], None]  # takes the bytes of the input that were read since the last call


@dataclass(slots=True)
class InputRecord:
    """One row of the input.

    data is None for a blank line, and where there is a problem: (reason, description).
    """

    source: int  # which file of the unit
    row: int
    offset: int | None = None  # of its first byte; None in tables
    size: int = 0  # bytes
    data: str | bytes | None = None
    id: str | None = None
    is_replaced: bool = False  # U+FFFD stands for bytes that were not UTF-8
    problem: tuple[str, str] | None = None
    raw: bytes = b""  # the bytes that are put aside where there is a problem


def read_unit(unit: Unit, settings: Settings, advance: Advance) -> Iterator[InputRecord]:
    """Records of a unit in order. Raises UserError for a damaged file."""
    if unit.files[0].kind == "text" and settings.document == "file":
        for number, file in enumerate(unit.files):
            with _damage(file):
                yield _whole(number, file)
            advance(file.bytes)
        return
    file = unit.files[0]
    with _damage(file):
        if file.kind == "jsonl":
            yield from _json_records(unit, settings, advance)
        elif file.kind == "text":
            yield from _text_records(unit, settings.document, advance)
        elif file.kind == "parquet":
            yield from _parquet_records(unit, settings, advance)
        else:
            yield from _dataset_records(unit, settings, advance)


def check_columns(file: InputFile, settings: Settings) -> None:
    """Refuse a table without the columns of the settings, or with no text in them: UserError."""
    if file.kind == "parquet":
        with _damage(file):
            schema = pq.read_schema(file.path)
    elif file.kind == "dataset":
        schema = open_dataset(file.path).features.arrow_schema
    else:
        return
    for knob, name in (("text", settings.text), ("id", settings.id)):
        if name is None:
            continue
        if schema.names.count(name) > 1:
            raise UserError(f"{file.path}: has more than one column {name!r}; rename all but one")
        if name not in schema.names:
            raise UserError(
                f"{file.path}: has no column {name!r}; name one of {', '.join(schema.names)}: "
                f"OVERRIDES={knob}=..."
            )
        kind = schema.field(name).type
        if knob == "text" and not _is_text(kind):
            raise UserError(
                f"{file.path}: column {name!r} holds {kind}, expected text; name another: "
                "OVERRIDES=text=..."
            )


@contextmanager
def opened(file: InputFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The unpacked bytes of a file, and a function for the number of bytes read of the file."""
    with open(file.path, "rb", buffering=BLOCK_BYTES) as raw:
        if not file.packed or not file.bytes:
            yield raw, raw.tell
        elif file.packed in UNPACKERS:
            with UNPACKERS[file.packed](raw) as plain:
                yield io.BufferedReader(plain, BLOCK_BYTES), raw.tell
        else:
            stream = pa.PythonFile(raw, mode="r")
            with pa.CompressedInputStream(stream, "zstd") as plain:
                yield io.BufferedReader(plain, BLOCK_BYTES), raw.tell


class _Members(io.RawIOBase):
    """The unpacked bytes of all streams of a file, one behind the other, with zeros between them.

    lzma.LZMAFile and bz2.BZ2File end in silence at anything behind a stream that is no stream, also
    at the zeros that the format allows, and so lose the streams behind them.
    """

    def __init__(self, raw: BinaryIO, make: Callable):
        self._raw, self._make = raw, make
        self._current, self._rest = None, b""  # the stream in work; packed bytes that follow it

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        """Fill the start of `buffer`; returns the number of bytes, 0 at the end of the file.

        Raises EOFError where a stream is cut, and the error of the library for anything else.
        """
        while True:
            if self._current is None:
                packed = self._rest.lstrip(b"\0") or self._raw.read(BLOCK_BYTES).lstrip(b"\0")
                if not packed:
                    if self._raw.peek(1):  # the block held only zeros
                        continue
                    return 0
                self._current, self._rest = self._make(), b""
            else:
                packed = self._raw.read(BLOCK_BYTES) if self._current.needs_input else b""
                if not packed and self._current.needs_input:
                    raise EOFError("the file ends inside a packed stream")
            found = self._current.decompress(packed, len(buffer))
            buffer[: len(found)] = found
            if self._current.eof:
                self._current, self._rest = None, self._current.unused_data
            if found:
                return len(found)


def lines_in(stream: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its end) of the lines that start in the bytes [start, stop).

    Of a line beyond MOST_LINE_BYTES the first MOST_LINE_BYTES + 1 bytes are handed out, the rest is
    passed over.
    """
    at = start
    if start:
        stream.seek(start - 1)
        at -= 1
        while True:
            part = stream.readline(BLOCK_BYTES)
            at += len(part)
            if not part or part.endswith(b"\n") or (stop is not None and at >= stop):
                break
    while stop is None or at < stop:
        line = stream.readline(MOST_LINE_BYTES + 1)
        if not line:
            return
        yield at, line
        at += len(line)
        while line and not line.endswith(b"\n"):  # the rest of a line that was too long
            line = stream.readline(BLOCK_BYTES)
            at += len(line)


def parse_line(line: str, settings: Settings) -> tuple[str | None, str | None]:
    """(text, id) of one JSON line. Raises BadLine with the reason."""
    try:
        found = load_json(line)
        if line.count(_quoted(settings.text)) > 1:
            _refuse_repeated(line, settings.text)
    except (ValueError, RecursionError) as error:
        raise BadLine("broken_json", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadLine("not_an_object", f"holds {_name(found)}, expected one JSON object a line")
    if settings.text not in found:
        names = ", ".join(map(repr, list(found)[:10])) or "none"
        raise BadLine("no_field", f"has no field {settings.text!r} (it has {names})")
    text = found[settings.text]
    if text is None:
        raise BadLine("null_text", f"field {settings.text!r} is null")
    if not isinstance(text, str):
        raise BadLine("not_text", f"field {settings.text!r} is {_name(text)}, expected text")
    return text, _id(found.get(settings.id)) if settings.id else None


def load_json(line: str):
    """The value of a JSON text, with integers of any length. Raises ValueError, RecursionError.

    Python refuses to convert an integer of more than 4,300 digits; a longer one becomes a Decimal.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(line, parse_int=decimal.Decimal)


class BadLine(Exception):
    """A line gives no text. Arguments: (reason, description)."""


def _json_records(unit: Unit, settings: Settings, advance: Advance) -> Iterator[InputRecord]:
    file, reported = unit.files[0], 0
    stop = unit.stop if unit.is_range else None
    with opened(file) as (stream, tell):
        number = 0
        for number, (offset, line) in enumerate(lines_in(stream, unit.start, stop), start=1):
            record = InputRecord(0, number, offset, len(line))
            text = line.removeprefix(BOM) if offset == 0 else line
            try:
                if len(line) > MOST_LINE_BYTES:
                    raise BadLine("too_long_line", f"is longer than {MOST_LINE_BYTES} bytes")
                if offset == 0 and text.lstrip().startswith(b"["):
                    raise BadLine(
                        "not_an_object",
                        "begins a JSON array, expected one JSON object a line, as by: jq -c '.[]'",
                    )
                if text.strip():
                    line_text, record.is_replaced = _decoded(text, settings)
                    record.data, record.id = parse_line(line_text, settings)
            except BadLine as error:
                record.problem, record.raw = (error.args[0], error.args[1]), line
            yield record
            read = min(offset + len(line) - unit.start, unit.bytes) if unit.is_range else tell()
            if read - reported >= BLOCK_BYTES:
                advance(read - reported)
                reported = read
    advance(unit.bytes - reported)


def _text_records(unit: Unit, rule: str, advance: Advance) -> Iterator[InputRecord]:
    """Documents of a text file, cut at lines, blank lines or a delimiter.

    row: the line at which the document starts.
    """
    file, reported = unit.files[0], 0
    stop = unit.stop if unit.is_range else None
    delimiter = None if rule in ("line", "blank") else rule.encode()
    with opened(file) as (stream, tell):
        if rule == "line":
            for number, (offset, line) in enumerate(lines_in(stream, unit.start, stop), start=1):
                text = line.removesuffix(b"\n").removesuffix(b"\r")
                yield _limited(InputRecord(0, number, offset, len(line), text))
        else:
            parts = _blocks_of_lines(stream) if delimiter is None else _cut(stream, delimiter)
            for row, offset, text in parts:
                yield _limited(InputRecord(0, row, offset, len(text), text))
                if tell() - reported >= BLOCK_BYTES and not unit.is_range:
                    advance(tell() - reported)
                    reported = tell()
    advance(unit.bytes - reported)


def _blocks_of_lines(stream: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(first line, offset, text) of runs of lines without a blank one."""
    held, size, first, begin = [], 0, 1, 0
    for number, (offset, line) in enumerate(lines_in(stream, 0, None), start=1):
        is_blank = not line.strip() or line == BOM + b"\n"
        if not is_blank:
            if not held:
                first, begin = number, offset
            held.append(line)
            size += len(line)
        if held and (is_blank or size > MOST_LINE_BYTES):
            yield first, begin, b"".join(held)
            held, size = [], 0
    if held:
        yield first, begin, b"".join(held)


def _cut(stream: BinaryIO, delimiter: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(first line, offset, text) of the parts of a stream between delimiters."""
    held, row, offset = b"", 1, 0
    while True:
        data = stream.read(BLOCK_BYTES)
        *parts, held = (held + data).split(delimiter)
        for part in parts if data else [*parts, held]:
            yield row, offset, part
            row += part.count(b"\n") + delimiter.count(b"\n")
            offset += len(part) + len(delimiter)
        if not data:
            return
        if len(held) > MOST_LINE_BYTES:
            yield row, offset, held
            row, offset, held = row + held.count(b"\n"), offset + len(held), b""


def _parquet_records(unit: Unit, settings: Settings, advance: Advance) -> Iterator[InputRecord]:
    file = unit.files[0]
    with pq.ParquetFile(file.path, memory_map=True) as table:
        metadata = table.metadata
        row = sum(metadata.row_group(g).num_rows for g in range(unit.start))
        groups = list(range(unit.start, unit.stop))
        share = file.bytes / max(1, metadata.num_rows)
        columns = [settings.text, *([settings.id] if settings.id else [])]
        rows = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns)
        for batch in rows if groups else []:
            # By name: columns come in the order of the file, not of the request.
            text = batch.column(batch.schema.get_field_index(settings.text))
            yield from _rows(text, _ids(batch, settings), row, settings.text)
            row += len(batch)
            advance(int(len(batch) * share))


def _dataset_records(unit: Unit, settings: Settings, advance: Advance) -> Iterator[InputRecord]:
    file = unit.files[0]
    columns = [settings.text, *([settings.id] if settings.id else [])]
    table = open_dataset(file.path).select_columns(columns).with_format("arrow")
    share = file.bytes / max(1, len(table))
    for low in range(unit.start, unit.stop, BATCH_ROWS):
        high = min(low + BATCH_ROWS, unit.stop)
        batch = table[low:high].combine_chunks()
        text = batch.column(settings.text).combine_chunks()
        yield from _rows(text, _ids(batch, settings), low, settings.text)
        advance(int((high - low) * share))


def _rows(column: pa.Array, ids: list, row: int, name: str) -> Iterator[InputRecord]:
    """Records of a column. Text is read as bytes, so that bad UTF-8 is treated by our own rule."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    for number, data in enumerate(column.cast(pa.large_binary() if is_large else pa.binary())):
        record = InputRecord(0, row + number, id=ids[number], data=data.as_py())
        if record.data is None:
            record.problem = ("null_text", f"column {name!r} is null")
        yield _limited(record)


def _ids(batch, settings: Settings) -> list:
    if not settings.id:
        return [None] * batch.num_rows
    column = batch.column(batch.schema.get_field_index(settings.id))
    return [_id(value) for value in column.to_pylist()]


def _whole(number: int, file: InputFile) -> InputRecord:
    """A text file as one document."""
    with opened(file) as (stream, _):
        data = stream.read(MOST_LINE_BYTES + 1)
    record = _limited(InputRecord(number, 1, 0, len(data), data))
    if data[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(WEB_PAGE):
        record.problem = ("web_page", "is a web page, as a failed download leaves it: fetch the"
                          " file again, or give pages that are meant as .jsonl")  # fmt: skip
        record.raw, record.data = data, None
    return record


def _limited(record: InputRecord) -> InputRecord:
    if record.data is not None and len(record.data) > MOST_LINE_BYTES:
        record.problem = ("too_long_line", f"is longer than {MOST_LINE_BYTES} bytes: cut it")
        record.raw, record.data = record.data, None
    return record


@contextmanager
def _damage(file: InputFile) -> Iterator[None]:
    """Turn the errors of a damaged file into a UserError with its name."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        if LONG_WINDOW in str(error):
            raise UserError(
                f"{file.path}: is packed with a window of more than 128 MiB, which cannot be read"
                f" here; pack it again: zstd -d --long=31 -c {shlex.quote(str(file.path))} |"
                f" zstd -o {shlex.quote(str(_repacked(file.path)))}"
            ) from None
        raise UserError(
            f"{file.path}: cannot be read to its end: {error}; it is cut or damaged: restore it "
            "from a copy"
        ) from None


def _repacked(path: Path) -> Path:
    """Name for a file that is packed again: x.jsonl.zst -> x.short.jsonl.zst."""
    stem, *suffixes = path.name.split(".")
    return path.with_name(".".join([stem, "short", *suffixes]))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in checks)


def _refuse_repeated(decoded: str, name: str) -> None:
    def pairs(found):
        if sum(key == name for key, _ in found) > 1:
            raise ValueError(f"field {name!r} appears more than once in one object")
        return dict(found)

    json.loads(decoded, object_pairs_hook=pairs, parse_int=decimal.Decimal)


@functools.cache
def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _decoded(line: bytes, settings: Settings) -> tuple[str, bool]:
    """(text of a line, True where bytes were replaced)."""
    try:
        return line.decode("utf-8"), False
    except UnicodeDecodeError as error:
        if settings.bad_bytes == "replace":
            return line.decode("utf-8", errors="replace"), True
        raise BadLine(
            "bad_bytes",
            f"byte 0x{line[error.start]:02x} at {error.start} of the line is not UTF-8 "
            "(bad_bytes=replace puts U+FFFD)",
        ) from None


def _id(value) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def _name(value) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    text = kinds.get(type(value)) or ("nothing" if value is None else "a number")
    shown = json.dumps(value, default=str)
    return f"{text} ({shown[:40]}{'...' if len(shown) > 40 else ''})"
