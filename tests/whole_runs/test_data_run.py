"""Skips, stages and audits in whole runs: trained, recorded and replayed as planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from clones import make_clone, start
from ranks import run_command
from small_corpora import random_documents, stream_of, write_corpus
from warm_starts import Warm

from data.stream.ledger import read_ledger
from record.history import read as read_history
from record.records import read_events, read_metrics

STEPS = 14
SHORT = [f"steps={STEPS}", "checkpoint.interval=100", "eval_tokens=2000", "eval_every=7"]
SOURCES = [
    "~data.sources.synthetic",
    "data.sources.a.corpus=corpora/a",
    "data.sources.b.corpus=corpora/b",
]
LATER = [
    "data.skip.advance=[[2,4],[11,13]]",
    "data.skip.no_update=[[9,10]]",
    "data.sources.a.weight=[[0,1],[10,5]]",
    "data.skip.mask=[{source:a,documents:[80,81],tokens:[10,30],steps:[7,null]}]",
]
FINISHED, REFUSED = 0, 93


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("data"))
    for seed, name in enumerate("ab"):
        documents = random_documents(200, 20, 90, seed=seed, vocab_size=60)
        held_out = random_documents(20 + 10 * seed, 20, 90, seed=7 + seed, vocab_size=60)
        write_corpus(clone / "corpora" / name, documents, held_out, vocab_size=64)
    return clone


@pytest.fixture(scope="module")
def warm(clone) -> Iterator[Warm]:
    """Starts of one rank without a launcher."""
    with Warm(clone) as server:
        yield server


@pytest.fixture(scope="module")
def whole(clone, warm) -> Path:
    """A run of the final recipe from the start, on one rank."""
    done = warm.start("run=whole", *SHORT, *SOURCES, *LATER)
    assert done.returncode == FINISHED, done.stdout
    return clone / "runs" / "whole"


@pytest.fixture(scope="module")
def grown(clone, warm) -> Path:
    """The same run on two ranks, whose later parts were given only when it was resumed."""
    words = ["run=grown", *SHORT, *SOURCES, "zero=2"]
    done = warm.start(*words, "data.skip.advance=[[2,4]]", "stop_after=5")
    assert done.returncode == FINISHED, done.stdout
    early = ["data.skip.advance=[[2,6]]", "data.sources.a.weight=3", "allow=[data]"]
    done = warm.start(*words, *early)
    assert done.returncode == REFUSED
    assert "let new ones begin at data step 7 or later" in done.stdout
    assert "data.sources.NAME.weight=[[0,OLD],[7,NEW]]" in done.stdout
    done = warm.start(*words, *LATER)
    assert done.returncode == REFUSED
    assert done.stdout.count("allow it by name") == 4
    every = [f"{{source:{uid},documents:[0,200],steps:[7,null]}}" for uid in "ab"]
    done = warm.start(
        *words, "data.skip.advance=[[2,4]]", f"data.skip.mask=[{','.join(every)}]",
        "allow=[data.skip]",
    )  # fmt: skip
    assert done.returncode == REFUSED
    assert "leaves no target in any of the 9 steps after step 5" in done.stdout
    done = start(clone, *words, *LATER, "allow=[data.skip,data.sources]", nproc=2)
    assert done.returncode == FINISHED, done.stdout
    assert "SKIPPED: nothing to train on (data.skip)" in done.stdout
    return clone / "runs" / "grown"


def test_a_run_trains_on_what_its_skips_leave(whole):
    lines = list(read_ledger(whole / "ledger"))
    used = [d for d in range(30) if not (2 <= d < 4 or 11 <= d < 13)][:STEPS]
    assert [line["data_step"] for line in lines] == used
    assert [line["samples"] for line in lines] == [[8 * d, 8 * d + 8] for d in used]
    assert [line["step"] for line in lines if not line.get("update", True)] == [8]
    (masked,) = [line for line in lines if "masked" in line]
    assert (masked["data_step"], masked["masked"]) == (10, 20)
    metrics = read_metrics(whole)
    assert [line["skipped"] for line in metrics] == [step == 8 for step in range(1, STEPS + 1)]
    assert metrics[7]["loss"] is None
    assert metrics[-1]["skipped_steps"] == 1
    assert metrics[-1]["tokens"] == STEPS * 512
    (event,) = read_events(whole, "skipped")
    assert (event["step"], event["data_step"], event["reason"]) == (8, 9, "data.skip")
    late = [line["sources"]["a"] for line in lines if line["data_step"] >= 10]
    assert sum(late) > 0.75 * 8 * len(late)
    assert all(line["sources"]["a"] == 4 for line in lines if line["data_step"] < 10)


def test_a_list_that_grew_on_the_way_gives_the_run_of_the_final_list(whole, grown):
    """Another number of ranks in the second half: same batches, losses to 1e-6."""

    def plain(line):
        return {key: value for key, value in line.items() if key != "skips"}

    one, two = (list(map(plain, read_ledger(run / "ledger"))) for run in (whole, grown))
    assert one == two
    for ours, theirs in zip(read_metrics(grown), read_metrics(whole), strict=True):
        assert (ours["loss"] is None) == (theirs["loss"] is None)
        if ours["loss"] is not None:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    changes = [line for line in read_history(grown) if line["kind"] == "override"]
    assert {line["key"] for line in changes} == {
        "data.skip.advance", "data.skip.no_update", "data.skip.mask", "data.sources.a.weight",
    }  # fmt: skip
    assert {line["first_step"] for line in changes} == {6}
    skips = [line["skips"] for line in read_ledger(grown / "ledger")]
    assert len(set(skips[:5])) == len(set(skips[5:])) == 1
    assert skips[4] != skips[5]
    manifest = json.loads(
        (grown / "checkpoints" / f"step-{STEPS:08d}" / "MANIFEST.json").read_text()
    )
    assert manifest["state"]["data"]["skips"] == skips[-1]


def test_each_source_has_a_validation_loss_that_does_not_depend_on_the_layout(clone, whole, grown):
    """Weighted with their targets they add up to the pooled loss; grown ended on two ranks."""
    ours, theirs = (read_metrics(run)[-1] for run in (whole, grown))
    losses = [ours["scalars"][f"validation/loss/{uid}"] for uid in "ab"]
    for uid, loss in zip("ab", losses, strict=True):
        assert theirs["scalars"][f"validation/loss/{uid}"] == pytest.approx(loss, rel=1e-6)
    stream = stream_of(clone / "corpora", {"a": 1, "b": 1}, seq_len=64, vocab_size=64)
    held_out = stream.evaluation(0, 1, 1, 2000)
    assert held_out.uids == ["a", "b"]
    count = [0, 0]
    for batch, source in zip(held_out.batches, held_out.sources, strict=True):
        count[source] += int((batch.labels >= 0).sum())
    pooled = sum(n * loss for n, loss in zip(count, losses, strict=True)) / sum(count)
    assert ours["val_loss"] == pytest.approx(pooled, rel=1e-6)
    assert theirs["val_loss"] == pytest.approx(pooled, rel=1e-6)
    assert "bits_per_byte" not in ours  # the corpora hold ids without a tokenizer


def test_the_audit_rebuilds_both_runs(clone, whole, grown):
    def audit(*words):
        command = ["make", *words, f"PYTHON={python()}"]
        return run_command(command, 60, cwd=clone, PYTHONPATH=str(clone))

    done = audit("audit", "RUN=grown")
    assert done.returncode == 0, done.stdout
    assert f"{STEPS} of {STEPS} recorded steps rebuilt and equal" in done.stdout
    done = audit("audit-diff", "A=whole", "B=grown")
    assert "the batches of all 14 steps in both are equal" in done.stdout
    done = audit("audit", "RUN=whole", "DOC=a:80", "TOKENS=0:30", "TEXT=1")
    assert " tokens, of them 0 to 29, " in done.stdout
    assert "masked in part" in done.stdout
    done = audit("audit", "RUN=whole", "STEP=8")
    assert "it did not move the weights" in done.stdout
    assert done.returncode == 0


def python() -> str:
    import sys

    return sys.executable
