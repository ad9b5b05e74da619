"""The reason of a failure is in one place, and no finished step is lost with it (a real run)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from clones import SMALL, make_clone, start
from faults import infect
from ranks import run_command

from commands import status
from record.records import read_events, read_metrics
from record.run_status import status_of
from runtime.log.event_files import segment_folder

ENDS = ["run=sick", "steps=12", "checkpoint.interval=5", "restart.attempts=1"]


@pytest.fixture(scope="module")
def sick(tmp_path_factory) -> Path:
    """The folder of a run of two ranks in which rank 1 raises in step 8, twice."""
    clone = make_clone(tmp_path_factory.mktemp("sick"))
    infect(clone, {"data_steps": [7, 8], "rank": 1, "raises": "mat1 and mat2 do not fit"})
    done = start(clone, *ENDS, nproc=2)
    assert done.returncode == 93, done.stderr
    infect(clone)
    return clone / "runs" / "sick"


def test_the_reason_of_a_failure_is_in_the_attempt_in_status_and_in_the_bundle(sick):
    for event in read_events(sick, "attempt"):
        assert (event["cause"], event["rank"], event["phase"]) == ("failed", 1, "step")
        assert event["error"]["type"] == "RuntimeError"
        assert event["error"]["text"] == "mat1 and mat2 do not fit"
        assert event["error"]["place"].endswith(" in sick")
        assert event["error"]["step"] == 8
        assert event["why"].startswith("RuntimeError: mat1 and mat2 do not fit, at ")
    assert not read_events(sick, "failed")  # rank 0 only lost its peer
    shown = "\n".join(status.describe(status_of(sick)))
    assert "newest failure: attempt 2, rank 1 in phase step of step 8: RuntimeError" in shown
    (bundle,) = (sick / "bundles").iterdir()
    why = (bundle / "WHY.txt").read_text()
    assert "failed: attempt 2, rank 1 in phase step of step 8: RuntimeError: mat1" in why
    assert "failed: attempt 1" in why


def test_the_last_finished_step_is_recorded_when_the_next_one_raises(sick):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [line["step"] for line in read_metrics(sick)] == list(range(1, 8))
    accumulator = EventAccumulator(str(segment_folder(sick, 0)), {"scalars": 0})
    accumulator.Reload()
    assert [point.step for point in accumulator.Scalars("loss/train")] == list(range(1, 8))


def test_an_attempt_that_finds_the_last_step_saved_leaves_a_line(sick):
    """As after a kill between the last save and the end of the run."""
    clone = sick.parents[1]
    done = start(clone, *ENDS, nproc=2)
    assert done.returncode == 0, done.stderr
    path = sick / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[-2:] == ["finished", "attempt"]
    path.write_text("".join(lines[:-2]))
    done = start(clone, *ENDS, nproc=2)
    assert done.returncode == 0, done.stderr
    assert "is finished: it has a checkpoint of step 12" in done.stdout
    ends = read_events(sick, "attempt")
    assert [event["cause"] for event in ends[-2:]] == ["killed", "finished"]
    assert (ends[-1]["from_step"], ends[-1]["last_step"], ends[-1]["saved_step"]) == (12, 12, 12)
    assert status_of(sick).word == "finished"
    start(clone, *ENDS, nproc=1)  # nothing more to say
    assert len(read_events(sick, "attempt")) == len(ends)


def test_a_micro_batch_that_the_plan_chose_shrinks_until_the_first_step_fits(tmp_path):
    """Two ranks; more than one sequence at once is out of memory. A given one is not changed."""
    clone = make_clone(tmp_path)
    fault = {"data_steps": [0, 99], "rank": None, "raises": "can't allocate memory"}
    infect(clone, fault | {"rows_above": 1})
    words = [word for word in SMALL if not word.startswith("micro_batch")]
    words += ["cluster.gpu=A100-80GB", "steps=3", "eval_tokens=0", "run=trial"]
    command = [sys.executable, "-m", "commands.pretrain", "--nproc", "2", "--", *words]
    done = run_command([*command, "micro_batch=2", "run=given"], 240, cwd=clone, PYTHONPATH="")
    assert done.returncode != 0
    (given,) = read_events(clone / "runs" / "given", "attempt")
    assert given["cause"] == "out_of_memory"
    done = run_command([*command, "micro_batch=auto"], 400, cwd=clone, PYTHONPATH="")
    assert done.returncode == 0, done.stdout
    run = clone / "runs" / "trial"
    choice = json.loads((run / "plan.json").read_text())["choice"]
    failed = choice["out_of_memory"]
    assert failed
    assert failed == sorted(failed, reverse=True)
    assert choice["chosen"] == ["micro_batch=1"]
    text = f"out of memory in the first step at micro_batch={failed[0]}, which the plan chose"
    assert text in done.stdout
    causes = [event["cause"] for event in read_events(run, "attempt")]
    assert causes == ["out_of_memory"] * len(failed) + ["finished"]
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["accumulation"] == 4
    assert "micro_batch: 1\n" in (run / "recipe.yaml").read_text()
