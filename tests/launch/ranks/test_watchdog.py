"""launch/ranks/watchdog.py: silence is heard, the right rank named, a healthy run left alone."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import PATIENCE, ROOT, environment

from launch.ranks.outcome import cause_of, exit_status, explain
from launch.ranks.ranks import start_ranks
from launch.ranks.run_logs import RunLogs
from launch.ranks.watchdog import Watchdog, frames_of, waits
from recipes.schema import Watch
from record.heartbeat import Beat, Heart, read_beat

LIMITS = Watch(start_s=100, load_s=50, step_s=10, step_factor=5, evaluate_s=40, save_s=60, end_s=20)
# Each way to hang and each phase; all 25 pairs behave alike.
HANGS = [
    ("stop", "step"), ("spin", "load"), ("read", "save"), ("lock", "evaluate"), ("gil", "step"),
    ("stop", "save"), ("lock", "end"),
]  # fmt: skip
WAITING = """\
Thread 0x00007f31e27fc6c0 (most recent call first):
  File "/x/data/prefetch.py", line 70 in _work

Current thread 0x00007f3238682b80 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/runtime/engine.py", line 102 in train_step
"""


class Clocked:
    """A watchdog over a clock that the test moves, and the beats of its ranks."""

    def __init__(self, ranks: int, limits: Watch = LIMITS):
        self.now = 1000.0
        self.dog = Watchdog(range(ranks), limits, lambda: self.now)
        self.hearts = []
        for rank in range(ranks):
            heart = Heart(lambda: self.now)
            heart.begin(self.dog.environment() | {"RANK": str(rank)})
            self.hearts.append(heart)

    def beat(self, phase: str, step: int | None = None, parts: int | None = None) -> None:
        for heart in self.hearts:
            heart.beat(phase, step, parts)

    def look(self, passed_s: float = 0.5):
        """Time passes as a watch that runs sees it: in short looks."""
        end, found = self.now + passed_s, None
        while self.now < end and found is None:
            self.now = min(end, self.now + 4)
            found = self.dog.look(range(len(self.hearts)))
        return found

    def train(self, first: int, last: int, step_s: float, parts: int = 1) -> None:
        for step in range(first, last + 1):
            self.beat("step", step, parts)
            assert self.look(step_s) is None, f"step {step}"


@pytest.fixture
def watched():
    made = []

    def make(*arguments) -> Clocked:
        made.append(Clocked(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.dog.close()


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [("start", 100), ("load", 50), ("evaluate", 40), ("save", 60), ("end", 20)],
)
def test_each_phase_has_its_limit(watched, phase, limit_s):
    run = watched(2)
    run.beat(phase)
    run.look()
    assert run.look(limit_s - 1) is None
    hung = run.look(3)
    assert (hung.beat.phase, hung.limit_s) == (phase, limit_s)


def test_no_limit_is_for_ever(watched):
    run = watched(1, Watch(start_s=0, step_s=0))
    assert run.look(5000) is None
    run.beat("step", 1)
    assert run.look(5000) is None


def test_the_first_steps_have_the_limit_of_a_start(watched):
    run = watched(1)
    run.beat("step", 1)
    run.look()
    assert run.look(90) is None
    assert run.look(15).limit_s == 100


def test_a_step_may_take_so_many_times_the_usual_one(watched):
    run = watched(1)
    run.train(1, 20, step_s=3)
    run.beat("step", 21)
    run.look()
    assert run.look(14) is None
    assert run.look(3).limit_s == pytest.approx(15, abs=0.5)


def test_a_ramp_to_more_micro_batches_is_no_hang(watched):
    """16 times the batch: a step of 48 s after steps of 3 s."""
    run = watched(1)
    run.train(1, 30, step_s=3, parts=1)
    run.train(31, 40, step_s=48, parts=16)


def test_seconds_in_which_the_watch_itself_was_stopped_do_not_count(watched):
    """A suspended laptop, Ctrl-Z, a frozen container."""
    run = watched(2)
    run.train(1, 20, step_s=1)
    run.now += 50_000
    assert run.dog.look([0, 1]) is None
    run.train(21, 30, step_s=1)
    assert run.look(20) is not None


def test_no_false_alarm_in_10000_healthy_steps(watched):
    """Uneven steps, evaluations and saves that take long, a machine that grows slower."""
    draw = random.Random(3)
    run = watched(2, replace(LIMITS, step_factor=Watch().step_factor))
    run.beat("load")
    run.look(45)
    step_s = 2.0
    for step in range(1, 10_001):
        if step % 2000 == 0:
            step_s *= 2
        run.beat("step", step)
        # A log-normal step, and one in 200 that meets something: 4 times as long.
        took_s = step_s * draw.lognormvariate(0, 0.2) * (4 if draw.random() < 0.005 else 1)
        assert run.look(took_s) is None, step
        if step % 500 == 0:
            run.beat("evaluate")
            assert run.look(38) is None
            run.beat("save")
            assert run.look(58) is None
            run.beat("step")


def test_a_beat_that_is_no_whole_line_is_passed_over(tmp_path, watched):
    run = watched(1)
    run.train(1, 5, step_s=1)
    path = run.dog.folder / "rank-00000.beat"
    for torn in ("", "0 step", "0 step x 1.0 1 1 0.5", "\0\0"):
        path.write_text(torn)
        assert read_beat(path) is None
        assert run.look() is None
    assert run.dog.last(0).step == 5
    assert read_beat(tmp_path / "absent") is None


def test_a_rank_beats_in_place_and_without_a_listener_not_at_all(tmp_path):
    quiet = Heart()
    quiet.begin({})
    quiet.beat("step", 1)
    heart = Heart(lambda: 5.0)
    heart.begin({"PRETRAIN_BEATS": str(tmp_path), "RANK": "3"})
    file = tmp_path / "rank-00003.beat"
    first = os.stat(file)
    heart.beat("step", 1234567, 64)
    assert read_beat(file) == Beat("step", 1234567, 5.0, 64, 1, 0.0)
    assert (os.stat(file).st_ino, os.stat(file).st_size) == (first.st_ino, first.st_size)
    heart.begin({"PRETRAIN_BEATS": str(tmp_path / "gone"), "RANK": "3"})


def test_evaluations_and_saves_are_phases_and_each_batch_is_a_sign_of_life(tmp_path):
    import contextlib

    heart = Heart(lambda: 5.0)
    heart.begin({"PRETRAIN_BEATS": str(tmp_path), "RANK": "0"})
    heart.beat("step", 7)
    seen = []

    def note() -> str:
        seen.append(read_beat(tmp_path / "rank-00000.beat").phase)
        return seen[-1]

    phase = heart.around(lambda name: contextlib.nullcontext())
    with phase("compute"):
        note()
    with phase("eval"):
        for _ in heart.each([1, 2]):
            note()
    with phase("save"):
        note()
    note()
    assert seen == ["step", "evaluate", "evaluate", "save", "step"]


def test_who_waits_in_a_collective_is_known_by_the_main_threads_stack():
    assert frames_of(WAITING)[0].endswith("in all_reduce")
    assert waits(WAITING)
    turned = WAITING.replace("torch/distributed/distributed_c10d.py", "x/slow.py")
    assert not waits(turned)
    assert not waits("")


def test_steps_that_no_look_saw_count_all_the_same(watched):
    """Steps of 20 ms, a look each 0.5 s: a hang in step 33 has the limit of a step, not a start."""
    run = watched(1)
    for step in range(500, 533):  # this attempt goes on from step 499
        run.beat("step", step, 2)
        run.now += 0.02
    run.look()
    heard = run.dog.heard[0]
    assert heard.beat.steps == 33
    assert list(heard.durations) == [pytest.approx(0.01)]  # seconds of a micro-batch
    assert run.look(12).limit_s == 10


def test_evaluations_and_saves_do_not_make_a_step_longer(watched):
    """Each step of 1 s is followed by an evaluation of 30 s; step 21 then hangs."""
    run = watched(1)
    for step in range(1, 21):
        run.beat("step", step, 2)
        assert run.look(1) is None
        run.beat("evaluate")
        assert run.look(30) is None
        run.beat("step")
    run.beat("step", 21)
    run.look()
    assert list(run.dog.heard[0].durations) == [pytest.approx(0.5)] * 20
    assert run.look(12).limit_s == 10


def hang(folder: Path, how: str, phase: str):
    """The ends of two ranks of which rank 1 hangs, and the log of each."""
    folder.mkdir()
    usual = round(60 * PATIENCE)
    phases = ("start", "load", "step", "evaluate", "save", "end")
    limits = Watch(**{f"{name}_s": usual for name in phases})
    # A rank that is only slow must not look as if it hung.
    limits = replace(limits, **{f"{phase}_s": math.ceil(PATIENCE)})
    environments = [
        environment(RANK=str(rank), WORLD_SIZE="2", PYTHONPATH=str(ROOT)) for rank in range(2)
    ]
    logs = RunLogs(folder)
    command = [sys.executable, str(ROOT / "tests" / "workers" / "hang_worker.py"), phase, how]
    ranks = start_ranks(command, environments, ROOT, logs=logs, limits=limits)
    (folder / "recipe.yaml").touch()
    ends = ranks.wait()
    return ends, [(folder / "logs" / f"rank-0000{rank}.log").read_text() for rank in range(2)]


def test_every_kind_of_hang_in_every_phase_is_named_and_ends_at_once(tmp_path, monkeypatch):
    """Reliability: SIGSTOP, `while True`, a blocked read, a lock held, the interpreter's lock."""
    monkeypatch.setattr("launch.ranks.watchdog.DUMP_S", 3 * PATIENCE)
    with ThreadPoolExecutor(len(HANGS)) as pool:
        found = list(pool.map(lambda case: hang(tmp_path / "-".join(case), *case), HANGS))
    for (how, phase), (ends, logs) in zip(HANGS, found, strict=True):
        case = f"{how} in {phase}: {ends}"
        assert (exit_status(ends), cause_of(ends)) == (137, "hung"), case
        (blamed,) = [end for end in ends if end.hung]
        assert (blamed.rank, blamed.phase, blamed.step) == (1, phase, 0 if phase == "load" else 7)
        assert f"hung in phase {phase}" in explain(ends, 2)[0]
        assert "torch/distributed" in logs[0], case  # its stack: it waited
        if how == "stop":
            assert "it is stopped (SIGSTOP) and cannot write its stack" in logs[1]
        else:
            assert f"in {how}" in explain(ends, 2)[1], case
            assert f"in {how}" in logs[1]


def test_ranks_that_beat_and_end_well_are_left_alone(tmp_path):
    ends, logs = hang(tmp_path / "well", "never", "save")
    assert exit_status(ends) == 0
    assert not any("hung" in log for log in logs)
    assert [(end.phase, end.step) for end in ends] == [("save", 7)] * 2


def test_a_rank_that_the_kernel_cannot_end_is_named_and_counts_as_lost(tmp_path, monkeypatch):
    """One in a driver or a file system that does not answer; here its SIGKILL gets lost."""
    monkeypatch.setattr("launch.ranks.shutdown.UNENDING_S", 0.5)
    environments = [environment(RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    code = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(1000)"
    ranks = start_ranks([sys.executable, "-c", code], environments, tmp_path)
    stuck, real = ranks._ranks[0].pid, os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, number: pid == stuck or real(pid, number))
    try:
        failed, lost = ranks.wait()
    finally:
        real(stuck, signal.SIGKILL)
    assert (failed.rank, failed.status, failed.is_lost) == (1, 3, False)
    assert (lost.rank, lost.status, lost.is_lost, lost.was_stopped) == (0, -9, True, True)
    assert f"process {stuck} on " in lost.last[0]
    assert "does not end after SIGKILL (state S" in lost.last[0]
    assert exit_status([failed, lost]) == 3


def test_ranks_that_have_not_begun_to_train_get_little_time_to_end(tmp_path, monkeypatch):
    """A rank may wait for others in C, where it hears no signal; nothing is lost with it."""
    monkeypatch.setattr("launch.ranks.ranks.START_GRACE_S", 0.2)
    deaf = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path('ready').touch(); time.sleep(1000)"
    )
    environments = [environment(RANK="0")]
    command = [sys.executable, "-c", deaf]
    ranks = start_ranks(command, environments, tmp_path, limits=Watch())
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    ranks.stop(signal.SIGTERM)
    ranks.stop(signal.SIGTERM)  # the same request by another way
    [end] = ranks.wait()
    assert (end.status, end.was_stopped, end.phase) == (-9, True, "start")
    assert exit_status([end], signal.SIGTERM) == 75
