"""A small corpus of many short documents, and how to write it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.corpus.corpus_writer import CorpusWriter

VOCAB_SIZE = 64
EOD = 63


def write_short_documents(folder: Path) -> Path:
    """A corpus of 400 documents of 3 to 50 tokens, ids below 64: many boundaries, uneven masks."""
    draw = np.random.default_rng(5)
    writer = CorpusWriter(folder, VOCAB_SIZE, EOD)
    for split, count in (("train", 400), ("valid", 60)):
        for _ in range(count):
            body = draw.integers(0, EOD, size=int(draw.integers(2, 50)))
            writer.add(split, np.append(body, EOD))
    writer.close({"name": "short", "tokenizer": None, "bos_id": None})
    return folder
