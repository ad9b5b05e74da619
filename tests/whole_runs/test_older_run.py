"""A run that an older version wrote goes on, and its record is read.

workers/older_run/ was written at commit 75e72e8, when an attempt was still called a life: 24 steps
planned, 12 trained, taken back to step 8 with two data steps left out, stopped after step 14.
`tail.jsonl` has the metrics of its last ten steps as that version went on to train them.
"""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from clones import make_clone
from ranks import ROOT, run_command

from record.records import read_events, read_metrics

OLDER = ROOT / "tests" / "workers" / "older_run"
RUN = ["recipe=runs/parent/recipe.yaml", "run=parent", "stop_after=null"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = make_clone(tmp_path_factory.mktemp("older") / "clone")
    shutil.copytree(OLDER / "run", folder / "runs" / "parent")
    shutil.copytree(OLDER / "corpus", folder / "corpora" / "short")
    return folder


def command(clone, name, *arguments):
    done = run_command(
        [sys.executable, "-m", f"commands.{name}", *arguments],
        120,
        cwd=clone,
        PYTHONPATH=str(clone),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_record_of_an_older_version_is_read_under_todays_names(clone):
    folder = clone / "runs" / "parent"
    ends = read_events(folder, "attempt")
    assert [event["attempt"] for event in ends] == [1, 2, 3]
    assert [line["attempt"] for line in read_metrics(folder)][-1] == 3
    assert "life" not in ends[0] | read_metrics(folder)[0]
    assert "attempts: 3, failures: 0" in command(clone, "status", "parent")
    assert command(clone, "events", "parent", "--kind", "life").count("finished") == 3
    assert "3 attempts, 0 failures" in command(clone, "goodput", "parent")
    assert "left out: data steps 9 to 10" in command(clone, "history", "parent")
    command(clone, "verify", "parent")
    assert "equal to what was recorded" in command(clone, "audit", "parent", "--step", "9")


def test_a_checkpoint_of_an_older_version_goes_on_to_the_bit(clone):
    """Last in this file: it trains the run to its end."""
    command(clone, "pretrain", "--nproc", "2", "--", *RUN)
    folder = clone / "runs" / "parent"
    expected = [json.loads(line) for line in (OLDER / "tail.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in read_metrics(folder)}
    assert sorted(found) == list(range(1, 25))
    recorded = json.loads((OLDER / "run" / "environment.json").read_text())
    here = (torch.__version__, torch.backends.cpu.get_cpu_capability())
    same = (recorded["torch"], recorded["cpu"]) == here
    for line in expected:
        for name in ("loss", "grad_norm", "val_loss"):
            if name in line:
                exact = line[name] if same else pytest.approx(line[name], rel=1e-5)
                assert found[line["step"]][name] == exact, (line["step"], name)
    ends = read_events(folder, "attempt")
    assert [event["attempt"] for event in ends] == [1, 2, 3, 4]
