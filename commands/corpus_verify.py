"""`make corpus-verify CORPUS= WORKERS=`: a full pass over a corpus.

Rule: every byte is read and compared with the manifest, and all damage is named, not only the
first: changed, cut or missing files, exchanged shards, a stale manifest, ids beyond the vocabulary.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from base.command_line import Parser, refuse
from base.cores import usable
from base.errors import UserError
from base.exits import FAILED
from base.values import counted, first_of
from data.corpus.block_hashes import BLOCK_BYTES, read_exactly, side_file_bytes
from data.corpus.corpus import MANIFEST, open_corpus
from data.corpus.shard_writer import file_hash
from data.corpus.tokenizer import load_tokenizer
from data.text.provenance import SUFFIX
from data.text.publish import INPUTS
from data.text.workers import run_tasks

MOST_SHOWN = 20


@dataclass(frozen=True)
class ShardCheck:
    """One shard to read: path of its .bin, and its entry in the manifest."""

    path: Path
    entry: dict
    dtype: str
    eod_id: int
    vocab_size: int


def verify_corpus(folder: Path, workers: int = 1) -> dict:
    """Read every byte of a corpus; returns its manifest. Raises UserError with all damage."""
    corpus = open_corpus(folder)
    manifest, problems = corpus.manifest, []
    stated = [manifest[key] for key in ("dtype", "eod_id", "vocab_size")]
    checks = [
        ShardCheck(folder / f"{entry['name']}.bin", entry, *stated)
        for entries in manifest["splits"].values()
        for entry in entries
    ]
    run_tasks(
        check_shard_bytes,
        checks,
        workers,
        title="verifying",
        total_bytes=sum(check.entry["bin_bytes"] for check in checks),
        on_done=lambda number, found: problems.extend(found),
    )
    problems += _side_problems(folder, manifest)
    if problems:
        raise UserError(*first_of(problems, MOST_SHOWN, "problems"))
    return manifest


def check_shard_bytes(check: ShardCheck, _, advance) -> list[str]:
    """Problems of one .bin: the hash of every block, the range of ids, the number of end ids."""
    size, dtype = check.entry["bin_bytes"], np.dtype(check.dtype).newbyteorder("<")
    expected = [None] * (side_file_bytes(size) // 8)  # None: imported without being read
    if check.entry["xxh_xxh3"]:
        expected = np.fromfile(check.path.with_suffix(".xxh"), dtype="<u8").tolist()
    buffer, problems = bytearray(min(BLOCK_BYTES, size)), []
    low, high, eods = None, None, 0
    fd = os.open(check.path, os.O_RDONLY)
    try:
        for block, wanted in enumerate(expected):
            start = block * BLOCK_BYTES
            data = memoryview(buffer)[: min(BLOCK_BYTES, size - start)]
            read_exactly(fd, data, start, check.path)
            found = xxhash.xxh3_64_intdigest(data)
            if wanted is not None and found != wanted:
                problems.append(
                    f"{check.path}: bytes {start} to {start + len(data)} have xxh3 {found:016x}, "
                    f"expected {wanted:016x}: restore it from a copy or build the corpus again"
                )
            ids = np.frombuffer(data, dtype=dtype)
            least, most = int(ids.min()), int(ids.max())
            low = least if low is None else min(low, least)
            high = most if high is None else max(high, most)
            eods += int(np.count_nonzero(ids == check.eod_id))
            advance(len(data))
    except UserError as error:
        return problems + error.problems
    finally:
        os.close(fd)
    found = {"min_id": low, "max_id": high, "eod_count": eods}
    stated = {key: check.entry[key] for key in found}
    if check.entry["xxh_xxh3"] is None:
        if low is not None and (low < 0 or high >= check.vocab_size):
            most = check.vocab_size - 1
            problems.append(f"{check.path}: expected ids from 0 to {most}, found {low} to {high}")
    elif not problems and found != stated:
        problems.append(f"{check.path}: expected {stated}, found {found}: a stale manifest")
    return problems


def _side_problems(folder: Path, manifest: dict) -> list[str]:
    problems = []
    expected = dict(manifest["made_with"].get("side_files", {}))
    inputs = manifest.get("input_files")
    if inputs:
        expected[INPUTS] = inputs["xxh3"]
    for name, wanted in expected.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: expected this file, found none; restore it from a copy")
        elif (found := file_hash(path)) != wanted:
            problems.append(f"{path}: has xxh3 {found}, expected {wanted}: it is damaged")
    for entry in (entry for entries in manifest["splits"].values() for entry in entries):
        path = folder / (entry["name"] + SUFFIX)
        if path.name in expected and not any(str(path) in text for text in problems):
            rows = _num_rows(path)
            if rows != entry["documents"]:
                problems.append(f"{path}: expected {entry['documents']} documents, found {rows}")
    tokenizer = manifest["tokenizer"]
    if tokenizer:
        try:
            found = load_tokenizer(folder / tokenizer["folder"])
            if not found.is_recorded_as(tokenizer["fingerprint"]):
                problems.append(
                    f"{folder / tokenizer['folder']}: has the fingerprint"
                    f" {found.fingerprint()[:16]}, expected "
                    f"{tokenizer['fingerprint'][:16]}: restore it from a copy"
                )
        except UserError as error:
            problems += error.problems
    return problems


def _num_rows(path: Path) -> int | str:
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        return f"no Parquet file ({error})"


def main(arguments: list[str] | None = None) -> int:
    """Entry of `make corpus-verify`; returns the exit status."""
    parser = Parser(
        prog="python -m commands.corpus_verify", description="Read every byte of a corpus."
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--workers", type=int, default=usable())
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        if options.workers < 1:
            raise UserError(f"WORKERS={options.workers}: is not 1 or more")
        manifest = verify_corpus(options.corpus, options.workers)
    except UserError as error:
        if options.workers < 1 or not (options.corpus / MANIFEST).is_file():
            return refuse(error)
        print(error, file=sys.stderr)  # it is damaged
        return FAILED
    shards = [entry for entries in manifest["splits"].values() for entry in entries]
    size, seconds = sum(s["bin_bytes"] for s in shards), time.monotonic() - start
    unread = sum(shard["xxh_xxh3"] is None for shard in shards)
    print(
        f"{options.corpus}: whole; {counted(len(shards), 'shard')}, {size:,} bytes in"
        f" {seconds:.1f} s"
    )
    if unread:
        print(
            f"  {counted(unread, 'shard')} without hashes (imported with QUICK=1): only ids were"
            " checked"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
