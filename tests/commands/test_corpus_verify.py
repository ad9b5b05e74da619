"""A full pass finds every kind of damage and names it; a corpus describes itself."""

import json
import os
import shutil

import pytest
from small_corpora import flip_byte, random_documents, rewrite_manifest, write_corpus
from text_inputs import GOOD, build, json_lines, write_files

from base.errors import UserError
from commands.corpus_info import info_lines
from commands.corpus_verify import main, verify_corpus
from data.corpus.build import ensure
from data.corpus.build_report import report_lines
from data.corpus.corpus import read_manifest
from recipes.schema import Source


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    text = json_lines([*GOOD, GOOD[3], " ", "a\r\n\ud83d", "<|endoftext|>"]) + b"[1]\n"
    source = write_files(root / "in", {"x.jsonl": text})
    build(source, root / "c", "valid=0.2", "max_bad=9", "min_chars=2")
    return root / "c"


@pytest.fixture
def corpus(made, tmp_path):
    shutil.copytree(made, tmp_path / "c")
    return tmp_path / "c"


def rewrite(path, old, new):
    path.write_text(path.read_text().replace(old, new))


DAMAGES = {
    "one bit of a shard": (
        lambda c: flip_byte(c / "train-00000.bin", 5),
        r"train-00000\.bin: bytes 0 to \d+ have xxh3",
    ),
    "a byte less": (
        lambda c: os.truncate(c / "train-00000.bin", 99),
        r"train-00000\.bin: expected \d+ bytes, found 99 bytes",
    ),
    "type code": (
        lambda c: flip_byte(c / "train-00000.idx", 17),
        r"train-00000\.idx: expected xxh3",
    ),
    "block hashes": (lambda c: flip_byte(c / "valid-00000.xxh", 3), r"valid-00000\.xxh: expected"),
    "no block hashes": (lambda c: (c / "train-00000.xxh").unlink(), r"00\.xxh: .*no such file"),
    "no shard": (lambda c: (c / "valid-00000.bin").unlink(), r"valid-00000\.bin: .*no such file"),
    "provenance": (
        lambda c: flip_byte(c / "train-00000.docs.parquet", 50),
        r"docs\.parquet: has xxh3 \w+, expected",
    ),
    "no provenance": (
        lambda c: (c / "train-00000.docs.parquet").unlink(),
        r"docs\.parquet: expected this file, found none",
    ),
    "inputs": (lambda c: rewrite(c / "inputs.jsonl", "x.js", "y.js"), r"inputs\.jsonl: has xxh3"),
    "quarantine": (lambda c: (c / "quarantine.jsonl").unlink(), r"quarantine\.jsonl: expected"),
    "tokenizer": (
        lambda c: rewrite(c / "tokenizer" / "tokenizer.json", '"id":256', '"id":255'),
        r"tokenizer.*(has the fingerprint|not a tokenizer|not in its vocabulary)",
    ),
    "no tokenizer": (
        lambda c: (c / "tokenizer" / "tokenizer.json").unlink(),
        r"tokenizer\.json: not found",
    ),
    "an edited manifest": (
        lambda c: rewrite(c / "manifest.json", '"rows": 45', '"rows": 44'),
        r"manifest\.json: expected corpus_id",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_found_and_named(corpus, name):
    verify_corpus(corpus)
    damage, problem = DAMAGES[name]
    damage(corpus)
    with pytest.raises(UserError, match=problem):
        verify_corpus(corpus)


def test_all_damage_is_named_at_once_with_workers_too(tmp_path):
    write_corpus(tmp_path, random_documents(300, 30, 60), shard_bytes=4000)
    shards = read_manifest(tmp_path)["splits"]["train"]
    assert len(shards) > 4
    for number in (1, 3):
        flip_byte(tmp_path / f"{shards[number]['name']}.bin", 10)
    with pytest.raises(UserError) as caught:
        verify_corpus(tmp_path, workers=2)
    assert len(caught.value.problems) == 2
    assert [
        f"train-0000{n}.bin" in text
        for n, text in zip((1, 3), sorted(caught.value.problems), strict=True)
    ]


def test_exchanged_shards_and_a_stale_manifest_are_found(tmp_path):
    manifest = write_corpus(tmp_path, random_documents(40, 7, 7), shard_bytes=128)
    shards = manifest["splits"]["train"]
    assert shards[0]["bin_bytes"] == shards[1]["bin_bytes"]
    shards[0]["max_id"] += 1
    rewrite_manifest(tmp_path, manifest)
    with pytest.raises(UserError, match=r"train-00000\.bin: expected .* found .*a stale manifest"):
        verify_corpus(tmp_path)
    shards[0]["max_id"] -= 1
    rewrite_manifest(tmp_path, manifest)
    for suffix in (".bin", ".idx", ".xxh"):
        a, b = (tmp_path / f"{shards[n]['name']}{suffix}" for n in (0, 1))
        a.rename(tmp_path / "x")
        b.rename(a)
        (tmp_path / "x").rename(b)
    with pytest.raises(UserError, match=r"train-00000\.xxh: expected xxh3"):
        verify_corpus(tmp_path)


def test_a_read_only_corpus_is_verified_and_nothing_is_written_beside_it(corpus):
    before = sorted(p.name for p in corpus.rglob("*"))
    corpus.chmod(0o555)
    try:
        verify_corpus(corpus)
    finally:
        corpus.chmod(0o755)
    assert sorted(p.name for p in corpus.rglob("*")) == before


def test_the_verb_says_whole_or_what_is_wrong_with_an_exit_status(corpus, capsys):
    assert main([str(corpus), "--workers", "1"]) == 0
    assert "whole; 2 shards" in capsys.readouterr().out
    flip_byte(corpus / "train-00000.bin", 5)
    assert main([str(corpus), "--workers", "1"]) == 1
    assert "train-00000.bin" in capsys.readouterr().err
    assert main([str(corpus / "nowhere")]) == 93
    assert main([str(corpus), "--workers", "0"]) == 93


def test_the_report_adds_up_and_says_what_was_changed(made):
    manifest = read_manifest(made)
    text = "\n".join(report_lines(made, manifest))
    counts = manifest["counts"]
    assert counts["rows"] == 45
    for part in (
        "45 rows: 42 documents kept",
        "2 dropped (blank_documents 1, duplicates 1)",
        "1 put aside (not_an_object 1)",
        "1 CRLF made LF",
        "1 lone surrogates replaced by U+FFFD",
        "1 strings of special tokens, kept as ordinary text",
        "longest document",
        "x.jsonl: 45 rows, 42 documents",
    ):
        assert part in text, text
    shown = "\n".join(info_lines(made))
    assert "min_chars: 2" in shown
    assert "share: 0.2" in shown
    assert '"put aside into quarantine.jsonl"' in shown


def test_built_in_corpora_describe_and_verify_themselves(tmp_path):
    folder = ensure(Source(corpus="s", build="synthetic"), tmp_path)
    verify_corpus(folder)
    assert "8,192 documents" in "\n".join(info_lines(folder))
    with pytest.raises(UserError, match="not found"):
        info_lines(tmp_path)
    assert json.loads((folder / "manifest.json").read_text())["name"] == "synthetic"
