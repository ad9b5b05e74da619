"""launch.ranks.inquiry: of several hosts that fall silent the right one is named, whoever spoke
first.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from ranks import PATIENCE, ROOT

from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import Host
from launch.hosts.preflight import StartPlan
from launch.ranks import inquiry
from launch.ranks.outcome import cause_of, exit_status, explain, first_failure
from launch.ranks.screen import Screen
from launch.ranks.start import catch_signals, live_across, order_of
from launch.ranks.watchdog import Hung, waits
from recipes.schema import Watch
from record.heartbeat import Beat

# The names of this machine are two hosts; rank 1 is on the second.
HOSTS = [Host("localhost", 1), Host("127.0.0.1", 1)]
# Rank 0, which waits in a step, falls silent by its limit; rank 1, which loads, has none.
LIMITS = Watch(start_s=round(60 * PATIENCE), load_s=0, step_s=math.ceil(PATIENCE))


def live(folder, how: str):
    """The ends of two ranks on two hosts, of which rank 1 hangs."""
    folder.mkdir()
    plans = [{"name": h.name, "address": "127.0.0.1", "interface": None} for h in HOSTS]
    plan = StartPlan(29_123, [host | {"devices": None} for host in plans], [])
    words = ["tests/workers/hang_worker.py", "load", how, "step"]
    marked = {"MARK": str(folder / "recipe.yaml")}
    order = order_of(plan, words, 1, marked, str(folder), lost_s=600, limits=LIMITS)
    with catch_signals() as stop_signals:
        return live_across(AgentCluster(HOSTS, ROOT), order, Screen(2), stop_signals).ends


def test_the_rank_that_stands_still_is_named_though_only_the_others_limit_has_passed(tmp_path):
    ends = live(tmp_path / "run", "stop")
    assert (exit_status(ends), cause_of(ends)) == (137, "hung")
    [blamed] = [end for end in ends if end.hung]
    assert (blamed.rank, blamed.host, blamed.phase) == (1, "127.0.0.1", "load")
    assert first_failure(ends) == blamed
    assert "others waited beyond their limit" in blamed.hung
    assert "it is stopped (SIGSTOP)" in explain(ends, 2)[0]
    assert [end.was_stopped for end in ends if end.rank == 0] == [True]
    logs = [(tmp_path / "run" / "logs" / f"rank-0000{rank}.log").read_text() for rank in range(2)]
    assert all(f"== rank 1 {blamed.hung}; the stacks of this rank:" in log for log in logs)
    assert "torch/distributed" in logs[0]
    assert "it is stopped (SIGSTOP) and cannot write its stack" in logs[1]


def test_a_host_that_does_not_answer_while_all_others_wait_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(inquiry, "ANSWER_S", 4.0)  # below VERDICT_S of the agents
    ends = live(tmp_path / "run", "freeze")
    assert cause_of(ends) == "lost_host"
    first = first_failure(ends)
    assert (first.rank, first.host) == (1, "127.0.0.1")
    assert "the ranks of all others wait, and it does not answer" in first.last[0]
    assert [end.was_stopped for end in ends if end.rank == 0] == [True]


class FakeTask:
    """An `AgentTask` of two hosts that only remembers what it told."""

    def __init__(self, unheard_s: dict[int, float]):
        self.sent, self.silent = [], unheard_s

    def send(self, message):
        self.sent.append(message)

    def unheard_s(self):
        return self.silent


def test_nobody_is_blamed_before_everybody_has_been_heard(monkeypatch):
    monkeypatch.setattr(inquiry, "ANSWER_S", 0.0)
    waits = Hung(0, Beat("step", 7, 1.0, 1), 9.0, 5.0, only_waits=True, order=(True, True, True))
    spins = Hung(1, Beat("step", 7, 1.0, 1), 3.0, 60.0, order=(True, True, False))
    said = [json.loads(json.dumps(asdict(hung))) for hung in (waits, spins)]
    silence = {"node": 0, "kind": "suspect", "hung": None}
    answers = [{"node": node, "kind": "suspect", "hung": hung} for node, hung in enumerate(said)]
    line = {"node": 1, "kind": "line"}

    work = FakeTask({0: 0.0, 1: 0.0})
    assert list(inquiry.Inquiry(work).during([silence, line])) == [line]
    assert work.sent == [{"look": True}]

    monkeypatch.setattr(inquiry, "ANSWER_S", 60.0)
    work = FakeTask({0: 0.0, 1: 0.0})
    list(inquiry.Inquiry(work).during([silence, answers[0], None, answers[1], None]))
    assert [Hung.of(word["hung"]) for word in work.sent[1:]] == [spins]

    # What failed meanwhile is what the others wait for.
    for failed in (
        {"node": 1, "kind": "lost"},
        {"node": 1, "kind": "end", "end": {"status": 1, "was_stopped": False}},
    ):
        work = FakeTask({0: 0.0})
        list(inquiry.Inquiry(work).during([silence, failed, answers[0], None]))
        assert work.sent == [{"look": True}]

    # A host that has ended is waited for no more, nor one that is there but slow, beyond the time.
    for unheard_s, answer_s in (({0: 0.0}, 60.0), ({0: 0.0, 1: -1.0}, 0.0)):
        monkeypatch.setattr(inquiry, "ANSWER_S", answer_s)
        work = FakeTask(unheard_s)
        list(inquiry.Inquiry(work).during([silence, answers[0], None]))
        assert [Hung.of(word["hung"]) for word in work.sent[1:]] == [waits]


def test_a_wait_in_c_is_known_by_the_frame_around_it():
    assert waits(
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/runtime/monitor/own_time.py", line 9 in heard'
    )
