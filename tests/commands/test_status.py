"""make status, runs, events, stop, goodput, on folders that are made by hand."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from commands import events, runs, status, stop
from commands import goodput as goodput_command
from record import history, presence, requests, run_status
from record.records import record_event
from record.supervisor_log import SupervisorLog

COMMANDS = {"status": status, "events": events, "stop": stop, "goodput": goodput_command}
RECIPE = "run: mine\nsteps: 50\nresume: fresh\ncheckpoint:\n  interval: 10\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A run that has begun, with two steps on record."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs" / "mine"
    made.mkdir(parents=True)
    (made / "recipe.yaml").write_text(RECIPE)
    (made / "layout.json").write_text(json.dumps({"places": [{}, {}]}))
    record_event(made, "began", attempt=1, after_step=0, world=2)
    lines = [
        dict(
            step=step, segment=0, attempt=1, loss=4.5 - step, grad_norm=0.5, step_s=0.5, data_s=0.0,
            eval_s=0.0, tokens_per_s=1024.0, first_of_attempt=step == 1, skipped=False, targets=9,
        )
        for step in (1, 2)
    ]  # fmt: skip
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


@pytest.fixture
def held(folder):
    """Somebody writes the run."""
    with open(folder / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def over(folder: Path, cause: str, **fields) -> None:
    """The line of an attempt that is over."""
    seconds = {"start": 3.0, "detect": 1.0}
    known = dict(
        attempt=1, from_step=0, last_step=2, saved_step=None, rank=1, host="node2", seconds=seconds
    )
    times = dict(began_unix_s=time.time() - 60, ended_unix_s=time.time() - 5)
    record_event(folder, "attempt", cause=cause, **(known | times | fields))


def said(capsys, *words: str) -> str:
    assert COMMANDS[words[0]].main(list(words[1:])) == 0
    return capsys.readouterr().out


def test_status_says_what_a_living_run_is_doing(folder, held, capsys):
    seen = dict(phase="evaluate", step=2, unix_s=time.time(), host="vm", pid=7)
    (folder / presence.SHOWN).write_text(json.dumps(seen))
    record_event(folder, "save_failed", attempt=1, step=2, problem="disk full")
    quiet = dict(step=1, text="no GPU readings: this run is on the CPU", is_quiet=True)
    record_event(folder, "notice", attempt=1, **quiet)
    out = said(capsys, "status", "mine")
    for part in (
        "mine runs, attempt 1: phase evaluate, step 2 of 50",
        "process 7 on vm",
        "loss 2.5000",
        "1,024 tokens/s",
        "24 s left",
        "no checkpoint yet",
        "alarms: 1",
        "disk full",
    ):
        assert part in out, part


def test_status_says_how_a_dead_run_ended_and_the_next_command(folder, capsys):
    over(folder, "hung", why="hung in phase save of step 2: silent for 12 s (limit 10 s)")
    out = said(capsys, "status", "mine")
    assert "mine does not run; it ended 0 s ago" in out
    assert "hung, rank 1 of node2: hung in phase save of step 2" in out
    # The recipe on record says resume=fresh, which would set this very folder aside.
    assert "NPROC=2 OVERRIDES=resume=auto" in out
    assert "from the start: nothing was saved" in out
    assert "failures: 1" in out


def test_status_of_a_finished_run_sends_nobody_to_train(folder, capsys):
    record_event(folder, "finished", attempt=1, step=50)
    over(folder, "finished", rank=None, host=None)
    out = said(capsys, "status", "mine")
    assert "nothing is left to train" in out
    assert "make pretrain" not in out


def test_status_of_a_run_that_was_killed_on_its_way_out_sends_nobody_to_train_either(folder):
    over(folder, "killed")
    saved = dataclasses.replace(run_status.status_of(folder), saved=(50, time.time()))
    assert "nothing is left to train" in "\n".join(status.describe(saved))
    assert "make pretrain" in "\n".join(
        status.describe(dataclasses.replace(saved, saved=(49, time.time())))
    )


def test_status_gives_the_reason_of_a_run_that_gave_up(folder, capsys):
    record_event(folder, "gave_up", attempt=1, reason="shard.bin: block 3 is damaged")
    over(folder, "gave_up")
    out = said(capsys, "status", "mine")
    assert "reason: shard.bin: block 3 is damaged" in out
    assert "next: repair what the reason names" in out
    assert "failures: 0" in out
    assert "alarms: none" in out


def test_an_attempt_without_an_event_about_its_end_is_reported_as_such(folder, capsys):
    assert "left no event about its end" in said(capsys, "status", "mine")


def test_events_are_readable_the_newest_last_also_of_unknown_kinds(folder, capsys):
    stall = dict(checkpoint_gib=0.5, checkpoint_s=2.0, checkpoint_stall_s=0.25)
    record_event(folder, "saved", attempt=1, step=10, **stall)
    record_event(folder, "thunder", attempt=1, strikes=3, where=None, far=[1, 2 / 3])
    over(folder, "killed")
    record_event(folder, "slow_rank", attempt=2, step=9, text="rank 1 is slow", rank=1, own_s=0.5)
    record_event(folder, "finished", attempt=2, step=10, is_saved=True, peak_memory_gib=[1, 2.345])
    lines = said(capsys, "events", "mine").splitlines()
    assert len(lines) == 6
    assert lines[4].endswith("slow_rank    rank 1 is slow (step 9)")
    assert lines[5].endswith("finished     step 10, saved, at most 2.35 GiB a rank")
    assert "began        from the start, 2 ranks" in lines[0]
    assert "saved        step 10, 512.0 MiB in 2.00 s, training waited 0.25 s" in lines[1]
    assert lines[2].endswith("thunder      strikes 3, far [1, 0.6667]")
    assert "killed, rank 1 of node2; steps 1 to 2, nothing saved" in lines[3]
    chosen = said(capsys, "events", "mine", "--kind", "saved,attempt").splitlines()
    assert chosen == [lines[1], lines[3]]


def test_events_are_followed_until_the_run_ends(folder, capsys, monkeypatch):
    """What is added meanwhile is printed, a torn line when it is whole."""
    monkeypatch.setattr(events, "LOOK_S", 0.01)
    living = iter([True, True, False, False])
    path = folder / "events.jsonl"

    def is_living(_):
        alive = next(living, False)
        if alive:
            with open(path, "a") as file:
                file.write('{"time": "2026-01-02T03:04:05.678Z", "kind": "rain", ')
                file.write('"attempt": 1, "mm": 2}\n')
        return alive

    monkeypatch.setattr(events, "is_living", is_living)
    out = said(capsys, "events", "mine", "--follow")
    assert out.count("2026-01-02 03:04:05  attempt 1    rain         mm 2") == 2


def test_stop_says_when_nothing_runs_and_leaves_no_request(folder, capsys):
    over(folder, "finished")
    assert "mine does not run" in said(capsys, "stop", "mine")
    assert requests.read_request(folder) is None


def test_stop_reaches_a_launcher_that_waits_between_two_attempts(folder, capsys):
    over(folder, "killed")
    assert "will not" in said(capsys, "stop", "mine")
    assert requests.read_request(folder) is not None


def test_stop_waits_for_the_end_and_says_whether_it_was_saved(folder, held, capsys, monkeypatch):
    monkeypatch.setattr(stop, "LOOK_S", 0.01)

    def obey():
        while (wanted := requests.read_request(folder)) is None:
            time.sleep(0.01)
        assert not wanted["now"]
        record_event(folder, "stopped", attempt=1, step=3, is_saved=True)
        requests.forget(folder)
        held.close()

    run = threading.Thread(target=obey)
    run.start()
    out = said(capsys, "stop", "mine")
    run.join()
    assert out.endswith("stopped after step 3, saved\n")


def test_stop_fails_where_the_run_ended_otherwise(folder, held, capsys, monkeypatch):
    monkeypatch.setattr(stop, "LOOK_S", 0.01)

    def die():
        while requests.read_request(folder) is None:
            time.sleep(0.01)
        record_event(folder, "failed", attempt=1, reason="disk full")
        requests.forget(folder)
        held.close()

    run = threading.Thread(target=die)
    run.start()
    assert stop.main(["mine", "--now"]) == 1
    run.join()
    assert "ended otherwise" in capsys.readouterr().err


def test_a_run_whose_launcher_waits_is_not_given_up_by_any_command(folder, capsys, monkeypatch):
    """Before its first rank, and between two attempts."""
    monkeypatch.setattr(stop, "LOOK_S", 0.01)
    over(folder, "killed")
    held = presence.attend(folder)
    assert presence.attend(folder) is None
    out = said(capsys, "status", "mine")
    assert f"its launcher (process {os.getpid()} on " in out
    assert "make pretrain" not in out

    def obey():
        while requests.read_request(folder) is None:
            time.sleep(0.01)
        assert SupervisorLog(folder).stop_is_asked()
        held.close()

    launcher = threading.Thread(target=obey)
    launcher.start()
    out = said(capsys, "stop", "mine")
    launcher.join()
    assert out.endswith("stopped between two attempts\n")


def test_goodput_tells_where_the_time_of_a_run_without_a_step_went(folder, capsys):
    (folder / "metrics.jsonl").unlink()
    over(folder, "failed", last_step=0)
    out = said(capsys, "goodput", "mine")
    assert re.search(r"start +3\.0 ", out)
    assert re.search(r"detect +1\.0 ", out)
    assert "no step is on record yet: nothing to compute an interval from" in out


@pytest.mark.parametrize("command", ["status", "events", "goodput"])
@pytest.mark.parametrize("line", [b'{"time": ', b"[1]", b"\0\0\0", b'{"kind": "x"}', b"\xff"])
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_damaged_line_is_named_and_no_traceback(folder, capsys, command, line, name):
    over(folder, "killed")
    with open(folder / name, "ab") as file:
        file.write(line + b"\n")
    assert COMMANDS[command].main(["mine"]) == 0
    assert f"warning: {name}: a line is damaged and left out" in capsys.readouterr().out


def test_a_run_of_another_host_lives_by_its_sign(folder):
    seen = dict(phase="step", step=2, unix_s=time.time(), host="elsewhere", pid=7)
    (folder / presence.SHOWN).write_text(json.dumps(seen))
    assert presence.is_living(folder)
    (folder / presence.SHOWN).write_text(json.dumps(seen | {"unix_s": time.time() - 3600}))
    assert not presence.is_living(folder)
    (folder / presence.SHOWN).write_text("torn")
    assert presence.shown(folder) == {}
    (folder / presence.SHOWN).write_text(json.dumps(seen | {"unix_s": "noon"}))
    assert presence.shown(folder) == {}


def segment_line(number: int, parent: dict | None, first_step: int, **more) -> dict:
    return {"kind": "segment", "segment": number, "parent": parent, "first_step": first_step,
            "data_step": first_step - 1, "skips": []} | more  # fmt: skip


def test_status_right_after_a_rewind_shows_the_step_it_went_back_to(folder, capsys):
    over(folder, "finished", last_step=2)
    history.append(folder, segment_line(0, None, 1))
    history.append(folder, segment_line(1, {"segment": 0, "step": 1}, 2, why="spike"))
    out = said(capsys, "status", "mine")
    assert "since then it was rewound to step 1: spike; it goes on with step 2, in segment 1" in out
    assert "step 1 of 50  loss 3.5000" in out
    assert "step 2 of 50" not in out
    assert "nothing is left to train" not in out
    assert "make pretrain RECIPE=runs/mine/recipe.yaml" in out
    assert run_status.status_of(folder).word == "rewound"


def test_status_of_a_run_that_reached_stop_after_says_how_to_go_on(folder, capsys):
    record_event(folder, "began", attempt=1, after_step=0, world=2, last_step=2, total_steps=50)
    record_event(folder, "finished", attempt=1, step=2, is_saved=True)
    over(folder, "finished")
    saved = dataclasses.replace(run_status.status_of(folder), saved=(2, time.time()))
    out = "\n".join(status.describe(saved))
    assert "stop_after=2 is reached, 50 steps are planned" in out
    assert 'NPROC=2 OVERRIDES="stop_after=null resume=auto"' in out
    assert "nothing is left to train" not in out
    assert saved.word == "stopped"


def test_a_run_that_was_finished_and_rewound_is_not_finished_where_stop_after_ends_it(folder):
    """The last step was reached once, in a segment that was abandoned since."""
    for attempt, last in ((1, 50), (2, 20)):
        facts = {"after_step": 0, "last_step": last, "total_steps": 50, "segment": attempt - 1}
        record_event(folder, "began", attempt=attempt, **facts)
        record_event(folder, "finished", attempt=attempt, step=last, is_saved=True)
        over(folder, "finished", attempt=attempt)
    seen = dataclasses.replace(run_status.status_of(folder), saved=(20, time.time()))
    assert (seen.is_complete, seen.word) == (False, "stopped")
    assert "stop_after=20 is reached, 50 steps are planned" in status.next_command(seen)[0]


def test_status_counts_steps_of_a_recipe_in_tokens_as_the_attempt_resolved_them(folder, capsys):
    (folder / "recipe.yaml").write_text("run: mine\ntokens: 1e6\n")
    record_event(folder, "began", attempt=1, after_step=0, world=2, last_step=40, total_steps=40)
    assert "step 2 of 40" in said(capsys, "status", "mine")


def test_status_of_a_living_run_says_what_a_kill_would_lose(folder, held):
    state = run_status.status_of(folder)
    assert "no checkpoint yet; a kill now would lose all 2 steps" in "\n".join(
        status.describe(state)
    )
    saved = dataclasses.replace(state, saved=(1, time.time()))
    assert "a kill now would lose 1 step, 0 s of training" in "\n".join(status.describe(saved))


def test_a_validation_loss_names_its_step_and_a_branch_counts_its_own_attempts(folder, capsys):
    (folder / "events.jsonl").unlink()
    history.append(folder, segment_line(0, None, 1))
    parent = {"run": "old", "segment": 0, "step": 2}
    history.append(folder, segment_line(1, parent, 3))
    out = said(capsys, "status", "mine")
    assert "it is a branch of old from step 2" in out
    assert "attempts: 0" in out
    with open(folder / "metrics.jsonl", "a") as file:
        line = dict(
            step=3, segment=1, attempt=4, loss=1.5, grad_norm=0.5, step_s=0.5, data_s=0.0,
            val_loss=2,
            eval_s=0.0, tokens_per_s=1024.0, first_of_attempt=True, skipped=False, targets=9,
        )  # fmt: skip
        for step in (3, 4):
            file.write(json.dumps(line | {"step": step} | ({"val_loss": None} if step > 3 else {})))
            file.write("\n")
    record_event(folder, "began", attempt=4, after_step=2, world=2, segment=1)
    out = said(capsys, "status", "mine")
    assert "step 4 of 50  loss 1.5000  val 2.0000 (step 3)" in out
    assert "attempts: 1, failures: 0" in out


def test_status_shows_the_reason_of_the_newest_failure(folder, capsys):
    error = {"type": "ValueError", "text": "a shape", "place": "model/loss.py:9 in f",
             "phase": "step", "step": 3}  # fmt: skip
    over(folder, "failed", phase="step", why="ValueError: a shape, at model/loss.py:9 in f",
         error=error)  # fmt: skip
    out = said(capsys, "status", "mine")
    assert (
        "newest failure: attempt 1, rank 1 of node2 in phase step of step 3: ValueError: a shape,"
        " at model/loss.py:9 in f"
    ) in out


def test_status_without_a_run_shows_the_newest_and_runs_shows_all(folder, capsys):
    old = folder.with_name("old")
    shutil.copytree(folder, old)
    (old / "recipe.yaml").write_text("steps: 50\n")
    for path in old.iterdir():
        os.utime(path, (1e9, 1e9))
    over(folder, "finished")
    out = said(capsys, "status")
    assert "the newest of 2 runs (make runs lists them):" in out
    assert "mine does not run" in out
    assert runs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "state", "step", "loss"]
    assert [line.split()[0] for line in lines[1:]] == ["old", "mine"]
    assert "2/50" in lines[1]


def test_runs_shows_the_others_where_one_cannot_be_read(folder, capsys):
    history.append(folder, segment_line(0, None, 1))
    shutil.copytree(folder, folder.with_name("torn"))
    text = (folder.with_name("torn") / "history.jsonl").read_text()
    (folder.with_name("torn") / "history.jsonl").write_text(text.replace("first", "FIRST"))
    (folder.with_name("odd") / "recipe.yaml").mkdir(parents=True)
    assert runs.main([]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mine +killed +2/50 ", out, re.M)
    assert "torn cannot be read: " in out
    assert "odd" not in out


def test_status_and_runs_without_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert status.main([]) == 93
    assert "make pretrain starts one" in capsys.readouterr().err
    assert runs.main([]) == 0
    assert "no run under runs/ yet" in capsys.readouterr().out
