"""Whole runs that go back, leave out and branch, and what their record says. One process trains
them all, one after the other: a start costs more than their steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clones import SMALL, make_clone
from ranks import run_command
from run_tensors import tensors_of

from checkpoint.format.manifest import committed
from checkpoint.lineage import lineage_of, read
from commands import branch, merge, rewind
from data.stream.ledger import read_ledger
from record import environment
from record.records import read_events, read_metrics
from record.run_folder import hold
from runtime import branching

STEPS, BACK = 14, 6
BAD = (7, 9)  # data steps: met by steps 8 and 9
SHORT = [f"steps={STEPS}", "checkpoint.interval=3", "checkpoint.keep=3", "eval_tokens=0"]
FINISHED, REFUSED = 0, 93
# Imports once, then a fork for each start, those of `make reproduce` too; the commands of the
# Makefile
# between them.
DRIVER = """
import importlib, json, os, subprocess, sys
import pretrain, deepspeed
from commands import reproduce

def forked(module, words):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = importlib.import_module(module).main(words)
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

reproduce.run_one = lambda command, code: (
    forked("pretrain", command[command.index("pretrain.py") + 1 :]), ""
)
for line in json.loads(sys.argv[1]):
    if line[0] == "make":
        status = subprocess.run([*line, f"PYTHON={sys.executable}"]).returncode
    else:
        status = forked(line[0], line[1:])
    print("STATUS", status, flush=True)
"""


def drive(clone: Path, *lines: list[str], timeout_s: float = 500) -> tuple[list[int], str]:
    """Run modules, or make, with words, in order; statuses and all that was said."""
    command = [sys.executable, "-c", DRIVER, json.dumps(lines)]
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}  # as the launcher's ranks
    done = run_command(command, timeout_s, cwd=clone, PYTHONPATH=str(clone), **quiet)
    statuses = [int(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("STATUS")]
    assert len(statuses) == len(lines), done.stdout
    return statuses, done.stdout


def words(run: str, *more: str) -> list[str]:
    return ["pretrain", *SMALL, f"run={run}", *SHORT, *more]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("rewind"))


@pytest.fixture(scope="module")
def said(clone) -> str:
    """`bad` meets the batch, goes back, skips it; `clean` never has it; `side` parts from `bad`."""
    skip = f"data.skip.advance=[[{BAD[0]},{BAD[1]}]]"
    back = [
        "make",
        "rewind",
        "RUN=bad",
        f"STEP={BACK}",
        f"SKIP={BAD[0] + 1}:{BAD[1] + 1}",
        "WHY=a spike",
    ]
    branch = ["make", "branch", "RUN=bad", "STEP=12", "TO=side", "OVERRIDES=optim.lr=1e-4"]
    statuses, said = drive(
        clone,
        words("bad", "stop_after=10"),
        back,
        words("bad"),
        words("clean", skip),
        words("bad"),
        branch,
        ["pretrain", "recipe=runs/side/recipe.yaml", "zero=3", "micro_batch=4"],
        ["commands.audit", "bad"],
        ["commands.audit", "side"],
        ["commands.history", "bad"],
        ["commands.history", "side"],
        ["commands.checkpoints", "bad"],
        ["commands.reproduce", "side"],
    )
    assert statuses == [FINISHED] * 13, said
    return said


@pytest.fixture(scope="module")
def runs(clone, said) -> Path:
    return clone / "runs"


def own(run: Path) -> list[dict]:
    """Metrics of the run's lineage."""
    return sorted(lineage_of(run).own(read_metrics(run)), key=lambda line: line["step"])


def test_a_run_that_skipped_a_bad_batch_ends_as_one_that_never_had_it(runs):
    bad, clean = own(runs / "bad"), own(runs / "clean")
    assert [line["step"] for line in bad] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "tokens", "targets"):
        assert [line[name] for line in bad] == [line[name] for line in clean]
    ours, theirs = tensors_of(runs / "bad", STEPS), tensors_of(runs / "clean", STEPS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_ledger_and_the_history_say_what_happened(runs, said):
    lines = list(read_ledger(runs / "bad" / "ledger"))
    assert [(x["segment"], x["step"], x["data_step"]) for x in lines[:10]] == [
        (0, step, step - 1) for step in range(1, 11)
    ]
    mine = lineage_of(runs / "bad").own(lines)
    clean = list(read_ledger(runs / "clean" / "ledger"))
    assert [x["batch_hash"] for x in mine] == [x["batch_hash"] for x in clean]
    assert not {x["data_step"] for x in mine} & set(range(*BAD))
    named = f"SKIP={BAD[0] + 1}:{BAD[1] + 1}: data steps {BAD[0]} to {BAD[1] - 1} are left out"
    assert named in said
    (skip,) = read(runs / "bad")[1]["skips"]
    assert (skip["range"], skip["why"], skip["who"]) == (list(BAD), "a spike", "operator")
    assert "segment 0: steps 1 to 10, abandoned from 7 on" in said
    assert "segment 1 from step 6: steps 7 to 14: a spike (operator" in said
    assert "    left out: data steps 7 to 8 from step 7 on\n" in said
    assert "left out: data steps 7 to 8 from step 7 on: a spike (operator" in said


def test_each_segment_and_step_is_recorded_once(runs):
    lines = read_metrics(runs / "bad")
    text = (runs / "bad" / "metrics.jsonl").read_text().splitlines()
    keys = [(line["segment"], line["step"]) for line in lines]
    assert keys == [(0, s) for s in range(1, 11)] + [(1, s) for s in range(7, STEPS + 1)]
    assert len(text) == len(keys)
    events = read_events(runs / "bad", "saved")
    assert {(x["segment"], x["step"]) for x in events} >= {(0, 9), (0, 10), (1, 9), (1, STEPS)}
    folders = sorted(path.name for path in (runs / "bad" / "tensorboard").iterdir())
    assert folders == ["segment-00", "segment-01-after-6"]


def test_the_audit_follows_the_lineage_and_its_branch(runs, said):
    assert "bad: 18 of 18 recorded steps rebuilt and equal" in said
    assert "4 more recorded steps belong to abandoned segments" in said
    assert "left out: data steps 7 to 8, samples 56 to 71" in said
    assert f"samples 0 to {(STEPS + 2) * 8 - 1} were used once each but what was left out" in said
    assert f"side: {STEPS} of {STEPS} recorded steps rebuilt and equal" in said


def test_an_audit_sees_a_sample_that_was_used_twice(clone, runs):
    run = runs / "twice"
    (run / "ledger").mkdir(parents=True)
    (run / "recipe.yaml").write_text((runs / "clean" / "recipe.yaml").read_text())
    lines = (runs / "clean" / "ledger" / "steps.jsonl").read_text().splitlines()
    (run / "ledger" / "steps.jsonl").write_text("\n".join([*lines[:5], lines[3], *lines[6:], ""]))
    done = make(clone, "audit", "RUN=twice")
    assert done.returncode == 2
    assert "step 7 has a gap before it: step 5 comes before it" in done.stdout


def make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *words, f"PYTHON={sys.executable}"]
    return run_command(command, 120, cwd=clone, PYTHONPATH=str(clone))


def test_a_run_is_trained_again_from_its_record_through_rewind_skip_branch_and_layouts(runs, said):
    told = said[said.index("side is trained again as side-again:") :]
    assert "segment 0: steps 1 to 6, 1 rank\n" in told
    assert "segment 1: steps 7 to 12 (back to 6), 1 rank\n" in told
    assert "segment 2: steps 13 to 14 (back to 12), 1 rank\n" in told
    assert "identical" in told
    entries = [environment.read(runs / name)[-1] for name in ("bad", "side", "side-again")]
    assert [one["layout"]["stage"] for one in entries] == [1, 3, 3]
    assert [one["recipe"]["optim"]["lr"] for one in entries[1:]] == [1e-4, 1e-4]
    for name in ("loss", "grad_norm", "lr"):
        assert [x[name] for x in own(runs / "side")] == [x[name] for x in own(runs / "side-again")]


def test_the_finished_run_said_so(said):
    assert f"run=bad is finished: it has a checkpoint of step {STEPS}" in said


def test_a_branch_shares_bytes_and_is_on_record_both_ways(runs, said):
    assert "changed from step 13 on: optim.lr 0.002 -> 0.0001" in said
    assert "branch side from step 12" in said
    assert "segment 2 from step 12 of run bad: steps 13 to 14" in said
    ours, theirs = own(runs / "side"), own(runs / "bad")
    assert ours[:12] == theirs[:12]
    assert [line["lr"] for line in ours[12:]] == [line["lr"] / 20 for line in theirs[12:]]
    for step, path in committed(runs / "side" / "checkpoints")[:1]:
        assert step == 12
        for file in path.iterdir():
            assert os.path.samefile(file, runs / "bad" / "checkpoints" / path.name / file.name)
    assert not list(runs.glob(".*"))


def test_the_list_says_segment_health_and_tags(said):
    rows = [line.split() for line in said.splitlines() if line.strip().startswith(("9 ", "12 "))]
    assert ["12", "1"] in [row[:2] for row in rows]


def test_conditions_are_recorded_once_where_they_do_not_change(runs):
    entries = environment.read(runs / "bad")
    assert [(x["segment"], x["after_step"]) for x in entries] == [(0, 0), (1, 6)]
    assert entries[0]["recipe"]["stop_after"] == 10
    assert entries[1]["layout"]["world"] == 1
    assert [x["segment"] for x in environment.read(runs / "side")] == [0, 1, 2]
    assert json.loads((runs / "bad" / "environment.json").read_text())["torch"]


def test_an_average_goes_on_training_and_is_not_reproduced(clone, runs, said):
    """Steps 9 and 12 of `clean`; the run of the average trains on another layout to its end."""
    statuses, said = drive(
        clone,
        ["make", "merge", "RUN=clean", "STEPS=9:12:3", "TO=mean", "WHY=a try"],
        ["commands.verify", "mean"],
        ["commands.history", "mean"],
        ["pretrain", "recipe=runs/mean/recipe.yaml", "zero=3", "micro_batch=4"],
        ["commands.reproduce", "mean"],
    )
    assert statuses == [FINISHED] * 4 + [REFUSED], said
    assert "runs/mean stands at step 12 with the average of steps 9, 12 of clean" in said
    assert "from step 12 of run clean: no step on record here, the average of" in said
    assert "reproduce the run that was averaged: RUN=clean" in said
    old, new = (tensors_of(runs / "clean", step) for step in (9, 12))
    mean = tensors_of(runs / "mean", 12)
    assert mean.keys() == new.keys()
    for key, tensor in mean.items():
        expected = (old[key].double() + new[key].double()) / 2
        assert torch.equal(tensor, expected.float()), key
    steps = [line["step"] for line in read_metrics(runs / "mean")]
    assert steps == list(range(1, STEPS + 1))


@pytest.fixture
def commands_of_make(clone, runs, monkeypatch):
    """The commands rewind, branch and merge, on the runs of the clone."""
    for module in (rewind, branch, merge, branching):
        monkeypatch.setattr(module, "ROOT", clone)
    return {"rewind": rewind.main, "branch": branch.main, "merge": merge.main}


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("rewind", ["nobody", "--step=3"], "RUN=nobody: no run here"),
        ("rewind", ["clean", "--step=x", "--skip=1-2 3:4", "--effect=mask"],
         "STEP=x.*SKIP=1-2: write first:end.*EFFECT=mask: one of advance, no_update"),
        ("rewind", ["clean", "--step=12", "--skip=3:5 14:20 15:16"],
         "in the past of step 12.*SKIP=15:16 overlaps SKIP=14:20"),
        ("rewind", ["clean", "--step=12", "--skip=500:600"], "past the end: the 14 steps"),
        ("rewind", ["clean", "--step=5"], "no checkpoint of this step; it has: 9, 12, 14"),
        ("branch", ["clean", "--step=12", "--to=../x"], "TO=../x is not a folder name"),
        ("branch", ["clean", "--step=", "--to=bad"], "STEP=: give a number.*runs/bad exists"),
        ("branch", ["clean", "--step=12", "--to=new", "--overrides=seed=7"], "seed: 1234 in the"),
        ("branch", ["clean", "--step=12", "--to=new", "--overrides=batch_tokens=1024"],
         "batch_tokens=1024 would put step 12 at"),
        ("merge", ["clean", "--to=new"], "STEPS=: name the checkpoints to average"),
        ("merge", ["clean", "--steps=9:x", "--decay=1.5", "--to=bad"],
         "STEPS=9:x: give first:last:every.*DECAY=1.5 is not.*runs/bad exists"),
        ("merge", ["clean", "--steps=9:13:3", "--to=new"], "end at 12, or at 15"),
        ("merge", ["clean", "--steps=14:9:1", "--to=new"], "first step is behind its last one"),
        ("merge", ["clean", "--steps=9,10,11", "--to=new"], "STEP=10.*it has: 9, 12, 14.*STEP=11"),
        ("merge", ["clean", "--steps=1:9999:1", "--to=new"], "9,999 checkpoints; at most 1,000"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    runs, commands_of_make, command, words, message, capsys
):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*.json*")}
    assert commands_of_make[command](words) == REFUSED
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*.json*")} == before
    assert not (runs / "new").exists()


def test_a_damaged_checkpoint_and_a_run_that_is_training_are_refused(
    runs, commands_of_make, capsys
):
    data = runs / "clean" / "checkpoints" / "step-00000009" / "rank-00000.bin"
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert commands_of_make["rewind"](["clean", "--step=9"]) == REFUSED
    assert commands_of_make["branch"](["clean", "--step=9", "--to=new"]) == REFUSED
    assert commands_of_make["merge"](["clean", "--steps=9,12", "--to=new"]) == REFUSED
    assert capsys.readouterr().err.count(str(data)) == 3
    lock = hold(runs / "clean")
    try:
        assert commands_of_make["rewind"](["clean", "--step=12"]) == REFUSED
    finally:
        lock.close()
    assert "another process is writing" in capsys.readouterr().err
