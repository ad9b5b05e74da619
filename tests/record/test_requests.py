"""record/requests.py: requests to end a run, on which all ranks agree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import PATIENCE, ROOT, environment

from launch.ranks.outcome import cause_of, exit_status
from launch.ranks.start import StopSignals
from record import requests
from record.attempts import RankEnd
from record.requests import AskedEarly, Requests, ask, forget, read_request


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def clock(monkeypatch):
    """A time that tests move; leaving the process raises Left."""

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    return [100.0]


def training(clock, folder=None) -> Requests:
    """Requests of a rank that trains alone."""
    made = Requests(lambda: clock[0])
    made._is_training, made._request = True, folder and folder / requests.REQUEST
    return made


@pytest.mark.parametrize(
    ("number", "cause", "status"),
    [
        (signal.SIGTERM, "preempted", 75),
        (signal.SIGUSR1, "preempted", 75),
        (signal.SIGHUP, "preempted", 75),
        (signal.SIGINT, "interrupted", 130),
    ],
)
def test_a_signal_waits_for_the_end_of_the_step(clock, number, cause, status):
    rank = training(clock)
    rank.send()
    assert rank.answer() is None
    rank._hear(number, None)
    rank.send()
    assert (rank.answer().cause, rank.answer().status) == (cause, status)


@pytest.mark.parametrize("entry", ["pretrain.py", "commands/pretrain.py"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_during_the_imports_ends_the_entry_quietly(tmp_path, entry, number, status):
    """Whoever started it, and nothing is left: neither a traceback nor a folder."""
    module = entry.removesuffix(".py").replace("/", ".")
    process = subprocess.Popen(
        [sys.executable, "-m", module, "recipe=tiny", "run=early"],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    is_listening = False
    while process.poll() is None and not is_listening:
        time.sleep(0.01)
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        is_listening = bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60 * PATIENCE)
    assert process.returncode == status, output
    assert output.startswith("interrupted")
    assert output.count("\n") == 1
    assert not (ROOT / "runs" / "early").exists()


def test_before_training_a_signal_ends_the_rank_where_it_is(clock):
    rank = Requests(lambda: clock[0])
    with pytest.raises(AskedEarly) as early:
        rank._hear(signal.SIGTERM, None)
    assert early.value.ending.status == 75
    assert isinstance(early.value, KeyboardInterrupt)  # what clears up after Ctrl-C does so here


def test_one_request_that_comes_twice_is_one_and_a_second_one_ends_at_once(clock):
    """To the whole process group and through the launcher: a moment apart."""
    rank = training(clock)
    rank._hear(signal.SIGTERM, None)
    clock[0] += 1
    rank._hear(signal.SIGTERM, None)
    clock[0] += 5
    with pytest.raises(Left, match="143"):
        rank._hear(signal.SIGTERM, None)


def test_ctrl_c_twice_ends_at_once(clock):
    rank = training(clock)
    rank._hear(signal.SIGINT, None)
    with pytest.raises(Left, match="130"):
        rank._hear(signal.SIGINT, None)


def test_the_launcher_takes_signals_a_moment_apart_for_one_as_well(monkeypatch):
    now, calls = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    asked = StopSignals()
    asked.then(calls.append, lambda: calls.append("kill"))
    asked(signal.SIGTERM, None)
    asked(signal.SIGTERM, None)
    assert calls == [signal.SIGTERM]
    now[0] += 5
    asked(signal.SIGTERM, None)
    assert calls == [signal.SIGTERM, "kill"]


def test_a_stop_request_is_looked_for_once_a_second(tmp_path, clock):
    rank = training(clock, tmp_path)
    rank.send()
    ask(tmp_path, now=False, who="me@here")
    rank.send()
    assert rank.answer() is None  # looked for a moment ago
    clock[0] += 1.5
    rank.send()
    assert (rank.answer().cause, rank.answer().status, rank.answer().saves) == ("stopped", 0, True)
    rank.done()
    assert read_request(tmp_path) is None


def test_a_stop_request_may_ask_for_no_save_and_preemption_is_stronger(tmp_path, clock):
    ask(tmp_path, now=True, who="me@here")
    rank = training(clock, tmp_path)
    rank.send()
    assert not rank.answer().saves
    rank._hear(signal.SIGUSR1, None)
    assert rank.answer().cause == "preempted"


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"now": false}'])
def test_an_unreadable_request_asks_for_a_save(tmp_path, text, clock):
    (tmp_path / requests.REQUEST).write_text(text)
    rank = training(clock, tmp_path)
    rank.send()
    assert rank.answer().saves
    forget(tmp_path)
    forget(tmp_path)  # harmless


def test_what_a_caller_ignores_stays_ignored():
    before = {number: signal.getsignal(number) for number in requests.SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        Requests().listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_one_rank_that_is_preempted_at_start_takes_the_others_along_as_preempted():
    """The others lose their connection, and are killed."""
    ends = [RankEnd(1, 75, 3.0), RankEnd(0, 1, 3.4), RankEnd(2, -9, 8.0, was_stopped=True)]
    assert (exit_status(ends), cause_of(ends)) == (75, "preempted")


def test_a_failure_before_a_preemption_stays_a_failure():
    assert exit_status([RankEnd(0, 1, 3.0), RankEnd(1, 75, 3.4)]) == 1


def test_ranks_that_die_of_the_signal_before_they_can_hear_it_are_preempted():
    """While they import torch."""
    ends = [
        RankEnd(0, -15, 1.0, was_stopped=True, phase="start"),
        RankEnd(1, 75, 1.2, phase="start"),
    ]
    assert exit_status(ends, signal.SIGTERM) == 75
    trained = [RankEnd(0, -9, 1.0, was_stopped=True, phase="step", step=7)]
    assert exit_status(trained, signal.SIGTERM) == 143
    assert exit_status(ends, signal.SIGINT) == 130


ACKNOWLEDGED = """
import ctypes, os, signal, sys, threading, time
import torch.distributed as dist
from record.requests import Requests
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
requests = Requests()
requests.listen()
requests.begin(__import__("pathlib").Path(sys.argv[1]), 60)
print("ready", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in C: no handler runs
ctypes.CDLL(None).usleep(4_000_000)
print("woke", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
assert requests.now().cause == "preempted"
print("asked", flush=True)
"""


def test_a_signal_is_acknowledged_at_once_also_within_a_long_step(tmp_path):
    """The line comes while the main thread is in C code, long before the step ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", ACKNOWLEDGED, str(tmp_path)],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith("ready"):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, lines
    heard = next(n for n, line in enumerate(lines) if line.startswith("SIGTERM: ending after this"))
    assert lines.index("ready") < heard < lines.index("woke") < lines.index("asked"), lines


def test_the_launcher_acknowledges_a_signal_while_ranks_live(capfd):
    stop_signals = StopSignals()
    stop_signals(signal.SIGTERM, None)
    assert capfd.readouterr().err == ""  # nothing runs yet
    stop_signals = StopSignals()
    asked = []
    stop_signals.then(asked.append, lambda: asked.append("kill"))
    stop_signals(signal.SIGTERM, None)
    assert asked == [signal.SIGTERM]
    assert "SIGTERM: ending after this step, with a save" in capfd.readouterr().err


def test_the_clock_of_rank_0_says_when_a_save_is_due_beside_any_request(tmp_path, clock):
    first, other = training(clock, tmp_path), training(clock)
    first.send(is_save_due=True)
    assert (first.answer(), first.is_save_due) == (None, True)
    first.send()
    assert (first.answer(), first.is_save_due) == (None, False)
    first._hear(signal.SIGTERM, None)
    first.send(is_save_due=True)
    assert (first.answer().cause, first.is_save_due) == ("preempted", True)
    other.send(is_save_due=True)
    assert (other.answer(), other.is_save_due) == (None, False)
