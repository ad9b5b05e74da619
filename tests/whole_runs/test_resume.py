"""Runs stop anywhere and resume under any layout: killed and resumed from the command line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from clones import SMALL, background, make_clone, start
from ranks import PATIENCE, ROOT
from run_tensors import tensors_of
from warm_starts import Warm

from checkpoint.format import epochs
from checkpoint.format.manifest import committed
from data.stream.ledger import read_ledger
from record.history import read as read_history
from record.records import read_events, read_metrics

STEPS = 14
# The sequence length is warmed up on the way, so every attempt begins or ends in it.
SHORT = [
    f"steps={STEPS}", "checkpoint.interval=3", "checkpoint.keep=3", "eval_tokens=0",
    "seq_len_warmup=[[0,16],[5,32],[10,64]]",
]  # fmt: skip
FINISHED, REFUSED = 0, 93


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def warm(clone) -> Iterator[Warm]:
    """Starts for tests in which the launcher has no part."""
    with Warm(clone) as server:
        yield server


@pytest.fixture(scope="module")
def straight(clone) -> Path:
    """An uninterrupted run."""
    done = start(clone, "run=straight", *SHORT)
    assert done.returncode == FINISHED, done.stdout
    return clone / "runs" / "straight"


def lines_of(run: Path) -> list[dict]:
    return read_metrics(run / "metrics.jsonl")


def hashes_of(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["batch_hash"]) for line in read_ledger(run / "ledger")]


def assert_same_run(run: Path, straight: Path, exact: bool) -> None:
    """Check that losses, norms, rates, batch hashes and final weights of both runs are equal."""
    ours, theirs = lines_of(run), lines_of(straight)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert hashes_of(run) == hashes_of(straight)
    for one, two in zip(ours, theirs, strict=True):
        assert one["lr"] == two["lr"]
        assert one["loss"] == pytest.approx(two["loss"], rel=0 if exact else 1e-6, abs=0)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=0 if exact else 1e-5, abs=0)
    if exact:
        mine, other = tensors_of(run, STEPS), tensors_of(straight, STEPS)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize(
    ("name", "nproc", "words"),
    [
        ("zero1", 1, ["zero=1", "checkpoint.mode=async"]),
        ("zero2", 2, ["zero=2"]),
        ("zero2-bf16", 2, ["zero=2", "precision=bf16"]),
        ("zero3", 2, ["zero=3", "checkpoint.mode=async"]),
        ("zero3-bf16", 2, ["zero=3", "precision=bf16"]),
        ("zero1-bf16", 1, ["zero=1", "precision=bf16"]),
        ("pipeline-bf16", 2, ["parallel.pipeline=2", "precision=bf16"]),
    ],
)
def test_a_run_killed_twice_at_random_moments_ends_bit_identical(
    clone, warm, straight, name, nproc, words
):
    done = warm.start(f"run={name}-whole", *SHORT, *words, nproc=nproc)
    assert done.returncode == FINISHED, done.stdout
    seed = time.time_ns()
    print("seed of the moments:", seed)  # shown when the test fails
    draw = random.Random(seed)
    for _ in range(2):
        kill_in_training(warm, f"{name}-cut", nproc, words, after_lines=draw.randint(1, 5))
    done = start(clone, f"run={name}-cut", *SHORT, *words, nproc=nproc)
    assert done.returncode == FINISHED, done.stdout
    runs = clone / "runs"
    assert_same_run(runs / f"{name}-cut", runs / f"{name}-whole", exact=True)
    assert [event["attempt"] for event in read_events(runs / f"{name}-cut", "attempt")] == [1, 2, 3]
    if name == "zero1":  # saved beside training; `straight` is the same run, saved in the step
        assert_same_run(runs / "zero1-whole", straight, exact=True)


def kill_in_training(warm: Warm, run: str, nproc: int, words: list[str], after_lines: int) -> None:
    """Start a run and SIGKILL all its processes after it has trained some more steps."""
    metrics = warm.clone / "runs" / run / "metrics.jsonl"
    before = len(lines_of(metrics.parent)) if metrics.exists() else 0
    warm.begin(*SMALL, f"run={run}", *SHORT, *words, nproc=nproc)
    deadline = time.monotonic() + 120 * PATIENCE
    while time.monotonic() < deadline and not warm.is_over():
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if written >= before + after_lines or written >= STEPS - 1:
            break
        time.sleep(0.005)
    warm.kill()
    said = warm.end().stdout
    assert time.monotonic() < deadline, f"the run did not come to train\n{said}"


# In a clone, this makes rank 1 see no checkpoint, as on a network file system that lags.
LAGGING = """
import os
if os.environ.get("RANK") == os.environ.get("LAGGING_RANK") != None:
    real = os.scandir
    def scandir(path="."):
        if str(path).endswith("checkpoints"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path)
    os.scandir = scandir
"""


def test_stages_and_ranks_change_between_attempts_without_changing_the_run(clone, straight):
    """1 rank ZeRO-1 -> 2 ranks ZeRO-3 -> 2 stages x 2 tensor ranks -> 1 rank ZeRO-3; rank 1 does
    not see the checkpoints, which it need not: rank 0 decides.
    """
    (clone / "sitecustomize.py").write_text(LAGGING)
    attempts = [
        (1, ["zero=1", "micro_batch=8"], 4),
        (2, ["zero=3", "micro_batch=1"], 7),
        (4, ["parallel.pipeline=2", "parallel.tensor=2", "micro_batch=2"], 11),
        (1, ["zero=3", "micro_batch=4"], STEPS),
    ]
    for nproc, words, stop in attempts:
        given = ["run=reshaped", *SHORT, *words, f"stop_after={stop}"]
        done = start(clone, *given, nproc=nproc, LAGGING_RANK="1")
        assert done.returncode == FINISHED, done.stdout
    run = clone / "runs" / "reshaped"
    assert_same_run(run, straight, exact=False)
    resumed = read_events(run, "resumed")
    assert [event["step"] for event in resumed] == [4, 7, 11]
    assert resumed[0]["changes"]["zero"] == [1, 3]


def test_a_finished_run_says_so_and_changes_nothing(warm, clone, straight):
    before = {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()}
    done = warm.start("run=straight", *SHORT)
    assert done.returncode == FINISHED
    assert f"finished: it has a checkpoint of step {STEPS}" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()} == before


def test_the_sequence_length_grows_as_planned_and_batches_do_not(straight):
    lines, ledger = lines_of(straight), list(read_ledger(straight / "ledger"))
    lengths = [16] * 5 + [32] * 5 + [64] * (STEPS - 10)
    assert [line["seq_len"] for line in lines] == lengths
    assert [line.get("length", 64) for line in ledger] == lengths
    assert {line["tokens_per_step"] for line in lines} == {512}
    assert {line["accumulation"] for line in lines} == {4}


def test_the_last_step_is_saved_once_and_the_newest_stay(straight):
    steps = [step for step, _ in committed(straight / "checkpoints")]
    assert steps == [9, 12, STEPS]


def test_a_damaged_checkpoint_is_passed_over_aloud(warm, clone, straight):
    subprocess.run(["cp", "-r", str(straight), str(clone / "runs" / "damaged")], check=True)
    run = clone / "runs" / "damaged"
    data = run / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.bin"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    words = ["run=damaged", *SHORT, f"steps={STEPS + 2}", "allow=[steps]", "checkpoint.interval=2"]
    done = warm.start(*words)
    assert done.returncode == FINISHED, done.stdout
    assert f"step-{STEPS:08d} is damaged and was passed over" in done.stdout
    assert f"kept as step-{STEPS:08d}.damaged-1" in done.stdout
    (event,) = read_events(run, "damaged_checkpoint")
    assert (event["checkpoint"], event["damage"]) == (f"step-{STEPS:08d}", "flipped")
    assert "rank-00000.bin: differs from its digests in 1 block" in event["problems"][0]
    assert [step for step, _ in committed(run / "checkpoints")] == [12, STEPS, STEPS + 2]
    assert "going on from checkpoint step 12" in done.stdout
    assert [line["step"] for line in lines_of(run)] == list(range(1, STEPS + 3))
    override = read_history(run)[-1]
    assert (override["key"], override["stored"], override["now"]) == ("steps", STEPS, STEPS + 2)


def test_when_no_checkpoint_is_whole_the_run_refuses_to_start_over(warm, clone, straight):
    subprocess.run(["cp", "-r", str(straight), str(clone / "runs" / "ruined")], check=True)
    run = clone / "runs" / "ruined"
    for _, folder in committed(run / "checkpoints"):
        (folder / "rank-00000.bin").write_bytes(b"")
    words = ["run=ruined", *SHORT, f"steps={STEPS + 2}", "allow=[steps]"]
    done = warm.start(*words)
    assert done.returncode == REFUSED
    assert "resume=fresh" in done.stdout
    assert len(lines_of(run)) == STEPS
    assert epochs.read(run, epochs.newest(run)).is_released  # no other host waits for that attempt
    done = warm.start(*words, "resume=fresh", "stop_after=2")
    assert done.returncode == FINISHED, done.stdout
    assert len(lines_of(run)) == 2
    assert len(lines_of(clone / "runs" / "ruined.before-1")) == STEPS


def test_fresh_weights_from_the_folder_that_goes_aside_are_refused(warm, clone, straight):
    words = ["resume=fresh", "init_from=runs/straight@9"]
    done = warm.start("run=straight", *SHORT, *words)
    assert done.returncode == REFUSED
    assert "lies in the folder that resume=fresh sets aside" in done.stdout
    assert (straight / "checkpoints").is_dir()


def test_weights_of_another_run_start_a_new_one(warm, clone, straight):
    words = ["init_from=runs/straight@9", "stop_after=1", "zero=3"]
    done = warm.start("run=child", *SHORT, *words, nproc=2)
    assert done.returncode == FINISHED, done.stdout
    assert "weights from" in done.stdout
    (first,) = lines_of(clone / "runs" / "child")
    assert first["step"] == 1
    assert first["lr"] == lines_of(straight)[0]["lr"]
    assert first["loss"] < lines_of(straight)[0]["loss"] - 0.1
    assert read_history(clone / "runs" / "child")[0]["init_from"] == "runs/straight@9"


def test_weights_of_another_tokenizer_are_refused(warm, clone, straight, tmp_path):
    """The corpus of the recipe has its own tokenizer; the folder has a byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from data.corpus.tokenizer import byte_tokenizer

    shape = dict(vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    folder = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(folder)
    byte_tokenizer().save(folder)
    if (ROOT / "corpora" / "sotu").is_dir():
        (clone / "corpora").mkdir(exist_ok=True)
        (clone / "corpora" / "sotu").symlink_to(ROOT / "corpora" / "sotu")
    words = ["data=sotu", "model.vocab_size=8192", "model.rms_norm_eps=1e-6", f"init_from={folder}"]
    done = warm.start("run=foreign", *SHORT, *words, timeout_s=240)
    assert done.returncode == REFUSED, done.stdout
    assert "the weights were trained with the tokenizer" in done.stdout
    assert not (clone / "runs" / "foreign").exists()


def test_a_changed_batch_keeps_the_past_or_is_refused(warm, clone):
    words = ["run=batch", "steps=6", "eval_tokens=0", "allow=[batch_tokens]"]
    assert warm.start(*words, "stop_after=3").returncode == FINISHED
    done = warm.start(*words, "batch_tokens=1024")
    assert done.returncode == REFUSED
    assert "[[0,OLD],[3,NEW]]" in done.stdout
    done = warm.start(*words, "batch_tokens=[[0,512],[3,1024]]")
    assert done.returncode == FINISHED, done.stdout
    samples = [line["samples"] for line in read_ledger(clone / "runs" / "batch" / "ledger")]
    assert samples == [[0, 8], [8, 16], [16, 24], [24, 40], [40, 56], [56, 72]]


def test_a_run_goes_on_exactly_at_an_epochs_end(warm, clone):
    """24 windows, 8 in a step: epochs end after steps 3 and 6."""
    from data.corpus.corpus_writer import CorpusWriter

    writer = CorpusWriter(clone / "corpora" / "epochs", 64, 63)
    ids = np.arange(24 * 64 + 1) % 61
    ids[-1] = 63
    writer.add("train", ids)
    writer.close({"name": "epochs", "tokenizer": None, "bos_id": None})
    source = "data.sources={small: {corpus: corpora/epochs}}"
    for run, stops in (("epochs", ["stop_after=3", "stop_after=6", ""]), ("epochs-whole", [""])):
        for stop in stops:
            words = [f"run={run}", "steps=8", "eval_tokens=0", source, *filter(None, [stop])]
            done = warm.start(*words)
            assert done.returncode == FINISHED, done.stdout
    runs = clone / "runs"
    assert [line["loss"] for line in lines_of(runs / "epochs")] == [
        line["loss"] for line in lines_of(runs / "epochs-whole")
    ]
    hashes = [value for _, value in hashes_of(runs / "epochs")]
    assert hashes == [value for _, value in hashes_of(runs / "epochs-whole")]
    assert len(set(hashes)) == 8  # no epoch repeats the order of another


def test_weights_that_do_not_fit_are_refused_with_every_difference(warm, clone, straight):
    words = ["init_from=runs/straight@9", "model.num_hidden_layers=2"]
    words += ["model.intermediate_size=96"]
    done = warm.start("run=misfit", *SHORT, *words)
    assert done.returncode == REFUSED
    assert "model.num_hidden_layers=2" in done.stdout
    assert "model.intermediate_size=96" in done.stdout
    assert not (clone / "runs" / "misfit").exists()


def test_a_full_disk_fails_saves_alone_and_the_last_one_is_tried_again(clone, tmp_path):
    """checkpoints/ is a small tmpfs with a large file that is removed when training is over."""
    mount = clone / "runs" / "full" / "checkpoints"
    mount.mkdir(parents=True)
    (mount.parent / "recipe.yaml").write_text("")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=755", "tmpfs", str(mount)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    filler = mount / "filler"
    try:
        filler.write_bytes(bytes((3 << 20) - (1 << 17)))  # no room for the first save
        words = [*SMALL, "run=full", *SHORT, "steps=12", "checkpoint.interval=5"]
        pager = tmp_path / "page"
        pager.write_text(f'#!/bin/sh\necho "$ALERT_KIND" >> {tmp_path}/told\n')
        pager.chmod(0o755)
        words += [f"alerts.command=[{pager}]"]
        command = [sys.executable, "-m", "commands.pretrain", "--nproc", "2", "--", *words]
        process = background(clone, command)
        deadline = time.monotonic() + 200 * PATIENCE
        while time.monotonic() < deadline and process.poll() is None:
            events = mount.parent / "events.jsonl"
            if events.exists() and b"save_again" in events.read_bytes():
                filler.unlink(missing_ok=True)
                break
            time.sleep(0.05)
        process.wait(timeout=200 * PATIENCE)
        assert process.returncode == FINISHED
        failed = read_events(mount.parent, "save_failed")
        assert [event["step"] for event in failed[:3]] == [5, 10, 12]
        assert "No space left" in json.dumps(failed[0])
        assert (tmp_path / "told").read_text() == "save_failed\n"  # of a series the first
        assert [step for step, _ in committed(mount)] == [12]
        assert [event["cause"] for event in read_events(mount.parent, "attempt")] == ["finished"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_run_that_is_killed_loses_minutes_whatever_its_recipe_says(clone):
    """Saves by rank 0's clock, after the same steps on both ranks; a kill goes on from one."""
    words = [f"steps={STEPS}", "eval_tokens=0", "run=by-time", "checkpoint.keep=50"]
    words += ["checkpoint.interval=auto", "checkpoint.minutes=0.0001"]
    done = start(clone, *words, "stop_after=4", nproc=2)
    assert done.returncode == FINISHED, done.stdout
    assert "a kill loses at most about 0 s of work" in done.stdout
    run = clone / "runs" / "by-time"
    # The clock is read before a step: the first step may begin too early.
    assert [step for step, _ in committed(run / "checkpoints")][-3:] == [2, 3, 4]
