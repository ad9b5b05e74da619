"""launch/supervise.py and launch/budget.py: which attempts follow which, and what is left of each.

Ranks are real processes without torch (attempt_worker.py), which keep a run's record.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks import ROOT

from base.jsonl import append_line
from commands import pretrain
from commands.pretrain import keep_bundle, resume_of
from launch import budget
from launch import supervise as supervise_module
from launch.budget import Budget
from launch.ranks import oom, start
from launch.ranks.outcome import cause_of
from launch.slurm import requeued
from launch.supervise import AttemptStart, supervise
from recipes.compose import compose
from record import presence, requests
from record.attempts import Attempt, Progress, RankEnd
from record.records import read_events, record_event
from record.supervisor_log import SupervisorLog

SECRET = "hunter2hunter2"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(budget, "FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MY_PASSWORD", SECRET)


def live_through(
    tmp_path: Path,
    plan: list,
    attempts: int = 3,
    before=lambda: None,
    at_attempt=lambda number: None,
    alert=lambda kind, text: None,
) -> tuple[int, Path]:
    """The exit status of a run of one rank whose attempts end as `plan` says, and its folder.

    `at_attempt` is called with the number of each attempt before it begins, `alert` with what
    people are told.
    """
    folder = tmp_path / "run"
    words = [str(ROOT / "tests" / "workers" / "attempt_worker.py"), str(folder), json.dumps(plan)]

    numbers = itertools.count(1)

    def live(screen, asked, variables, has_begun):
        at_attempt(next(numbers))
        return start.live_here(words, 1, tmp_path, folder, None, screen, asked, variables)

    supervisor_log = SupervisorLog(folder)
    with start.catch_signals() as stop_signals:
        before()
        status = supervise(
            lambda attempt: AttemptStart(1, live),
            supervisor_log,
            Budget(attempts, supervisor_log.progress()),
            stop_signals,
            lambda why: keep_bundle(supervisor_log, why, {}, os.environ),
            patience_s=600.0,
            alert=alert,
        )
    return status, folder


def lines_of(folder: Path, *names: str) -> list[tuple]:
    return [tuple(line[name] for name in names) for line in read_events(folder, "attempt")]


def test_a_run_is_started_again_until_it_finishes_and_each_life_leaves_one_line(tmp_path, capfd):
    plan = [[4, 3, "kill"], [5, 0, 3], [3, 0, "vanish"], [9, 9, 0]]
    status, folder = live_through(tmp_path, plan)
    assert status == 0
    names = ("attempt", "cause", "status", "from_step", "last_step", "saved_step")
    assert lines_of(folder, *names) == [
        (1, "killed", 137, 0, 4, 3),
        (2, "failed", 3, 3, 5, 3),
        (3, "killed", 137, None, None, 3),
        (4, "finished", 0, 3, 9, 9),
    ]
    for line in read_events(folder, "attempt"):
        assert line["ended_unix_s"] >= line["began_unix_s"]
        assert set(line["seconds"]) <= {"restart", "detect", "start", "load", "first_step"}
        assert all(seconds >= 0 for seconds in line["seconds"].values())
    told = capfd.readouterr().err
    assert "failed: the run was killed by SIGKILL" in told
    assert "restart: rank 0 was killed by SIGKILL" in told
    assert "going on from checkpoint step 3" in told


def test_lives_without_progress_end_the_run_with_93_and_a_bundle_without_secrets(tmp_path, capfd):
    plan = [[4, 3, "kill"]] + 3 * [[4, 0, "kill"]] + [[9, 9, 0]]
    alerts = []
    status, folder = live_through(tmp_path, plan, alert=lambda *said: alerts.append(said))
    assert status == 93
    assert [cause for (cause,) in lines_of(folder, "cause")] == 4 * ["killed"]
    told = capfd.readouterr().err
    why = "3 attempts in a row added no step and no checkpoint beyond step 4"
    assert why in told
    [made] = (folder / "bundles").iterdir()
    assert [kind for kind, _ in alerts] == 3 * ["restart"] + ["gave_up"]
    assert why in alerts[-1][1]
    assert "going on from checkpoint step 3" in alerts[0][1]
    last = read_events(folder)[-1]
    assert (last["kind"], last["attempt"]) == ("gave_up", 4)
    assert why in last["reason"]
    assert last["bundle"] == f"bundles/{made.name}"
    assert str(made) in told
    names = {path.name for path in made.rglob("*") if path.is_file()}
    assert {"WHY.txt", "events.jsonl", "recipe.yaml", "metrics.jsonl", "environment.txt"} <= names
    assert "rank-00000.log" in names
    text = "".join(path.read_text() for path in made.rglob("*") if path.is_file())
    assert "password=***" in text
    assert SECRET not in text
    assert '"step": 4' in text
    assert SECRET not in told + (folder / "logs" / "rank-00000.log").read_text()


def test_a_life_that_ends_for_good_by_itself_leaves_a_bundle_unless_it_left_its_own(tmp_path):
    alerts = []
    status, folder = live_through(tmp_path, [[4, 3, 93]], alert=lambda *said: alerts.append(said))
    assert status == 93
    assert [kind for kind, _ in alerts] == ["gave_up"]
    [made] = (folder / "bundles").iterdir()
    assert read_events(folder)[-1]["kind"] == "gave_up"
    (folder.with_suffix(".tries")).unlink()
    assert live_through(tmp_path, [[5, 4, "stop"]], alert=lambda *_: alerts.clear())[0] == 93
    assert len(alerts) == 1
    assert list((folder / "bundles").iterdir()) == [made]


def test_the_record_of_a_start_that_took_the_run_over_is_left_alone(tmp_path):
    _, folder = live_through(tmp_path, [[4, 3, 75]])
    supervisor_log = SupervisorLog(folder)
    supervisor_log._attempt = 1
    supervisor_log.event("alert_failed")
    record_event(folder, "began", attempt=2, launch="another")
    supervisor_log.event("gave_up")
    assert [event["kind"] for event in read_events(folder)][-2:] == ["alert_failed", "began"]


def test_what_stands_in_the_way_of_a_life_costs_a_try_and_not_the_run(tmp_path, capfd):
    """No process, no temporary file; then a disk that is full until somebody makes room."""
    tries = []

    def at_attempt(number):
        if number == 2:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    def trouble(supervisor_log):
        tries.append(supervisor_log.progress())
        return f"{supervisor_log.folder}: No space left on device" if len(tries) in (1, 2) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisorLog, "trouble", trouble)
        patch.setattr(supervise_module, "LOOK_S", 0.01)
        plan, alerts = [[4, 3, "kill"], [9, 9, 0]], []
        hear = lambda kind, text: alerts.append(kind)  # noqa: E731
        status, folder = live_through(tmp_path, plan, at_attempt=at_attempt, alert=hear)
    assert alerts == ["waiting", "restart", "restart"]
    assert status == 0
    causes = [cause for (cause,) in lines_of(folder, "cause")]
    assert causes == ["killed", "failed", "finished"]
    told = capfd.readouterr().err
    assert told.count("No space left on device; waiting up to 600 s") == 1
    assert "Resource temporarily unavailable" in told


def test_a_record_that_cannot_be_written_is_known(tmp_path):
    supervisor_log = SupervisorLog(tmp_path / "run")
    assert supervisor_log.trouble() is None  # nothing was there yet
    record_run(tmp_path / "run")
    assert supervisor_log.progress() == Progress(0, 4, 0, attempt=1)
    assert supervisor_log.trouble() is None
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl"]
    shutil.rmtree(tmp_path / "run")
    assert "No such file" in supervisor_log.trouble()


def record_run(folder: Path) -> None:
    folder.mkdir()
    append_line(folder / "metrics.jsonl", {"segment": 0, "step": 4, "attempt": 1})


def test_a_run_whose_folder_has_gone_does_not_begin_anew(tmp_path, capfd):
    """A file system that is not mounted looks like a run that never began."""

    def at_attempt(number):
        if number == 2:
            shutil.rmtree(tmp_path / "run")

    plan = [[4, 3, "kill"], [0, 0, "vanish"], [9, 9, 0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisorLog, "trouble", lambda supervisor_log: None)
        status, _ = live_through(tmp_path, plan, at_attempt=at_attempt)
    assert status == 93
    assert "nothing is left of the run's folder, which had come to step 4" in capfd.readouterr().err


def test_progress_renews_the_budget(tmp_path):
    plan = [[n, n, "kill"] for n in range(1, 4)] + [[9, 9, 0]]
    assert live_through(tmp_path, plan, attempts=1)[0] == 0


def test_a_crash_before_the_first_step_ever_is_not_repeated(tmp_path):
    status, folder = live_through(tmp_path, [[0, 0, 3], [9, 9, 0]])
    assert status == 3
    assert lines_of(folder, "cause", "last_step") == [("failed", 0)]
    assert not (folder / "bundles").exists()


@pytest.mark.parametrize(
    ("plan", "attempts", "status", "causes"),
    [
        ([[4, 3, 93], [9, 9, 0]], 3, 93, ["gave_up"]),
        ([[4, 3, 75], [9, 9, 0]], 3, 75, ["preempted"]),
        ([[4, 3, 130], [9, 9, 0]], 3, 130, ["stopped"]),
        (3 * [[4, 3, 76]] + [[9, 9, 0]], 1, 0, 3 * ["rewound"] + ["finished"]),
        ([[4, 3, "kill"], [9, 9, 0]], 0, 137, ["killed"]),
        ([[4, 3, "oom"], [4, 0, "oom"], [9, 9, 0]], 3, 93, 2 * ["out_of_memory"]),
        ([[4, 3, "oom"], [5, 0, "oom"], [9, 9, 0]], 3, 0, 2 * ["out_of_memory"] + ["finished"]),
    ],
)  # fmt: skip
def test_the_exit_contract(tmp_path, plan, attempts, status, causes):
    got, folder = live_through(tmp_path, plan, attempts)
    assert (got, [cause for (cause,) in lines_of(folder, "cause")]) == (status, causes)


def test_a_signal_ends_the_run_also_between_two_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "FIRST_WAIT_S", 1000.0)

    def interrupt_later():
        def interrupt():
            events = tmp_path / "run" / "events.jsonl"
            while not (events.exists() and events.read_text().count('"cause"') == 2):
                time.sleep(0.01)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()

    plan = [[4, 3, "kill"], [4, 0, "kill"], [9, 9, 0]]
    status, folder = live_through(tmp_path, plan, before=interrupt_later)
    assert status == 128 + signal.SIGINT
    assert [cause for (cause,) in lines_of(folder, "cause")] == 2 * ["killed"]


def test_make_stop_ends_the_wait_between_two_lives_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "FIRST_WAIT_S", 1000.0)

    def at_attempt(number):
        if number == 2:
            requests.ask(tmp_path / "run", now=False, who="me")

    plan = [[4, 3, "kill"], [4, 0, "kill"], [9, 9, 0]]
    status, folder = live_through(tmp_path, plan, at_attempt=at_attempt)
    assert status == 0
    assert [event["kind"] for event in read_events(folder)][-1] == "stopped"
    assert presence.launcher(folder) is None


def test_another_start_of_the_same_name_writes_nothing_into_the_runs_record(tmp_path):
    _, folder = live_through(tmp_path, [[9, 9, 0]])
    before = (folder / "events.jsonl").read_bytes()
    assert live_through(tmp_path, [None, [0, 0, "vanish"]], attempts=0)[0] == 137
    assert (folder / "events.jsonl").read_bytes() == before


def test_what_resume_fresh_set_aside_is_not_set_aside_again():
    fresh = compose("tiny", ["resume=fresh"]).recipe
    assert [resume_of(fresh, has_begun) for has_begun in (False, True)] == [
        "resume=fresh",
        "resume=auto",
    ]


def ended(cause: str, status: int, progress: Progress, has_begun: bool) -> Attempt:
    step = 0 if has_begun else None
    return Attempt(0.0, 1.0, cause=cause, status=status, progress=progress, from_step=step)


def attempt(cause: str, has_begun: bool = True) -> Attempt:
    return ended(cause, 93 if cause == "refused" else 1, Progress(0, 5, 0), has_begun)


def test_a_run_that_cut_off_ranks_still_hold_is_waited_for():
    judge = Budget(3, Progress(), busy_s=12).judge
    assert judge(attempt("lost_host")).again
    for _ in range(3):
        verdict = judge(attempt("refused", has_begun=False))
        assert verdict.again
        assert verdict.wait_s > 0
    assert not judge(attempt("refused", has_begun=False)).again


def test_a_new_segment_counts_as_progress():
    judge = Budget(1, Progress(0, 50, 50)).judge
    assert judge(ended("rewound", 76, Progress(0, 50, 50), True)).again
    assert judge(ended("killed", 137, Progress(1, 20, 10), True)).again
    assert judge(ended("killed", 137, Progress(1, 20, 10), True)).is_final


def test_a_launcher_that_stood_still_tries_again_also_before_the_first_step():
    verdict = Budget(3, Progress()).judge(ended("killed", 1, Progress(0, 0, 0), has_begun=False))
    assert verdict.again
    assert "no longer heard this launcher" in verdict.why


def test_causes():
    oom_words = ("[rank0]: torch.OutOfMemoryError: CUDA out of memory.",)
    numpy_words = "[rank0]: numpy._core._exceptions._ArrayMemoryError: Unable to allocate 116. GiB"
    torch_words = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you"
    for ends, stopped_by, cause in (
        ([RankEnd(0, 0, 1.0), RankEnd(1, 0, 1.0)], None, "finished"),
        ([RankEnd(0, -2, 1.0, was_stopped=True)], signal.SIGINT, "stopped"),
        ([RankEnd(0, 75, 1.0), RankEnd(1, 75, 1.0)], signal.SIGTERM, "preempted"),
        ([RankEnd(0, 76, 1.0), RankEnd(1, 76, 1.0)], None, "rewound"),
        ([RankEnd(0, 76, 1.0), RankEnd(1, 1, 1.1)], None, "rewound"),
        ([RankEnd(0, 76, 1.1), RankEnd(1, 1, 1.0)], None, "failed"),
        ([RankEnd(0, 1, 1.0), RankEnd(1, 1, 1.1, is_lost=True)], None, "lost_host"),
        ([RankEnd(0, -9, 1.0, is_oom=True)], None, "out_of_memory"),
        ([RankEnd(0, 1, 1.0, last=oom_words)], None, "out_of_memory"),
        ([RankEnd(0, 1, 1.0, last=(numpy_words,))], None, "out_of_memory"),
        ([RankEnd(0, 1, 1.0, last=(torch_words,))], None, "out_of_memory"),
        ([RankEnd(0, -11, 1.0)], None, "killed"),
        ([RankEnd(0, 1, 1.0)], None, "failed"),
        ([RankEnd(0, 93, 1.0)], None, "refused"),
        (
            [RankEnd(0, -9, 1.0, was_stopped=True), RankEnd(1, -9, 1.0, was_stopped=True)],
            None,
            "killed",
        ),
    ):
        assert cause_of(ends, stopped_by) == cause


def test_the_kernels_counters_of_kills_for_memory(tmp_path):
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert oom.kills(tmp_path) == 0
    put("proc/vmstat", "pgfault 7\noom_kill 3\n")
    assert oom.kills(tmp_path) == 3
    put("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    put("sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\noom_kill 1\n")
    assert oom.kills(tmp_path) == 1
    put("proc/self/cgroup", "0::/a\n")
    put("sys/fs/cgroup/a/memory.events", "oom 4\noom_kill 2\n")
    assert oom.kills(tmp_path) == 2


MEMORY = Path("/sys/fs/cgroup/memory")
HOG = """
import os, sys
from pathlib import Path
group = Path(sys.argv[1])
(group / "cgroup.procs").write_text(str(os.getpid()))
from launch.ranks.ranks import start_ranks
command = [sys.executable, "-c", "x = bytearray(200 << 20)"]
[end] = start_ranks(command, [os.environ | {"RANK": "0"}], Path.cwd()).wait()
sys.exit(0 if (end.status, end.is_oom) == (-9, True) else f"{end}")
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists(),
    reason="needs root and control groups of version 1 with memory",
)
def test_a_rank_that_the_kernel_kills_for_memory_is_known_as_such():
    group = MEMORY / f"pretrain-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(80 << 20))
        command = [sys.executable, "-c", HOG, str(group)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        group.rmdir()


def test_a_folder_that_may_not_be_written_is_refused_by_name(monkeypatch, capsys):
    def denied(*_):
        raise PermissionError(13, "Permission denied", "/p/corpora/x.tmp")

    monkeypatch.setattr(pretrain, "start_here", denied)
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert pretrain.main(["--", "recipe=tiny"]) == 93
    assert "refused: /p/corpora/x.tmp: Permission denied; have" in capsys.readouterr().err


def test_a_slurm_job_is_put_back_in_the_queue_by_its_number(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "scontrol"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert requeued(0, {"SLURM_JOB_ID": "7"}) == 0
    assert requeued(75, {"SLURM_JOB_ID": "7"}) == 75
    assert requeued(
        75, {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "2"}
    )
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 7", "requeue 8_2"]
    tool.write_text("#!/bin/sh\necho 'disabled' >&2\nexit 1\n")
    requeued(75, {"SLURM_JOB_ID": "7"})
    assert "scontrol requeue 7: disabled; submit the job again" in capsys.readouterr().err
