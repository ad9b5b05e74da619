"""From documents to a corpus: ends, counts, splits, and equal bytes however it was made."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from digests import digest
from ranks import PATIENCE

from base.errors import UserError
from data.corpus.corpus import open_corpus
from data.corpus.corpus_writer import CorpusWriter, hash_limit, write_text_corpus
from data.corpus.documents import Document
from data.corpus.tokenizer import byte_tokenizer, load_tokenizer, train_bpe

TEXTS = ["", "first document", "  \n ", "second\r\ndocument <|endoftext|>", "third\x00", "\t"]


def write(folder, texts=TEXTS, tokenizer=None, split=lambda text: "train", valid="none", **options):
    documents = [Document(f"{i}.txt", text, split(text)) for i, text in enumerate(texts)]
    tokenizer = tokenizer or byte_tokenizer()
    fields = {"name": "test"}
    return write_text_corpus(folder, documents, tokenizer, fields=fields, valid=valid, **options)


def test_documents_end_with_the_end_id_and_blank_ones_are_dropped_and_counted(tmp_path):
    manifest = write(tmp_path)
    corpus = open_corpus(tmp_path)
    split = corpus.splits["train"]
    ids = split.read(np.array([0]), split.num_tokens)[0].tolist()
    expected = [b"first document", b"second\ndocument <|endoftext|>", b"third\x00"]
    assert ids == [i for text in expected for i in [*text, 256]]
    _, starts = split.document_starts(np.array([0]), split.num_tokens)
    assert starts.tolist() == [0, 15, 15 + len(expected[1]) + 1]
    counts = manifest["counts"]
    assert counts["blank_documents"] == 3
    assert counts["documents_train"] == 3
    assert counts["newlines"] == 1
    assert counts["special_token_strings"] == 1
    assert [entry["split"] for entry in manifest["inputs"]] == [
        None,
        "train",
        None,
        "train",
        "train",
        None,
    ]
    assert corpus.eod_id == 256


def test_the_stored_tokenizer_is_the_one_that_made_the_corpus(tmp_path):
    tokenizer = train_bpe(["some text to learn from " * 9], vocab_size=270)
    write(tmp_path, tokenizer=tokenizer)
    corpus = open_corpus(tmp_path)
    stored = load_tokenizer(corpus.tokenizer_folder)
    assert stored.fingerprint() == tokenizer.fingerprint() == corpus.tokenizer_fingerprint
    assert corpus.vocab_size == 270


def test_bytes_do_not_depend_on_batching_or_threads(tmp_path, monkeypatch):
    texts = [f"document {i} " * (i % 13 + 1) for i in range(60)]
    write(tmp_path / "a", texts, shard_bytes=512)
    monkeypatch.setattr("data.corpus.corpus_writer.ENCODE_CHARS", 50)
    write(tmp_path / "b", texts, shard_bytes=512)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert len(open_corpus(tmp_path / "a").splits["train"].shards) > 3
    code = (
        "import sys; sys.path[:0] = ['tests/data/corpus', 'tests/workers']\n"
        "import pathlib, test_corpus_writer as t\n"
        f"texts = [f'document {{i}} ' * (i % 13 + 1) for i in range(60)]\n"
        f"t.write(pathlib.Path({str(tmp_path / 'c')!r}), texts, shard_bytes=512)"
    )
    environment = dict(os.environ, RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60 * PATIENCE)
    assert digest(tmp_path / "a") == digest(tmp_path / "c")


def test_vocabulary_of_70000_is_stored_in_int32(tmp_path):
    writer = CorpusWriter(tmp_path, vocab_size=70000, eod_id=0)
    writer.add("train", np.array([65541, 0]))
    manifest = writer.close({"name": "wide", "tokenizer": None, "bos_id": None})
    assert manifest["dtype"] == "int32"
    assert open_corpus(tmp_path).splits["train"].read(np.array([0]), 2).tolist() == [[65541, 0]]


def test_long_documents_are_cut_counted_and_still_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "data.corpus.corpus_writer.pieces_of", lambda text: iter([text[:7], text[7:]])
    )
    manifest = write(tmp_path, ["first document", "second one"])
    assert manifest["counts"]["long_documents"] == 2
    split = open_corpus(tmp_path).splits["train"]
    assert split.num_documents == 2
    assert split.read(np.array([0]), 15).tolist() == [[*b"first document", 256]]


def by_hash(text: str) -> str:
    """The side of a document where a fifth of them is held out."""
    return "valid" if xxhash.xxh3_64_intdigest(text.encode()) < hash_limit(0.2) else "train"


def test_splits_add_up_to_the_total(tmp_path):
    texts = [f"text number {i}" for i in range(200)]
    manifest = write(tmp_path, texts, split=by_hash, valid="required")
    counts = manifest["counts"]
    assert counts["documents_train"] + counts["documents_valid"] == 200
    assert 20 <= counts["documents_valid"] <= 60
    assert counts["documents_valid"] == sum(by_hash(text) == "valid" for text in texts)


@pytest.mark.parametrize("num", [1, 3])
def test_an_empty_validation_part_is_refused_unless_turned_off(tmp_path, num):
    texts = ["a", "b", "c"][:num]
    with pytest.raises(
        UserError, match=rf"{num} for training and 0 for validation, of {num} document"
    ):
        write(tmp_path / "a", texts, valid="required")
    assert not list((tmp_path / "a").iterdir())
    write(tmp_path / "b", texts, valid="none")
    assert "valid" not in open_corpus(tmp_path / "b").splits


def test_a_corpus_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to train on"):
        write(tmp_path, ["", "  "])


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_a_fraction_that_is_no_share_is_refused(fraction):
    with pytest.raises(UserError, match=r"is not a share in \[0, 1\)"):
        hash_limit(fraction)


def test_an_error_in_the_middle_leaves_no_manifest_and_no_shard(tmp_path):
    with pytest.raises(UserError, match="not UTF-8"):
        write(tmp_path, ["good", b"\xff", "good"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_manifest_is_plain_json_with_the_policy(tmp_path):
    write(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["text"]["newlines"] == "crlf to lf"
    assert manifest["eod_policy"] == "append"
