"""The work on one unit of the input, in any process: read, clean, filter, tokenize, write to disk.

    units/<key>/  ids.bin        tokens of all kept documents, back to back, in the corpus's type
                  docs.arrow     one row a document: place, sizes, digest, hash
                  bad.jsonl      lines put aside
                  unit.json      counts by file; written last

Rule: the content under <key> depends on the unit and the settings in the key alone. A folder
without the `.tmp` is complete, so a build that was killed continues after it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from base.errors import UserError
from data.corpus.documents import Document, clean_text
from data.corpus.indexed import token_dtype
from data.corpus.tokenizer import library_version
from data.text.encoding import Encoder
from data.text.inputs import InputFile
from data.text.reading import Advance, InputRecord, read_unit
from data.text.settings import Settings
from data.text.unit_plan import Unit

BATCH_CHARS = 1 << 20
MOST_RAW_BYTES = 1 << 20  # of a bad line that is put aside; `bytes` tells where one was cut
FORMAT = "unit-1"

SCHEMA = pa.schema(
    [
        ("source", pa.int32()),  # which file of the unit
        ("row", pa.int64()),
        ("byte_offset", pa.int64()),
        ("bytes", pa.int64()),
        ("id", pa.string()),
        ("chars", pa.int64()),
        ("tokens", pa.int64()),  # begin and end ids included
        ("digest", pa.binary(16)),  # xxh3-128 of the cleaned text
        ("hash", pa.uint64()),  # xxh3-64 of it, which decides what is held out
    ]
)


@dataclass(frozen=True)
class UnitTask:
    """One unit, its settings, and the folder for its result."""

    unit: Unit
    folder: Path
    settings: Settings


def unit_key(unit: Unit, settings: Settings, fingerprint: str, engine: str) -> str:
    """Name of a unit's result: equal for equal work."""
    what = [FORMAT, unit.identity(), settings.unit_part(), fingerprint, engine, library_version()]
    is_strict = settings.max_bad == 0
    return xxhash.xxh3_128_hexdigest(json.dumps([*what, is_strict], sort_keys=True).encode())


def build_unit(task: UnitTask, encoder: Encoder, advance: Advance) -> None:
    """Do the work on one unit and publish its folder.

    Raises UserError for damage, and for the first bad line where none is allowed.
    """
    temporary = task.folder.with_name(f"{task.folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _Output(temporary, task, encoder) as output:
            for record in read_unit(task.unit, task.settings, advance):
                output.add(record)
            output.flush()
        output.finish()
        os.replace(temporary, task.folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_summary(folder: Path) -> dict:
    """unit.json of a finished unit."""
    return json.loads((folder / "unit.json").read_text(encoding="utf-8"))


class _Output:
    """The files of one unit while they are written."""

    def __init__(self, folder: Path, task: UnitTask, encoder: Encoder):
        self._folder, self._task, self._encoder = folder, task, encoder
        self._files, self._settings = task.unit.files, task.settings
        tokenizer = encoder.tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([tokenizer.eod_id])
        is_stored = task.settings.is_begin_stored(tokenizer)
        self._begin = np.array([tokenizer.begin_id] if is_stored else [], dtype=np.int64)
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_special[list(tokenizer.special_ids)] = True
        self._counts = [Counter() for _ in self._files]
        self._batch: list[tuple[InputRecord, str]] = []
        self._chars = self._rows = 0
        self._longest = None
        self._filters = task.settings.filters

    def __enter__(self) -> _Output:
        self._ids = open(self._folder / "ids.bin", "wb")
        self._bad = open(self._folder / "bad.jsonl", "w", encoding="utf-8")
        self._docs = pa.OSFile(str(self._folder / "docs.arrow"), "wb")
        self._table = pa.ipc.new_file(self._docs, SCHEMA)
        return self

    def __exit__(self, *_) -> None:
        for one in (self._ids, self._bad, self._table, self._docs):
            one.close()

    def add(self, record: InputRecord) -> None:
        """Take one record: add it to the batch, put it aside, or drop it; count it in any case."""
        counts = self._counts[record.source]
        counts["rows"] += 1
        self._rows = record.row
        if record.problem is None and record.data is not None:
            self._add_text(record, counts)
        elif record.problem is None:
            counts["blank_lines"] += 1
        if record.problem is not None:
            self._put_aside(record, counts)
        if self._chars >= BATCH_CHARS:
            self.flush()

    def finish(self) -> None:
        """Write the summary after all files are closed, and make them durable."""
        summary = {
            "files": [file.name for file in self._files],
            "counts": [dict(counts) for counts in self._counts],
            "rows": self._rows,
            "longest": self._longest,
            "dtype": self._dtype.name,
        }
        path = self._folder / "unit.json"
        path.write_text(json.dumps(summary, ensure_ascii=False), encoding="utf-8")
        for path in self._folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def _add_text(self, record: InputRecord, counts: Counter) -> None:
        data, file = record.data, self._files[record.source]
        if isinstance(data, bytes):
            try:
                data = data.decode("utf-8")
            except UnicodeDecodeError as error:
                if self._settings.bad_bytes == "stop":
                    wrong = f"byte 0x{data[error.start]:02x} at {error.start} of it is not UTF-8"
                    record.problem = ("bad_bytes", f"{wrong} (bad_bytes=replace puts U+FFFD)")
                    record.raw = data
                    return
                data = data.decode("utf-8", errors="replace")
                record.is_replaced = True
        counts["bad_bytes"] += record.is_replaced
        text = clean_text(Document(file.name, data), counts)
        if text is None:
            return
        reason = self._filters.reason(text)
        if reason:
            counts[reason] += 1
            return
        self._batch.append((record, text))
        self._chars += len(text)

    def flush(self) -> None:
        """Tokenize and write the documents that wait."""
        if not self._batch:
            return
        columns = {name: [] for name in SCHEMA.names}
        encoded = self._encoder.encode([text for _, text in self._batch])
        for (record, text), ids in zip(self._batch, encoded, strict=True):
            counts = self._counts[record.source]
            is_special = self._is_special[ids]
            if is_special.any():
                token = int(ids[int(is_special.argmax())])
                shown = self._encoder.tokenizer.decode([token])
                record.problem = (
                    "special_token_id",
                    f"the tokenizer reads text as the special token {shown!r} (id {token})",
                )
                record.raw = text.encode()
                self._put_aside(record, counts)
                continue
            self._write(record, text, ids, counts, columns)
        if columns["row"]:
            self._table.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._batch, self._chars = [], 0

    def _write(self, record: InputRecord, text: str, ids, counts: Counter, columns: dict) -> None:
        tokenizer, data = self._encoder.tokenizer, text.encode()
        whole = np.concatenate([self._begin, ids, self._end])
        if int(whole.max()) > np.iinfo(self._dtype).max:
            raise UserError(f"tokenizer: id {whole.max()} is beyond its vocabulary size")
        self._ids.write(whole.astype(self._dtype).data)
        counts["documents_read"] += 1
        counts["chars_read"] += len(text)
        counts["tokens_read"] += len(whole)
        counts["special_token_strings"] += tokenizer.count_specials(text)
        counts["long_documents"] += len(text) > BATCH_CHARS
        if tokenizer.unk_id is not None:
            counts["unknown_tokens"] += int(np.count_nonzero(ids == tokenizer.unk_id))
        if self._longest is None or len(whole) > self._longest["tokens"]:
            place = {"file": self._files[record.source].name, "row": record.row}
            self._longest = place | {"tokens": len(whole), "chars": len(text)}
        row = (
            record.source,
            record.row,
            record.offset,
            record.size or len(data),
            record.id,
            len(text),
            len(whole),
            xxhash.xxh3_128_digest(data),
            xxhash.xxh3_64_intdigest(data),
        )
        for name, value in zip(columns, row, strict=True):
            columns[name].append(value)

    def _put_aside(self, record: InputRecord, counts: Counter) -> None:
        reason, detail = record.problem
        file = self._files[record.source]
        if self._settings.max_bad == 0:
            row = record.row + lines_before(self._task.unit)
            raise UserError(
                f"{file.place(row)}: {detail}; correct it, or put such lines aside: "
                "OVERRIDES=max_bad=100"
            )
        counts["bad"] += 1
        counts[f"aside_{reason}"] += 1
        raw = record.raw[:MOST_RAW_BYTES]
        line = {
            "file": file.name,
            "row": record.row,
            "byte_offset": record.offset,
            "id": record.id,
            "reason": reason,
            "detail": detail,
            "bytes": len(record.raw),
        }
        try:
            line["line"] = raw.decode()
        except UnicodeDecodeError:
            line["line_base64"] = base64.b64encode(raw).decode()
        self._bad.write(json.dumps(line) + "\n")


def lines_before(unit: Unit) -> int:
    """Number of lines that end before a unit; above 0 where it begins inside a file."""
    if not unit.is_range or not unit.start:
        return 0
    return count_lines(unit.files[0], unit.start)


def count_lines(file: InputFile, stop: int) -> int:
    """Number of lines in the first `stop` bytes, a line that is cut there included."""
    lines, last = 0, b""
    with open(file.path, "rb") as stream:
        while stop > 0 and (data := stream.read(min(1 << 20, stop))):
            lines += data.count(b"\n")
            stop, last = stop - len(data), data[-1:]
    return lines + (last != b"\n")
