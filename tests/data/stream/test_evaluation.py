"""data.stream.evaluation: held-out micro-batches by source, and the bytes of their targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_corpora import stream_of, write_corpus

from data.corpus.corpus_writer import write_text_corpus
from data.corpus.documents import Document
from data.corpus.tokenizer import byte_tokenizer


def write_text(folder: Path, *held_out: str) -> None:
    documents = [Document("train", "some text to train on " * 9)]
    documents += [Document(str(n), text, "valid") for n, text in enumerate(held_out)]
    fields = {"name": "x"}
    write_text_corpus(folder, documents, byte_tokenizer(), fields=fields, valid="required")


def test_the_bytes_of_a_set_worked_by_hand(tmp_path):
    """Tokens are bytes. Prose: 31 bytes, an end, 1 byte, an end: two windows of 16 inputs need 33
    tokens, and their 32 targets are 30 bytes, an end and the first byte of the second document.
    """
    write_text(tmp_path / "prose", "0123456789abcdefghijklmnopqrstu", "\u00e9")
    write_text(tmp_path / "code", "x" * 17)
    stream = stream_of(tmp_path, {"prose": 1, "code": 1}, vocab_size=257)
    assert stream.evaluation_bytes(10**4) == [16, 31]
    across = stream_of(tmp_path, {"prose": 1, "code": 1}, vocab_size=257, attend="across")
    assert across.evaluation_bytes(10**4) == [16, 31]


def test_a_micro_batch_holds_one_source_and_each_rank_has_as_many_of_each(tmp_path):
    write_text(tmp_path / "prose", "p" * (16 * 5 + 1))
    write_text(tmp_path / "code", "c" * (16 * 3 + 1))
    stream = stream_of(tmp_path, {"prose": 1, "code": 1}, vocab_size=257)
    ranks = [stream.evaluation(rank, 2, 2, 10**4) for rank in range(2)]
    assert [one.sources for one in ranks] == [[0, 1, 1]] * 2
    letters = [ord("c"), ord("p")]
    seen = np.zeros(2, dtype=int)
    for one in ranks:
        assert one.uids == ["code", "prose"]
        for batch, source in zip(one.batches, one.sources, strict=True):
            targets = batch.labels[batch.labels >= 0]
            assert set(targets.tolist()) <= {letters[source]}
            seen[source] += len(targets)
    assert seen.tolist() == [16 * 3, 16 * 5]


def test_a_source_of_ids_has_no_bytes(tmp_path):
    write_corpus(tmp_path / "ids", [range(1, 99)], [range(1, 80)], vocab_size=257)
    assert stream_of(tmp_path, {"ids": 1}, vocab_size=257).evaluation_bytes(10**4) is None
