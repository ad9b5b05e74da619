"""launch/ranks/outcome.py: one exit status out of many, and whose error is shown."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys

import pytest

from launch.ranks.outcome import cause_of, exit_status, explain, first_failure, last_words
from launch.ranks.ranks import start_ranks
from launch.ranks.run_logs import RunLogs
from launch.ranks.start import end_of
from recipes.schema import Watch
from record.attempts import RankEnd

TRACEBACK = ("noise", "Traceback (most recent call last):", '  File "x"', "ValueError: broken")


def test_all_ranks_well_is_0():
    assert exit_status([RankEnd(0, 0, 1.0), RankEnd(1, 0, 2.0)]) == 0


def test_a_refusal_is_93_although_the_others_lost_their_connection_first():
    ends = [RankEnd(0, 1, 1.0), RankEnd(1, 93, 1.5), RankEnd(2, -9, 6.0, was_stopped=True)]
    assert exit_status(ends) == 93


def test_a_worker_that_ends_with_3_gives_3():
    assert exit_status([RankEnd(1, 3, 1.0), RankEnd(0, 1, 1.2)]) == 3


def test_a_killed_rank_is_the_cause_although_its_news_came_later():
    ends = [RankEnd(0, 1, 1.0), RankEnd(1, -9, 1.1)]
    assert first_failure(ends).rank == 1
    assert exit_status(ends) == 137
    assert exit_status([RankEnd(0, 93, 1.0), RankEnd(1, -9, 1.1)]) == 137


def test_requeue_counts_where_every_rank_asked_for_it_or_was_finished():
    assert exit_status([RankEnd(0, 75, 1.0), RankEnd(1, 75, 1.0)]) == 75
    assert exit_status([RankEnd(0, 75, 1.0), RankEnd(1, 1, 1.0)]) != 75


def test_ctrl_c_for_a_rank_alone_stops_the_run_and_is_no_failure():
    for ends in (
        [RankEnd(0, 130, 1.0), RankEnd(1, 130, 1.0)],
        [RankEnd(1, 130, 1.0), RankEnd(0, 1, 1.2)],  # before the first step: the others lose it
    ):
        assert (exit_status(ends), cause_of(ends)) == (130, "stopped")
    for worse in (RankEnd(0, 93, 1.2), RankEnd(0, -9, 1.2, hung="hung")):
        assert cause_of([RankEnd(1, 130, 1.0), worse]) in ("refused", "hung")


def test_a_stop_on_request_tells_by_which_signal_unless_all_ended_well():
    ends = [RankEnd(0, -2, 1.0, was_stopped=True), RankEnd(1, 130, 1.0)]
    assert exit_status(ends, signal.SIGINT) == 130
    assert exit_status([RankEnd(0, -15, 1.0)], signal.SIGTERM) == 143
    assert exit_status([RankEnd(0, 0, 1.0)], signal.SIGTERM) == 0


def test_the_first_failure_is_named_with_host_log_and_its_own_words():
    ends = [
        RankEnd(2, 1, 7.0, host="node2", last=TRACEBACK, log="runs/x/logs/rank-00002.log"),
        RankEnd(
            0, 1, 7.5, last=("Traceback (most recent call last):", "Connection closed by peer")
        ),
    ]
    told = explain(ends, 4)
    assert told[0] == (
        "failed: rank 2 of 4 on node2 ended with exit status 1 after 7 s, first of all; its log:"
        " runs/x/logs/rank-00002.log"
    )
    assert told[1:] == [
        "  | Traceback (most recent call last):",
        '  |   File "x"',
        "  | ValueError: broken",
    ]


def test_a_refusal_needs_no_frame():
    ends = [RankEnd(1, 93, 1.0, last=("warning: x", "refused: rank 1: shard.bin is damaged"))]
    assert explain(ends, 2) == ["refused: rank 1: shard.bin is damaged"]


def test_where_all_refuse_alike_the_one_that_says_why_is_shown():
    ends = [RankEnd(1, 93, 1.0), RankEnd(0, 93, 1.1, last=("refused: zero=4",))]
    assert explain(ends, 2) == ["refused: zero=4"]


def test_a_kill_is_told_with_its_likely_cause():
    assert "SIGKILL (out of memory?" in explain([RankEnd(0, -9, 3.0)], 2)[0]


def test_without_a_traceback_the_last_lines_are_shown():
    assert last_words(("a", "", "b")) == ["a", "b"]


def test_a_rank_that_said_nothing_and_was_killed_has_a_log_to_be_named(tmp_path):
    silent = "import os; open('recipe.yaml', 'w').close(); os.kill(os.getpid(), 9)"
    logs = RunLogs(tmp_path)
    logs.write("rank-00000.log", b"before the folder came\n")
    ranks = start_ranks([sys.executable, "-c", silent], [{"RANK": "0"}], tmp_path, logs=logs)
    [end] = ranks.wait()
    assert end.status == -9
    assert end.log == str(tmp_path / "logs" / "rank-00000.log")


def test_the_end_of_a_rank_that_never_said_a_word_is_heard(tmp_path):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    ranks = start_ranks(command, [{"RANK": "0"}], tmp_path, logs=RunLogs(tmp_path))
    [end] = ranks.wait()
    assert (end.status, end.log) == (-9, None)


def test_of_two_hosts_that_fall_silent_the_one_whose_rank_does_not_wait_is_to_blame():
    waiting = RankEnd(0, -9, 100.0, host="a", hung="hung in phase step of step 7", only_waits=True)
    stuck = RankEnd(5, -9, 102.0, host="b", hung="hung in phase step of step 7; it is in spin",
                stack=('File "x.py", line 3 in spin',))  # fmt: skip
    others = [RankEnd(1, 1, 101.0, host="a"), RankEnd(4, -9, 102.0, host="b", was_stopped=True)]
    ends = [waiting, *others, stuck]
    assert first_failure(ends) == stuck
    assert (exit_status(ends), cause_of(ends)) == (137, "hung")
    told = explain(ends, 8)
    assert told[0].startswith(
        "failed: rank 5 of 8 on b hung in phase step of step 7; it is in spin"
    )
    assert told[1] == '  | File "x.py", line 3 in spin'


def test_an_end_arrives_from_another_host_as_it_was():
    words = {"phase": "save", "step": 7, "hung": "hung", "silent_s": 4.0, "stack": ("y",)}
    end = RankEnd(5, -9, 2.0, host="b", last=("x",), only_waits=True, **words)
    said = json.loads(json.dumps({"node": 1, "kind": "end", "end": dataclasses.asdict(end)}))
    assert end_of(said, "b", 4, 2.0) == end
    limits = Watch(step_s=7)
    assert Watch(**json.loads(json.dumps(dataclasses.asdict(limits)))) == limits


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_description_of_an_end_leaves_no_launcher_waiting(tmp_path, monkeypatch):
    """The thread that follows a rank dies of it; the end must be counted all the same."""
    monkeypatch.setattr("launch.ranks.ranks.failure_in", lambda last: 1 / 0)
    code = "import sys; sys.exit(3)"
    ranks = start_ranks([sys.executable, "-c", code], [{"RANK": "0"}], tmp_path)
    (end,) = ranks.wait()
    assert (end.rank, end.status) == (0, 3)
