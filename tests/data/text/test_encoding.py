"""Engines: the fast one is used only while its ids are those of `tokenizers`; anything else ends
its use, aloud.
"""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from text_inputs import GOOD, build, json_lines, texts_of, write_files

from base.errors import UserError
from benchmarks import tokenize as benchmark
from data.corpus.tokenizer import byte_tokenizer, train_bpe
from data.text import encoding, ingest
from data.text.encoding import Encoder, EngineDiffers, choose_engine

TEXTS = [*GOOD, "a <|endoftext|> b", "<|endoftext|>", "", "x" * 3000, "caf\u00e9 \U0001f600\n\n"]


def install(monkeypatch, wrong_at=None, refuse=False):
    """A stand-in for gigatoken: right ids, or a wrong one for texts that hold `wrong_at`."""
    plain = byte_tokenizer()

    class Tokenizer:
        @classmethod
        def from_json(cls, definition):
            if refuse:
                raise RuntimeError("no such pre-tokenizer")
            return cls()

        def encode_batch(self, texts, parallel):
            assert parallel is False
            assert not any("<|endoftext|>" in text for text in texts)  # it would make it an id
            rows = [ids.astype(np.uint32) for ids in plain.encode(texts)]
            for text, ids in zip(texts, rows, strict=True):
                if wrong_at and wrong_at in text:
                    ids[0] ^= 1
            edges = np.cumsum([0, *map(len, rows)])
            flat = SimpleNamespace(data=np.concatenate(rows))
            layout = SimpleNamespace(content=flat, offsets=SimpleNamespace(data=edges))
            return SimpleNamespace(layout=layout)

    module = ModuleType("gigatoken")
    module.Tokenizer = Tokenizer
    module.__spec__ = importlib.machinery.ModuleSpec("gigatoken", None)
    monkeypatch.setitem(sys.modules, "gigatoken", module)


def test_long_texts_are_encoded_in_pieces_and_come_back_whole(monkeypatch):
    monkeypatch.setattr(encoding, "ENCODE_CHARS", 50)
    found = Encoder(byte_tokenizer(), "tokenizers").encode(TEXTS)
    assert [bytes(ids.astype(np.uint8)).decode() for ids in found] == TEXTS
    assert Encoder(byte_tokenizer(), "tokenizers").encode([]) == []


def test_the_fast_engine_is_used_after_equal_ids_and_changes_no_byte(monkeypatch, tmp_path):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines([*TEXTS, "last"])})
    build(source, tmp_path / "slow", "engine=tokenizers")
    install(monkeypatch)
    said = []
    manifest = build(source, tmp_path / "fast", log=said.append)
    assert manifest["made_with"]["engine"] == "gigatoken"
    assert "equal ids on the probe and 46 documents" in said[0]
    for name in ("train-00000.bin", "train-00000.idx", "inputs.jsonl"):
        slow, fast = (tmp_path / one / name for one in ("slow", "fast"))
        assert slow.read_bytes() == fast.read_bytes()
    slow = build(source, tmp_path / "slow", "engine=tokenizers")
    assert slow["corpus_id"] == manifest["corpus_id"]


def test_other_ids_in_the_sample_are_refused_aloud(monkeypatch, tmp_path):
    install(monkeypatch, wrong_at="number 3,")
    assert choose_engine(byte_tokenizer(), "auto", GOOD[:3])[0] == "gigatoken"
    engine, note = choose_engine(byte_tokenizer(), "auto", GOOD)
    assert engine == "tokenizers"
    assert "gives other ids on a sample of the input; using tokenizers" in note
    install(monkeypatch, refuse=True)
    engine, note = choose_engine(byte_tokenizer(), "gigatoken", GOOD)
    assert engine == "tokenizers"
    assert "cannot take this tokenizer (no such pre-tokenizer)" in note


def test_other_ids_on_the_way_start_the_build_again_with_tokenizers(monkeypatch, tmp_path):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines([*GOOD, "a rare word"])})
    build(source, tmp_path / "slow", "engine=tokenizers")
    install(monkeypatch, wrong_at="rare")
    monkeypatch.setattr(encoding, "RECHECK", 1)
    monkeypatch.setattr(ingest, "SAMPLE_DOCUMENTS", 5)
    said = []
    manifest = build(source, tmp_path / "c", log=said.append)
    assert "equal ids" in said[0]
    assert "gives other ids for 'a rare word'; using tokenizers" in said[1]
    assert manifest["made_with"]["engine"] == "tokenizers"
    assert texts_of(tmp_path / "c") == [*GOOD, "a rare word"]
    with pytest.raises(EngineDiffers):
        Encoder(byte_tokenizer(), "gigatoken").encode(["rare"])


def test_an_engine_that_is_not_installed_is_refused_only_when_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_engine(byte_tokenizer(), "auto", GOOD) == ("tokenizers", "")
    with pytest.raises(UserError, match=r"engine=gigatoken: is not installed; pip install"):
        choose_engine(byte_tokenizer(), "gigatoken", GOOD)


def test_gigatoken_itself_gives_equal_ids(tmp_path):
    pytest.importorskip("gigatoken")
    tokenizer = train_bpe(GOOD * 3, 400)
    assert choose_engine(tokenizer, "gigatoken", TEXTS)[0] == "gigatoken"
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines([*TEXTS, "last"])})
    build(source, tmp_path / "slow", "engine=tokenizers", tokenizer=tokenizer)
    manifest = build(source, tmp_path / "fast", "engine=gigatoken", tokenizer=tokenizer)
    assert manifest["made_with"]["engine"] == "gigatoken"
    assert (tmp_path / "slow" / "train-00000.bin").read_bytes() == (
        tmp_path / "fast" / "train-00000.bin"
    ).read_bytes()


def test_the_benchmark_compares_ids_before_speeds_and_times_by_turns():
    given = {"raw tokenizers": lambda: [[5, 6], [7]], "ours": lambda: np.array([5, 6, 0, 7, 0])}
    found = benchmark.compare(given, 3, 1000)
    assert list(found) == list(given)
    assert found["raw tokenizers"]["ratio"] == 1
    with pytest.raises(AssertionError, match="ours gives other ids"):
        benchmark.compare(given | {"ours": lambda: np.array([5, 6, 0, 8, 0])}, 1, 1000)
    numbers = {"bytes_per_cpu_s": 2e6, "ratio": 1.5}
    result = {"command": "x", "tokenizing": {"ours": numbers}, "verify": {}, "versions": {"a": "1"}}
    assert "| ours | 2.00 | 1.50x |" in benchmark.table(result)
