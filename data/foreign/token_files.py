"""Token files of other tools, read as documents of ids, a chunk at a time.

    Megatron, GPT-NeoX, DeepSpeed   <prefix>.bin + .idx         `indexed.py` knows the type codes
    datatrove                       <name>.ds + .ds.index       uint64 end of each document
                                    .ds.loss                    a byte per token, 0 = gives no loss
    OLMo and other flat arrays      *.npy (without header) or *.bin: documents end at the end id

Rule: the size of a file must agree with its index and type; no id is cast. A file without an index
is a flat array only where the user declares it as one (`dtype=`); known headers are refused.

Units: tokens, bytes.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base.errors import UserError
from base.values import first_of
from data.corpus.indexed import HEADER, IndexView, Shard, check_shard
from data.foreign.known_formats import refused_format
from data.text.inputs import numeric

SUFFIXES = (".bin", ".ds", ".npy")
MOST_NAMED = 20  # files of a folder that holds no tokens are listed up to this number

CHUNK_TOKENS = 8 << 20
CHUNK_DOCUMENTS = 1 << 20
MOST_EDGES = 4096  # documents whose first and last ids a quick import reads
TYPES = ("uint8", "uint16", "uint32", "int32", "int64", "uint64")


@dataclass(frozen=True)
class Foreign:
    """One file of tokens. shard: facts of the index, for kind "megatron"."""

    path: Path  # of the tokens
    kind: str  # megatron, datatrove, flat
    dtype: np.dtype
    num_tokens: int
    eod_id: int
    shard: Shard | None = None
    begin_id: int | None = None  # counted where documents begin with it

    @property
    def num_documents(self) -> int:
        """Number of documents by the index. Raises UserError without one."""
        if self.kind == "flat":
            raise UserError(
                f"{self.path}: has no index, so the number of its documents is not known and "
                "split= cannot cut it; hold out by hash: valid=0.01"
            )
        if self.kind == "datatrove":
            return self.path.with_name(self.path.name + ".index").stat().st_size // 8
        return self.shard.num_documents

    def num_without_loss(self) -> int:
        """Number of tokens that a .loss file beside this one takes out of the loss.

        Raises UserError where its size does not fit.
        """
        path = self.path.with_name(self.path.name + ".loss")
        if self.kind != "datatrove" or not path.is_file():
            return 0
        if path.stat().st_size != self.num_tokens:
            raise UserError(
                f"{path}: found {path.stat().st_size} bytes, expected one for each of the"
                f" {self.num_tokens} tokens; restore it from a copy"
            )
        with open(path, "rb") as file:
            return sum(part.count(0) for part in iter(lambda: file.read(CHUNK_TOKENS), b""))

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, lengths of the documents in them), whole documents, about CHUNK_TOKENS a time."""
        if self.kind == "flat":
            yield from self._flat_chunks()
            return
        done = 0
        with open(self.path, "rb") as file:
            for ends in self._ends():
                at = 0
                while at < len(ends):
                    limit = done + CHUNK_TOKENS
                    stop = max(at + 1, int(np.searchsorted(ends, limit, side="right")))
                    lengths = np.diff(ends[at:stop], prepend=done)
                    ids = np.fromfile(file, dtype=self.dtype, count=int(lengths.sum()))
                    if len(ids) != int(lengths.sum()):
                        raise UserError(f"{self.path}: was cut while it was being read")
                    yield ids, lengths
                    done, at = int(ends[stop - 1]), stop

    def edges(self, most: int = MOST_EDGES) -> tuple[np.ndarray, np.ndarray]:
        """First and last id of up to `most` documents, spread evenly over the file; empty ones are
        passed over. Reads no other token.
        """
        if not self.num_tokens:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        stride = -(-self.num_documents // most)
        first, last, begin, number = [], [], 0, 0
        for ends in self._ends():
            starts = np.concatenate([[begin], ends[:-1]])
            mine = np.arange(len(ends))[(number + np.arange(len(ends))) % stride == 0]
            mine = mine[ends[mine] > starts[mine]]
            first.append(starts[mine])
            last.append(ends[mine] - 1)
            begin, number = int(ends[-1]), number + len(ends)
        ids = np.memmap(self.path, self.dtype, mode="r")
        first_ids, last_ids = (ids[np.concatenate(one)].astype(np.int64) for one in (first, last))
        return first_ids, last_ids

    def _ends(self) -> Iterator[np.ndarray]:
        """Token at which each document ends, int64, a chunk of documents at a time."""
        if self.kind == "datatrove":
            index = np.memmap(self.path.with_name(self.path.name + ".index"), "<u8", mode="r")
            for low in range(0, len(index), CHUNK_DOCUMENTS):
                yield index[low : low + CHUNK_DOCUMENTS].astype(np.int64)
            return
        shard = self.shard
        view = IndexView(shard.idx_path, shard.num_sequences, shard.num_entries, shard.offsets)
        for low in range(0, shard.num_documents, CHUNK_DOCUMENTS):
            high = min(low + CHUNK_DOCUMENTS, shard.num_documents)
            first = view.documents[low + 1 : high + 1]  # sequence after each document
            ends = np.full(high - low, self.num_tokens, dtype=np.int64)
            inside = np.flatnonzero(first < shard.num_sequences)
            ends[inside] = view.offsets[first[inside]] // self.dtype.itemsize
            yield ends

    def _flat_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        held = np.empty(0, dtype=self.dtype)
        with open(self.path, "rb") as file:
            while len(data := np.fromfile(file, dtype=self.dtype, count=CHUNK_TOKENS)):
                data = np.concatenate([held, data])
                ends = np.flatnonzero(data == self.eod_id) + 1
                whole = int(ends[-1]) if len(ends) else 0
                if whole:
                    yield data[:whole], np.diff(ends, prepend=0)
                held = data[whole:]
        if len(held):
            yield held, np.array([len(held)])


def find_foreign(text: str, eod_id: int, dtype: str | None, knob: str = "IN") -> list[Foreign]:
    """The token files behind a prefix, file, folder or glob, in numeric order of their names.

    dtype: type of flat arrays, which have no index. Raises UserError with all problems.
    """
    found, problems, seen = [], [], {}
    for path in _paths(text, knob):
        try:
            found.append(_open(path, eod_id, dtype))
            other = seen.setdefault(os.stat(path)[1:3], path)  # inode and device
            if other != path:
                problems.append(f"{path}: is the same file as {other}; name it once")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def _paths(text: str, knob: str) -> list[Path]:
    path = Path(text)
    if path.with_name(path.name + ".idx").is_file():
        return [path.with_name(path.name + ".bin")]
    if path.is_dir():
        names = [*path.iterdir()]
    elif path.is_file():
        names = [path]
    else:
        names = [Path(name) for name in glob.glob(text, recursive=True)]
    # An .idx without its .bin is half of a pair, which must be missed.
    names = {p.with_suffix(".bin") if p.suffix == ".idx" else p for p in names}
    given, names = names, [p for p in names if p.suffix in SUFFIXES]
    if not names:
        others = [
            f"{p}: {refused_format(p) or 'ends in none of ' + ', '.join(SUFFIXES)}"
            for p in sorted(given)
            if p.is_file()
        ]
        if others:
            raise UserError(*first_of(others, MOST_NAMED, "files that are no tokens"))
        raise UserError(
            f"{knob}={text}: there is no such Megatron prefix (.bin and .idx), .ds or .npy file"
        )
    return sorted(names, key=lambda p: (numeric(str(p)), str(p)))


def _open(path: Path, eod_id: int, dtype: str | None) -> Foreign:
    if not path.is_file():
        raise UserError(f"{path}: there is an .idx but no .bin; restore it from a copy")
    idx = path.with_suffix(".idx")
    if path.suffix == ".bin" and idx.is_file():
        if idx.stat().st_size < HEADER.size:
            raise UserError(f"{idx}: is cut or empty; restore it from a copy")
        # The prefix keeps its suffix, so that a dot in the name is not taken for a suffix.
        shard = check_shard(path)
        return Foreign(path, "megatron", shard.dtype, shard.num_tokens, eod_id, shard)
    if path.suffix == ".ds":
        return _open_datatrove(path, eod_id)
    found = refused_format(path, np.dtype(dtype).itemsize if dtype else 2)
    if found:
        raise UserError(f"{path}: {found}")
    if dtype is None:
        raise UserError(
            f"{path}: has no index and no header of a known format; where it is a flat array of"
            f" ids, declare it as one: OVERRIDES=dtype=uint16 (or {', '.join(TYPES)})"
        )
    kind, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"{path}: {size} bytes are no whole number of {dtype}; give its dtype")
    return Foreign(path, "flat", kind, size // kind.itemsize, eod_id)


def _open_datatrove(path: Path, eod_id: int) -> Foreign:
    index = path.with_name(path.name + ".index")
    if not index.is_file() or index.stat().st_size % 8:
        raise UserError(f"{index}: is not there, or no whole number of 8-byte ends")
    ends = np.memmap(index, "<u8", mode="r") if index.stat().st_size else np.zeros(0, "<u8")
    tokens, size = int(ends[-1]) if len(ends) else 0, path.stat().st_size
    if len(ends) and (np.diff(ends.astype(np.int64)) < 0).any():
        raise UserError(f"{index}: expected ends that ascend")
    for kind in ("<u2", "<u4"):
        if tokens * np.dtype(kind).itemsize == size:
            return Foreign(path, "datatrove", np.dtype(kind), tokens, eod_id)
    raise UserError(
        f"{path}: found {size} bytes, expected {2 * tokens} or {4 * tokens} for the {tokens} tokens"
        " of its index; restore the pair from a copy"
    )
