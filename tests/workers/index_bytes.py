"""Writes Megatron's .bin and .idx files byte by byte, for tests."""

from __future__ import annotations

import struct

import numpy as np

from data.corpus.shard_writer import ShardWriter


def write(folder, documents, dtype="<u2", **options):
    writer = ShardWriter(folder / "s", np.dtype(dtype), eod_id=0, **options)
    for ids in documents:
        writer.add(np.array(ids, dtype=np.int64))
    return writer.close()


def encode(folder, code, lengths, offsets, documents, ids: bytes, tail=b"", magic=b"MMIDIDX\0\0"):
    """A pair of files written with struct alone."""
    head = struct.pack("<9sQBQQ", magic, 1, code, len(lengths), len(documents))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    documents = struct.pack(f"<{len(documents)}q", *documents)
    (folder / "s.idx").write_bytes(head + body + documents + tail)
    (folder / "s.bin").write_bytes(ids)
    return folder / "s"
