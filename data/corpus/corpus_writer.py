"""A corpus made from documents: tokenize, add begin and end ids, cut shards, write the manifest.

Rule: the bytes depend on the documents, the tokenizer and the shard size, on nothing else: not on
the machine, the number of threads, or the batches in which documents were encoded.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from base.errors import UserError
from base.values import counted
from data.corpus.corpus import BEGIN_SHARED, BEGIN_STORED, write_manifest
from data.corpus.documents import POLICY, Document, clean_text, pieces_of
from data.corpus.indexed import token_dtype
from data.corpus.shard_writer import ShardWriter
from data.corpus.tokenizer import TextTokenizer, library_version

SHARD_BYTES = 512 << 20
# Text handed to the tokenizer at once; the tokenizer spreads the pieces over its threads.
ENCODE_CHARS = 4 << 20


class CorpusWriter:
    """Writes documents of ids into a corpus folder, split by split. Shards are cut between
    documents.
    """

    def __init__(self, folder: Path, vocab_size: int, eod_id: int, shard_bytes: int = SHARD_BYTES):
        self.folder, self.vocab_size, self.eod_id = folder, vocab_size, eod_id
        self.dtype = token_dtype(vocab_size)
        self._max_tokens = shard_bytes // self.dtype.itemsize
        self._writers: dict[str, ShardWriter] = {}
        self.shards: dict[str, list[dict]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, split: str, ids: np.ndarray) -> None:
        """Append one document, its end id included."""
        writer = self._writers.get(split)
        if writer and writer.num_tokens and writer.num_tokens + len(ids) > self._max_tokens:
            self.shards[split].append(writer.close())
            writer = None
        if writer is None:
            number = len(self.shards.setdefault(split, []))
            prefix = self.folder / f"{split}-{number:05d}"
            writer = self._writers[split] = ShardWriter(prefix, self.dtype, self.eod_id)
        writer.add(ids)

    def close(self, fields: Mapping) -> dict:
        """Publish the last shards and the manifest, with `fields` added; returns the manifest."""
        for split, writer in self._writers.items():
            self.shards[split].append(writer.close())
        self._writers = {}
        own = {
            "vocab_size": self.vocab_size,
            "dtype": self.dtype.name,
            "eod_id": self.eod_id,
            "eod_policy": "append",
            "begin_id": self.eod_id,
            "begin_policy": BEGIN_SHARED,
            "splits": self.shards,
            "made_with": {
                "python": platform.python_version(),
                "tokenizer_library": library_version(),
            },
        }
        return write_manifest(self.folder, own | dict(fields))

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


def write_text_corpus(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TextTokenizer,
    *,
    fields: Mapping,
    valid: str,
    bad_bytes: str = "stop",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict:
    """Tokenize documents into a corpus folder and return its manifest.

    fields: further fields of the manifest (its "name" at least); valid: "required" refuses an empty
    validation split, "none" refuses a document in it. progress(documents so far, tokens so far) is
    called between batches.
    """
    writer = CorpusWriter(folder, tokenizer.vocab_size, tokenizer.eod_id, shard_bytes)
    counts: Counter = Counter()
    inputs: list[dict] = []
    done = tokens = 0
    try:
        for batch in _batches(documents, counts, bad_bytes, inputs):
            for split, ids in _encode(batch, tokenizer, counts):
                writer.add(split, ids)
                tokens += len(ids)
            done += len(batch)
            progress(done, tokens)
        _check_splits(writer.shards, inputs, valid)
    except BaseException:
        writer.abort()
        raise
    tokenizer.save(folder / "tokenizer")
    return writer.close(
        {
            "bos_id": tokenizer.bos_id,
            **begin_fields(tokenizer, is_stored=tokenizer.begin_id != tokenizer.eod_id),
            "tokenizer": {"folder": "tokenizer", "fingerprint": tokenizer.fingerprint()},
            "text": dict(POLICY, bad_bytes=bad_bytes),
            "counts": dict(counts),
            "inputs": inputs,
        }
        | dict(fields)
    )


def begin_fields(tokenizer: TextTokenizer, is_stored: bool) -> dict:
    """Fields of the manifest for the token that precedes a document in training.

    is_stored: each document begins with the tokenizer's begin id. Else the end id of the document
    before is its begin id as well: it is the last target of one and the first input of the other.
    """
    if is_stored:
        return {"begin_id": tokenizer.begin_id, "begin_policy": BEGIN_STORED}
    return {"begin_id": tokenizer.eod_id, "begin_policy": BEGIN_SHARED}


def hash_limit(valid_fraction: float) -> int:
    """A document is held out when the xxh3-64 of its text is below this number."""
    if not 0 <= valid_fraction < 1:
        raise UserError(f"valid={valid_fraction}: is not a share in [0, 1) of the documents")
    return math.ceil(valid_fraction * 2.0**64)


def _batches(documents, counts, bad_bytes, inputs):
    """Cleaned (split, text) pairs, about ENCODE_CHARS of text at a time.

    Appends the size and hash of each document to `inputs`.
    """
    batch, size = [], 0
    for document in documents:
        text = clean_text(document, counts, bad_bytes)
        inputs.append(_input_entry(document, is_dropped=text is None))
        if text is None:
            continue
        batch.append((document.split, text))
        size += len(text)
        if size >= ENCODE_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch, tokenizer: TextTokenizer, counts: Counter):
    pieces = [list(pieces_of(text)) for _, text in batch]
    encoded = iter(tokenizer.encode([piece for some in pieces for piece in some]))
    end = np.array([tokenizer.eod_id], dtype=np.int64)
    is_stored = tokenizer.begin_id != tokenizer.eod_id
    begin = np.array([tokenizer.begin_id] if is_stored else [], dtype=np.int64)
    for (split, text), some in zip(batch, pieces, strict=True):
        counts["special_token_strings"] += tokenizer.count_specials(text)
        counts["long_documents"] += len(some) > 1
        counts[f"documents_{split}"] += 1
        yield split, np.concatenate([begin, *(next(encoded) for _ in some), end])


def _input_entry(document: Document, is_dropped: bool) -> dict:
    data = (
        document.data
        if isinstance(document.data, bytes)
        else document.data.encode("utf-8", "surrogatepass")
    )
    return {
        "name": document.name,
        "bytes": len(data),
        "xxh3": xxhash.xxh3_128_hexdigest(data),
        "split": None if is_dropped else document.split,
    }


def _check_splits(shards: Mapping, inputs: list[dict], valid: str) -> None:
    assert valid in ("required", "none")
    found = {name: sum(one["split"] == name for one in inputs) for name in ("train", "valid")}
    total = (
        f"{found['train']} for training and {found['valid']} for validation, of"
        f" {counted(len(inputs), 'document')}"
    )
    if not found["train"]:
        raise UserError(f"{total}; nothing to train on: add documents, or hold out fewer")
    if valid == "required" and not found["valid"]:
        raise UserError(
            f"{total}; hold out more, or build without validation (valid=none), which turns it off"
        )
    assert set(shards) <= {"train", "valid"}
    assert valid == "required" or not found["valid"]
