"""A corpus whose entropy is known exactly: documents of a first-order Markov source. A loss below
it is a leak.

From every symbol the next one has the same probabilities, in 1/1024: 512, 256, 128, 120 for four
successors and 8 for the end of the document; the end symbol leads to five first symbols in the same
way. So every target of every window carries the same entropy (`ENTROPY_NATS`), with documents
isolated or not. The successors come from one keyed permutation of the symbols, shifted, so that
each symbol is about equally common and the frequency of a symbol carries no information.

Rule: all draws are SplitMix64 outputs by number, so the bytes are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.corpus.corpus_writer import CorpusWriter
from data.stream.order import forward, splitmix64

VOCAB_SIZE = 64
EOD_ID = VOCAB_SIZE - 1
NUM_SYMBOLS = VOCAB_SIZE - 1
NUM_DOCUMENTS = {"train": 8192, "valid": 1024}  # of 127 tokens on average
WEIGHTS = (512, 256, 128, 120, 8)  # in 1/1024; the last one ends the document
SHIFTS = (1, 5, 17, 40, 29)  # distinct, so that the successors of a symbol are distinct
SEED = 20240229

TOTAL = sum(WEIGHTS)
# Digits of logarithms in the manifest: they enter the corpus id, and the last ones depend on the
# machine.
DIGITS = 12
ENTROPY_NATS = round(-sum(w / TOTAL * math.log(w / TOTAL) for w in WEIGHTS), DIGITS)


def build(folder: Path, progress: Callable[[str], None]) -> dict:
    """Write the corpus into `folder`; returns its manifest with the entropy in nats per token."""
    writer = CorpusWriter(folder, VOCAB_SIZE, EOD_ID)
    surprise = {}
    for number, (split, num_documents) in enumerate(NUM_DOCUMENTS.items()):
        progress(f"drawing {num_documents} documents for {split}")
        documents = draw_documents(num_documents, SEED + number)
        for ids in documents:
            writer.add(split, ids)
        surprise[split] = mean_surprise(documents)
    return writer.close(
        {
            "name": "synthetic",
            "source": f"Markov source, seed {SEED}",
            "tokenizer": None,
            "bos_id": None,
            "entropy_nats_per_token": ENTROPY_NATS,
            # Mean loss of the true source on the tokens of each split, each document after an end.
            "source_nats_per_token": surprise,
        }
    )


def transitions() -> np.ndarray:
    """Next symbol by (symbol, outcome), int64 (VOCAB_SIZE, len(WEIGHTS))."""
    ring = forward(np.arange(NUM_SYMBOLS), NUM_SYMBOLS, SEED).astype(np.int64)
    place = np.argsort(ring)
    table = np.empty((VOCAB_SIZE, len(WEIGHTS)), dtype=np.int64)
    for outcome, shift in enumerate(SHIFTS):
        table[:NUM_SYMBOLS, outcome] = ring[(place + shift) % NUM_SYMBOLS]
        table[EOD_ID, outcome] = ring[shift]
    table[:NUM_SYMBOLS, -1] = EOD_ID
    return table


def draw_documents(num_documents: int, seed: int) -> list[np.ndarray]:
    """Documents of the source, each ending with EOD_ID, int64 (n,).

    All documents advance together, one symbol at a time.
    """
    table, thresholds = transitions(), np.cumsum(WEIGHTS)
    active = np.arange(num_documents)
    symbol = np.full(num_documents, EOD_ID)
    drawn, owners, position = [], [], 0
    while len(active):
        # Draw number (position, document) of the stream; the top 10 bits are uniform in 0..1023.
        bits = splitmix64(seed, position * num_documents + active + 1) >> np.uint64(54)
        outcome = np.searchsorted(thresholds, bits.astype(np.int64), side="right")
        symbol[active] = table[symbol[active], outcome]
        drawn.append(symbol[active])
        owners.append(active)
        active = active[symbol[active] != EOD_ID]
        position += 1
    owner = np.concatenate(owners)
    by_document = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=num_documents))
    return np.split(np.concatenate(drawn)[by_document], ends[:-1])


def mean_surprise(documents: list[np.ndarray]) -> float:
    """Mean of -ln p(next | current) of the true source over all tokens of the documents, in nats.

    The first symbol of a document follows the end symbol of the document before.
    """
    outcome_of = np.full((VOCAB_SIZE, VOCAB_SIZE), -1)
    np.put_along_axis(outcome_of, transitions(), np.arange(len(WEIGHTS))[None], axis=1)
    outcomes = np.concatenate(
        [outcome_of[np.concatenate([[EOD_ID], ids[:-1]]), ids] for ids in documents]
    )
    counts = np.bincount(outcomes, minlength=len(WEIGHTS)).tolist()
    pairs = zip(counts, WEIGHTS, strict=True)
    nats = sum(count * -math.log(weight / TOTAL) for count, weight in pairs)
    return round(nats / sum(counts), DIGITS)
