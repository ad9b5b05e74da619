"""Units of work that the input is cut into, in input order.

    files --plan_units--> whole text files together | ranges of bytes | row groups | rows

Rule: the units follow from the files and the settings alone, never from the number of workers, so
that a corpus is the same to the byte for any number of them.

Units: bytes; rows count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from base.errors import UserError
from data.text.inputs import InputFile, open_dataset

UNIT_BYTES = 16 << 20
MOST_UNITS = 8192  # beyond it units grow, so that the work folder stays small
UNIT_FILES = 1000
UNIT_ROWS = 16384


@dataclass(frozen=True)
class Unit:
    """The input that one worker reads at a time.

    Whole files; or of one file the bytes (jsonl, lines of text), the row groups (parquet) or the
    rows (dataset) from start to stop.
    """

    files: tuple[InputFile, ...]
    start: int = 0
    stop: int = 0

    @property
    def bytes(self) -> int:
        return self.stop - self.start if self.is_range else sum(file.bytes for file in self.files)

    @property
    def is_range(self) -> bool:
        """True where start and stop are bytes of one plain file."""
        return self.stop > 0 and self.files[0].kind in ("jsonl", "text")

    def identity(self) -> list:
        """Identity of the work: names, sizes and times of files, and the range."""
        files = [[f.name, f.kind, f.packed, f.bytes, f.mtime_ns] for f in self.files]
        return [files, self.start, self.stop]


def plan_units(files: list[InputFile], document: str) -> list[Unit]:
    """Cut the input into units, in input order.

    document: the rule by which text files are cut into documents (see `data.text.reading`). Raises
    UserError for a Parquet file or data set that cannot be opened.
    """
    total = sum(file.bytes for file in files)
    size = UNIT_BYTES * max(1, -(-total // (UNIT_BYTES * MOST_UNITS)))
    units, group = [], []
    for file in files:
        is_whole = file.kind == "text" and document == "file"
        is_full = len(group) >= UNIT_FILES or sum(f.bytes for f in group) + file.bytes > size
        if group and (not is_whole or is_full):
            units.append(Unit(tuple(group)))
            group = []
        if is_whole:
            group.append(file)
        elif file.packed or (file.kind == "text" and document != "line"):
            units.append(Unit((file,)))
        elif file.kind == "parquet":
            units += _row_groups(file, size)
        elif file.kind == "dataset":
            rows = len(open_dataset(file.path))
            units += [
                Unit((file,), low, min(low + UNIT_ROWS, rows)) for low in range(0, rows, UNIT_ROWS)
            ] or [Unit((file,))]
        else:
            units += [
                Unit((file,), low, min(low + size, file.bytes))
                for low in range(0, file.bytes, size)
            ] or [Unit((file,))]
    return units + ([Unit(tuple(group))] if group else [])


def _row_groups(file: InputFile, size: int) -> list[Unit]:
    try:
        metadata = pq.ParquetFile(file.path).metadata
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file.path}: is no whole Parquet file: {error}") from None
    units, start, held = [], 0, 0
    for group in range(metadata.num_row_groups):
        columns = range(metadata.num_columns)
        held += sum(metadata.row_group(group).column(c).total_compressed_size for c in columns)
        if held >= size:
            units.append(Unit((file,), start, group + 1))
            start, held = group + 1, 0
    if start < metadata.num_row_groups or not units:
        units.append(Unit((file,), start, metadata.num_row_groups))
    return units
