"""Formats of token files that carry a header, by their first bytes or their form.

Rule: the header of a known format is never read as tokens. A file of such a format is refused by
its name, with the way out, unless token_files.py reads it.

Sources: lit-gpt and TinyLlama `packed_dataset.py`; llm.c `data_common.py`; litData `writer.py`;
MosaicML Streaming `mds/writer.py`; numpy.lib.format; the magic numbers of the other formats.

Units: bytes.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np

HEAD_BYTES = 1024
MOST_JSON_BYTES = 100 << 20  # of the header of a safetensors file
MOST_ITEMS = 1 << 22  # of a chunk with a table of offsets; real ones have some thousands

LLM_C = {20240520: "uint16", 20240801: "uint32"}  # first int32 of a shard -> type of its ids
LIT_TYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
# First bytes -> what the file is, and the way out. Each pattern covers at least four bytes, so that
# no plain array begins with it by chance.
MAGIC = {
    rb"\x93NUMPY": "has a numpy header; write its array without one: np.load(x).tofile(y)",
    rb"PK\x03\x04": "is a zip archive (.npz, .pt or other); write its array of ids with tofile",
    rb"MMIDIDX\x00\x00|TNTIDX\x00\x00": "is the index of a Megatron pair; give it the suffix .idx",
    rb"\x1f\x8b\x08[\x00-\x1f]": "is compressed with gzip; unpack it first",
    rb"\x28\xb5\x2f\xfd|\x04\x22\x4d\x18": "is compressed (zstd or lz4); unpack it first",
    rb"\xfd7zXZ\x00|BZh[1-9](1AY&SY|\x17rE8P\x90)": "is compressed (xz or bz2); unpack it first",
    rb"PAR1": "is a Parquet file; columns of ids are not read: write the ids with tofile",
    rb"ARROW1|\xff{4}[\x00-\xff]{3}\x00\x10\x00{3}": "is Arrow data; write its ids with tofile",
    rb"\x89HDF\r\n\x1a\n": "is an HDF5 file; write its data set of ids with tofile",
    rb"SQLite format 3\x00": "is an SQLite database; write its ids with tofile",
    rb"GGUF": "is a GGUF model, not tokens",
    rb"Obj\x01": "is an Avro file; write its ids with tofile",
    rb"\x80[\x04\x05]\x95[\x00-\xff]{5}\x00{3}|\x80[\x02\x03][}\]c(][q(a-zA-Z_]": (
        "is a Python pickle; write its array of ids with tofile"
    ),
    rb"version https://git-lfs\.": (
        "is a Git LFS pointer, not the file itself; fetch it: git lfs pull"
    ),
}


def refused_format(path: Path, itemsize: int = 2) -> str | None:
    """The name of the format of a file without an index, and the way out; None for a plain array.

    itemsize: bytes of an id as declared; text is no sign of another format where it is 1.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        return (
            next((text for magic, text in MAGIC.items() if re.match(magic, head)), None)
            or _packed(head)
            or _llm_c(head, size)
            or _table(head, size, file)
            or _archive(head, size, file)
            or (_text(head) if itemsize > 1 else None)
        )


def _without_header(header: int, dtype: str) -> str:
    return (
        f"write its ids without the header: np.fromfile(x, '{dtype}', offset={header}).tofile(y),"
        f" and import y with OVERRIDES=dtype={dtype}"
    )


def _packed(head: bytes) -> str | None:
    """LITPKDS of lit-gpt and TinyLlama: magic, u64 version, u8 type, u64 tokens of a chunk."""
    if not head.startswith(b"LITPKDS"):
        return None
    code = head[15] if len(head) > 15 else 0
    dtype = LIT_TYPES.get(code, f"type code {code}")
    return (
        "is a packed file of lit-gpt or TinyLlama (LITPKDS), whose documents begin with their"
        f" separator; {_without_header(24, dtype)}"
    )


def _llm_c(head: bytes, size: int) -> str | None:
    """Shards of llm.c and modded-nanogpt: 256 int32 (magic, version, tokens, zeros), then ids."""
    if len(head) < HEAD_BYTES:
        return None
    magic, _, tokens = struct.unpack_from("<iii", head)
    dtype = LLM_C.get(magic)
    if dtype is None:
        return None
    expected = HEAD_BYTES + tokens * np.dtype(dtype).itemsize
    cut = "" if expected == size else f", of {size} bytes where its header states {expected}"
    return (
        f"is a shard of llm.c{cut}, with a header of {HEAD_BYTES} bytes;"
        f" {_without_header(HEAD_BYTES, dtype)}"
    )


def _table(head: bytes, size: int, file) -> str | None:
    """Chunks of litData and MDS: u32 n, then n + 1 ascending u32 offsets, the last the size."""
    if len(head) < 12:
        return None
    (count,) = struct.unpack_from("<I", head)
    if not 1 <= count <= MOST_ITEMS or 4 * (count + 2) > size:
        return None
    file.seek(4)
    offsets = np.fromfile(file, "<u4", count + 1).astype(np.int64)
    if offsets[0] < 4 * (count + 2) or offsets[-1] != size or (np.diff(offsets) < 0).any():
        return None
    name = "litData" if offsets[0] == 4 * (count + 2) else "MosaicML Streaming (MDS)"
    return (
        f"is a chunk of {name}: a table of {count} offsets before the items; read the items with"
        " that library and write the ids with tofile"
    )


def _archive(head: bytes, size: int, file) -> str | None:
    """Tar archives, and safetensors: u64 length of a JSON header."""
    if head[257:262] == b"ustar":
        return "is a tar archive; unpack it first"
    if len(head) > 9 and head[8:10] in (b'{"', b"{}"):
        (length,) = struct.unpack_from("<Q", head)
        if 8 + length <= min(size, MOST_JSON_BYTES):
            file.seek(8)
            try:
                json.loads(file.read(length))
            except ValueError:
                return None
            return "is a safetensors file; write its tensor of ids with tofile"
    return None


def _text(head: bytes) -> str | None:
    """Text is no array of wider ids: a thousand bytes of ids are never valid UTF-8 by chance."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # not only a character that HEAD_BYTES cuts
            return None
        text = head[: error.start].decode("utf-8")
    if len(head) < 64 or re.search(r"[\x00-\x08\x0e-\x1f\x7f]", text):
        return None
    return (
        f"is text (it begins with {text[:24]!r}), not an array of ids; build a corpus from it with"
        " make corpus"
    )
