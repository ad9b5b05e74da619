"""The last files of a corpus made from text: counts of each input, lines put aside, the manifest.

    corpus/  inputs.jsonl (a line for each input: size, hash, counts)  quarantine.jsonl  tokenizer/

Rule: the fields that record the origin of the corpus are part of its identity; fields that may
differ between equal builds (versions, the engine, hashes of side files) stand under `made_with`.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from base.durable import sync_folder
from base.values import counted
from data.corpus.corpus import write_manifest
from data.corpus.corpus_writer import begin_fields
from data.corpus.documents import POLICY
from data.corpus.indexed import token_dtype
from data.corpus.shard_writer import PublishedFile, file_hash
from data.corpus.tokenizer import TextTokenizer, library_version
from data.text.assemble import Done, ShardTask
from data.text.inputs import ORDER_RULE, InputFile
from data.text.settings import Settings
from data.text.shuffle import RULE
from data.text.unit import read_summary

INPUTS, QUARANTINE = "inputs.jsonl", "quarantine.jsonl"


@dataclass(frozen=True)
class Made:
    """Everything that a build made from the input."""

    files: Sequence[InputFile]
    units: Sequence[Done]
    shards: Sequence[ShardTask]
    entries: Sequence[dict]  # of the shards, as `write_shard` left them
    by_file: Mapping[str, Counter]  # documents and tokens by split, duplicates


def write_fields(
    folder: Path,
    made: Made,
    tokenizer: TextTokenizer,
    *,
    settings: Settings,
    hashes: Mapping[str, str],
    not_found: int,
    volatile: Mapping,
) -> dict:
    """Write the files that are not shards, the manifest last, and return the manifest.

    hashes: of the inputs by name; not_found: number of entries of the held-out file without a text
    in the input; volatile: fields that may differ between equal builds.
    """
    # Side files, quarantine, inputs, tokenizer.
    done, shards, entries = made.units, made.shards, made.entries
    inputs = _input_lines(made, hashes)
    counts: Counter = Counter()
    for line in inputs:
        counts.update(line["counts"])
    side = {name: digest for entry in entries for name, digest in entry["side"].items()}
    side[QUARANTINE] = write_lines(folder / QUARANTINE, _quarantine(done))
    inputs_hash = write_lines(folder / INPUTS, (json.dumps(x, ensure_ascii=False) for x in inputs))
    tokenizer.save(folder / "tokenizer")
    sync_folder(folder / "tokenizer")
    longest = [summary["longest"] for summary in summaries(done) if summary["longest"]]
    # The manifest.
    fields = {
        "name": "text",
        "source": counted(len(made.files), "file"),
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "eod_id": tokenizer.eod_id,
        "eod_policy": "append",
        "bos_id": tokenizer.bos_id,
        **begin_fields(tokenizer, settings.is_begin_stored(tokenizer)),
        "splits": {
            split: [e["entry"] for s, e in zip(shards, entries, strict=True) if s.split == split]
            for split in sorted({"train", *(s.split for s in shards)})
        },
        "tokenizer": {"folder": "tokenizer", "fingerprint": tokenizer.fingerprint()},
        "text": _policy(settings, tokenizer),
        "filters": settings.filters.as_dict(),
        "duplicates": (
            "dropped: the first in input order stays (equal xxh3-128 of the text)"
            if settings.duplicates == "drop"
            else "kept"
        ),
        "held_out": _held_out(settings, not_found),
        "counts": dict(sorted(counts.items())),
        "longest_document": max(longest, key=lambda one: one["tokens"], default=None),
        "input_files": {
            "file": INPUTS,
            "xxh3": inputs_hash,
            "files": len(made.files),
            "bytes": sum(file.bytes for file in made.files),
            "order_rule": ORDER_RULE,
        },
        "made_with": {
            "python": platform.python_version(),
            "tokenizer_library": library_version(),
            "pyarrow": pa.__version__,
            "side_files": side,
            **volatile,
        },
    }
    if settings.shuffle is not None:
        fields["document_order"] = {"shuffled": settings.shuffle, "rule": RULE}
    return write_manifest(folder, fields)


def _policy(settings: Settings, tokenizer: TextTokenizer) -> dict:
    return POLICY | {
        "field": settings.text,
        "text_files": f"documents by {settings.document!r}",
        "normalizer": tokenizer.normalizer,
        "bad_bytes": settings.bad_bytes,
        "bad_lines": "stop" if settings.max_bad == 0 else f"put aside into {QUARANTINE}",
    }


def _held_out(settings: Settings, not_found: int) -> dict:
    return {
        "rule": "xxh3-64 of the text below the share of 2**64; and every text of the file",
        "share": settings.valid_fraction,
        "file_xxh3": file_hash(Path(settings.held_out)) if settings.held_out else None,
        "file_entries_not_in_the_input": not_found,
    }


def summaries(done: list[Done]) -> Iterator[dict]:
    """The summary of each unit; the row of its longest document counts in the whole file."""
    for unit in done:
        summary = read_summary(unit.folder)
        if summary["longest"]:
            summary["longest"]["row"] += unit.row_base
        yield summary


def _input_lines(made: Made, hashes: Mapping[str, str]) -> list[dict]:
    """One line for each input file: kind, size, hash, counts."""
    counts: dict[str, Counter] = {file.name: Counter() for file in made.files}
    for summary in summaries(made.units):
        for name, some in zip(summary["files"], summary["counts"], strict=True):
            counts[name].update(some)
    for name, some in made.by_file.items():
        counts[name].update(some)
    return [
        {
            "name": file.name,
            "kind": file.kind + file.packed,
            "bytes": file.bytes,
            "xxh3": hashes[file.name],
            "counts": {key: n for key, n in sorted(counts[file.name].items()) if n},
        }
        for file in made.files
    ]


def _quarantine(done: list[Done]) -> Iterator[str]:
    for unit in done:
        with open(unit.folder / "bad.jsonl", encoding="utf-8") as lines:
            for line in lines:
                one = json.loads(line)
                one["row"] += unit.row_base
                yield json.dumps(one)


def write_lines(path: Path, lines: Iterable[str]) -> str:
    """Publish a file of lines; returns its xxh3-128."""
    file = PublishedFile(path)
    for line in lines:
        file.write((line + "\n").encode())
    file.publish()
    return file.digest()
