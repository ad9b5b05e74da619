"""Writes inputs of corpus builds, builds corpora in this process and reads them back, for tests."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.corpus.corpus import open_corpus
from data.corpus.tokenizer import byte_tokenizer
from data.text.ingest import build_corpus
from data.text.settings import read_settings

GOOD = [f"document number {i}, {'word ' * (i % 7)}end" for i in range(40)]


def json_lines(texts, **more) -> bytes:
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\n" for text in texts)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write_files(folder: Path, files: dict[str, bytes | str]) -> Path:
    """Write files below a folder; returns the folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def build(source, out: Path, *words: str, workers=1, tokenizer=None, log=lambda text: None) -> dict:
    """Build a corpus with `knob=value` arguments, by default all train; returns its manifest."""
    words = (
        words
        if any(word.startswith(("valid=", "held_out=")) for word in words)
        else (
            *words,
            "valid=0",
        )
    )
    tokenizer = tokenizer or byte_tokenizer()
    return build_corpus(str(source), out, tokenizer, read_settings(words), workers, log)


def texts_of(folder: Path, split: str = "train") -> list[str]:
    """Read the documents of a corpus that was made with the byte tokenizer."""
    corpus = open_corpus(folder)
    if split not in corpus.splits:
        return []
    found = corpus.splits[split]
    ids = found.read(np.array([0]), found.num_tokens)[0]
    documents = np.split(ids, np.flatnonzero(ids == corpus.eod_id) + 1)
    return [bytes(one[:-1].astype(np.uint8)).decode() for one in documents if len(one)]


def gzipped(*members: bytes) -> bytes:
    return b"".join(gzip.compress(member, mtime=0) for member in members)
