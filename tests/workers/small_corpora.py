"""Writes small corpora of given token ids with the product's own writer, and damages them."""

from pathlib import Path

import numpy as np

from data.corpus.corpus import write_manifest
from data.corpus.corpus_writer import CorpusWriter
from data.stream.schedule import read_schedule
from data.stream.stream import Stream, open_stream
from recipes.schema import Data, Source

EOD = 0


def write_corpus(folder: Path, train, valid=(), *, vocab_size=1000, shard_bytes=1 << 20, **fields):
    """Write a corpus of the given documents (ids without the end id); returns the manifest."""
    writer = CorpusWriter(folder, vocab_size, EOD, shard_bytes)
    for split, documents in (("train", train), ("valid", valid)):
        for ids in documents:
            writer.add(split, np.append(np.asarray(ids, dtype=np.int64), EOD))
    if not train:
        writer.shards["train"] = []
    return writer.close({"name": "test", "tokenizer": None, "bos_id": None, **fields})


def random_documents(num: int, low: int, high: int, seed: int = 0, vocab_size: int = 1000):
    """Make `num` documents of `low` to `high` tokens, ids from 1."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, rng.integers(low, high + 1)) for _ in range(num)]


def counting_document(num_tokens: int, first: int = 1):
    """Document whose ids count up, so that an id shows its position."""
    return np.arange(first, first + num_tokens)


def rewrite_manifest(folder: Path, manifest: dict, **changes) -> dict:
    """Write a changed manifest with a matching id, as a careless tool could."""
    return write_manifest(folder, {**manifest, **changes})


def stream_of(
    root: Path,
    sources: dict,
    *,
    seq_len=16,
    batch=8,
    seed=1234,
    vocab_size=1000,
    warmup=(),
    **data_fields,
) -> Stream:
    """Open a stream over corpora below `root`.

    `sources` maps a name to a Source, or to the weight of the folder of that name.
    """
    made = {
        uid: value if isinstance(value, Source) else Source(corpus=uid, weight=value)
        for uid, value in sources.items()
    }
    tokens = batch if isinstance(batch, list) else batch * seq_len
    schedule = read_schedule(tokens, seq_len, warmup)
    return open_stream(Data(sources=made, **data_fields), seed, seq_len, schedule, root, vocab_size)


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
