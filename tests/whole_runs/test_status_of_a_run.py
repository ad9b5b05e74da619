"""make status, stop and goodput on a real run that hangs, is preempted and is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clones import SMALL, make_clone
from ranks import PATIENCE, environment

from commands import status, stop
from record import goodput, run_status
from record.records import read_events, read_metrics
from runtime.log.event_files import segment_folder

# One real run: it hangs, goes on by itself, is preempted, goes on, is stopped.


def started(clone: Path, log: Path, nproc: int) -> int:
    """Start or go on with the run in a session of its own; its launcher's process."""
    command = [sys.executable, "-m", "commands.pretrain", "--nproc", str(nproc), "--", *SMALL]
    command += ["run=real", "steps=100000", "checkpoint.interval=25", "eval_every=40"]
    command += [f"watch.step_s={int(6 * PATIENCE)}"]  # or ten usual steps, on a busy machine
    with open(log, "ab") as out:
        return subprocess.Popen(
            command, cwd=clone, env=environment(PYTHONPATH=str(clone)), stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def until(ready, what: str) -> None:
    """Wait for something that a run does."""
    deadline = time.monotonic() + 120 * PATIENCE
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def process_of(run: Path, rank: int) -> int:
    """Process of a rank in the newest attempt, from its log."""
    path = run / "logs" / f"rank-{rank:05d}.log"
    deadline = time.monotonic() + 60 * PATIENCE
    while not path.is_file():  # the launcher writes it with the next flush of its logs
        assert time.monotonic() < deadline, path
        time.sleep(0.1)
    text = path.read_text()
    heads = [line for line in text.splitlines() if line.startswith(f"== rank {rank}, process ")]
    return int(heads[-1].split("process ")[1].split(",")[0])


def newest(run: Path) -> tuple[int, int]:
    """(attempt, step) of the newest line."""
    if not (run / "metrics.jsonl").exists():
        return 0, 0
    lines = read_metrics(run)
    return (lines[-1]["attempt"], lines[-1]["step"]) if lines else (0, 0)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Path, str, list[int]]:
    """The run's folder, what its launchers said, and their exit statuses."""
    clone = make_clone(tmp_path_factory.mktemp("real"))
    run, log, statuses = clone / "runs" / "real", clone / "said", []
    launcher = started(clone, log, 2)
    try:
        until(lambda: newest(run) >= (1, 30), "the first attempt did not train")
        os.kill(process_of(run, 1), signal.SIGSTOP)
        until(lambda: newest(run)[0] == 2, "no second attempt")
        until(lambda: newest(run)[1] >= 35, "the second attempt did not train")
        os.killpg(launcher.pid, signal.SIGTERM)  # the whole group, and again through the launcher
        statuses.append(launcher.wait(60 * PATIENCE))
        launcher = started(clone, log, 1)
        until(lambda: newest(run)[0] == 3, "no third attempt")
        os.chdir(clone)
        statuses.append(stop.main(["real"]))
        statuses.append(launcher.wait(60 * PATIENCE))
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    return run, log.read_text(), statuses


def test_a_hang_ends_in_a_new_attempt_preemption_in_75_a_stop_in_0(real):
    run, said, statuses = real
    assert statuses == [75, 0, 0], said
    causes = [(e["cause"], e["rank"]) for e in read_events(run, "attempt")]
    assert causes == [("hung", 1), ("preempted", None), ("stopped", None)]
    hung = read_events(run, "attempt")[0]
    assert hung["phase"] in ("step", "save", "evaluate")
    assert "it is stopped (SIGSTOP)" in hung["why"]
    assert hung["seconds"]["detect"] >= 6
    assert "(most recent call first)" in (run / "logs" / "rank-00000.log").read_text()


def test_what_ended_the_run_on_request_was_saved_at_that_very_step(real):
    run, said, _ = real
    for kind in ("preempted", "stopped"):
        (event,) = read_events(run, kind)
        assert event["is_saved"], said
        assert event["step"] in [saved["step"] for saved in read_events(run, "saved")]
    ended = read_events(run, "preempted")[0]["step"]
    (began,) = [event for event in read_events(run, "began") if event["attempt"] == 3]
    assert began["after_step"] == ended


def test_one_series_after_all_attempts(real):
    """MON-01: each step once, to a reader of the files and of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _, _ = real
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == list(range(1, steps[-1] + 1))
    accumulator = EventAccumulator(str(segment_folder(run, 0)), {"scalars": 0})
    accumulator.Reload()
    assert [point.step for point in accumulator.Scalars("loss/train")] == steps
    shares = accumulator.Scalars("wall_clock/goodput")
    assert len({point.step for point in shares}) == len(shares) >= 3
    assert all(0 <= point.value <= 1 for point in shares)


def test_every_second_of_the_run_is_accounted_for(real):
    run, _, _ = real
    attempts = goodput.read_attempts(run)
    total = goodput.account(attempts)
    assert sum(total.values()) == pytest.approx(
        attempts[-1].ended_unix_s - attempts[0].began_unix_s
    )
    assert total["detect"] >= 6
    assert total["redone"] > 0
    assert all(seconds >= -0.01 for seconds in total.values())
    assert total["other"] < 0.1 * sum(total.values())
    reported = "\n".join(status.describe(run_status.status_of(run)))
    assert "does not run" in reported
    assert "stopped; steps" in reported
