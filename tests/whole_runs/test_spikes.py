"""A run with faulty losses rewinds, skips data, continues, and stops with a diagnosis bundle.

Two attempts of one rank under one command; then one of their steps is repeated twice. faults.py
changes the losses of the clone.
"""

from __future__ import annotations

import json
import sys

import pytest
from clones import make_clone, start
from faults import infect
from ranks import run_command

from base.exits import DO_NOT_RETRY, REWOUND
from checkpoint.lineage import read, segments
from record.records import read_events, read_metrics

SECRET = "s3cr3t-Planted-91"
# The second attempt trains data step s + 12 in step s, as the first went back behind data step 10.
STORM, SPIKE, SECOND_STORM = [20, 23], [40, 41], [50, 53]
WORDS = [
    "run=sick", "steps=60", "eval_tokens=0", "checkpoint.interval=5", "checkpoint.keep=20",
    "health.window=16", "health.tolerant=16", "health.rewind=10", "health.skip=5",
    "health.max_rewinds=1", "log.tensorboard=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """Clone, run folder, and result of the command."""
    clone = make_clone(tmp_path_factory.mktemp("spikes"))
    infect(
        clone,
        {"data_steps": STORM, "rank": None, "factor": "nan"},
        {"data_steps": SPIKE, "rank": None, "factor": 1000},
        {"data_steps": SECOND_STORM, "rank": None, "factor": "nan"},
    )
    teller = clone / "tell"
    teller.write_text('#!/bin/sh\necho "$ALERT_KIND" >> "$HOME/told"\n')
    teller.chmod(0o755)
    words = [*WORDS, f"alerts.command=[{teller}]"]
    end = start(clone, *words, timeout_s=240, HF_TOKEN=SECRET, HOME=str(clone))
    return clone, clone / "runs" / "sick", end


def test_a_storm_of_nan_takes_the_run_back_and_leaves_its_data_out(attempts):
    _, run, _ = attempts
    first = read_events(run, "attempt")[0]
    assert (first["cause"], first["status"]) == ("rewound", REWOUND)
    opened = segments(read(run))
    assert [(line["who"], line["parent"]["step"]) for line in opened[1:]] == [("policy", 10)]
    assert [skip["range"] for skip in opened[1]["skips"]] == [[10, 23]]
    skipped = [event for event in read_events(run, "skipped") if event["attempt"] == 1]
    assert [(e["step"], e["data_step"]) for e in skipped] == [(21, 20), (22, 21), (23, 22)]
    assert [e["verdict"] for e in skipped] == ["skip", "skip", "roll_back"]
    (verdict,) = read_events(run, "roll_back")
    assert (verdict["to_step"], verdict["skip"]) == (10, [10, 23])


def test_the_next_life_goes_on_and_a_spike_does_not_touch_the_weights(attempts):
    _, run, end = attempts
    lines = {line["step"]: line for line in read_metrics(run, segment=1)}
    assert min(lines) == 11
    assert max(lines) == 40
    assert [n for n, line in lines.items() if line["skipped"]] == [28, 38, 39, 40]
    assert lines[28]["grad_norm"] > 100 * lines[27]["grad_norm"]
    assert lines[29]["loss"] < lines[27]["loss"] + 0.2
    (event,) = [e for e in read_events(run, "skipped") if e["step"] == 28]
    assert "the median of the last 16 accepted steps" in event["reason"]
    assert "SKIPPED: an outlier" in end.stdout


def test_what_a_rewind_did_not_cure_stops_the_run_with_a_bundle(attempts):
    clone, run, end = attempts
    assert end.returncode == DO_NOT_RETRY, end.stdout
    assert "1 rewind within 100 steps did not cure it" in end.stdout
    assert [event["cause"] for event in read_events(run, "attempt")] == ["rewound", "gave_up"]
    assert not read_events(run, "stopped")
    bundle = run / "bundles" / "step-00000040"
    verdict = json.loads((bundle / "verdict.json").read_text())
    assert verdict["trouble_began_at_step"] == 38
    assert {"step": 38, "data_step": 50} in verdict["bad_steps"]
    ledger = [json.loads(line) for line in (bundle / "ledger.jsonl").read_text().splitlines()]
    assert ledger[-1]["data_step"] == 52
    assert json.loads((bundle / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 40
    assert (clone / "told").read_text().split() == ["roll_back", "stop"]
    for path in run.rglob("*.json*"):
        assert SECRET not in path.read_text(), path


def test_a_skipped_step_is_repeated_to_the_bit(attempts):
    clone, run, _ = attempts
    command = [sys.executable, "-m", "commands.replay"]
    done = run_command([*command, "sick", "--step", "28"], 240, clone, PYTHONPATH=str(clone))
    assert done.returncode == 0, done.stdout
    assert "reproducible: " in done.stdout
    assert [event["conclusion"] for event in read_events(run, "replayed")] == ["reproducible"]
    assert [path.name for path in run.parent.iterdir()] == ["sick"]
