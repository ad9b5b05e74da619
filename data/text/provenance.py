"""The origin of each document: `<shard>.docs.parquet` beside each shard, which Megatron ignores.

    document (number in the split) | split | source | row | byte_offset | bytes | id | chars | ...

Rule: row r of a shard's file is document r of the shard, in row groups of `GROUP_ROWS`, so that a
document is found by arithmetic and one row group.

Units: row is the line from 1 (JSON lines, text) or the row from 0 (Parquet, datasets); byte_offset
counts in the unpacked file and is null where there is none; tokens include the end id.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIX = ".docs.parquet"
GROUP_ROWS = 1 << 16
SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("byte_offset", pa.int64()),
        ("bytes", pa.int64()),
        ("id", pa.string()),
        ("chars", pa.int64()),
        ("tokens", pa.int64()),
        ("xxh3", pa.binary(16)),
    ]
)


class ProvenanceWriter:
    """Writes one shard's file, a row group at a time; `close` publishes it."""

    def __init__(self, path: Path):
        self.path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._rows += len(table)
        if self._rows >= GROUP_ROWS:
            self._write(is_last=False)

    def close(self) -> None:
        self._write(is_last=True)
        self._writer.close()
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)

    def _write(self, is_last: bool) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        whole = len(table) if is_last else len(table) // GROUP_ROWS * GROUP_ROWS
        self._writer.write_table(table.slice(0, whole), row_group_size=GROUP_ROWS)
        self._waiting, self._rows = [table.slice(whole)], len(table) - whole
