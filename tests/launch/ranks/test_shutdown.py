"""launch/ranks/shutdown.py: which signal is due when, on a clock that the test moves."""

from __future__ import annotations

import signal

from launch.ranks.shutdown import AGAIN_S, OTHERS_S, UNENDING_S, Shutdown, patience_s
from record.attempts import RankEnd


def test_nothing_is_due_while_ranks_run():
    shutdown = Shutdown()
    assert shutdown.asked_now() is None
    assert not shutdown.is_kill_due(1e6)
    assert not shutdown.is_in_vain(1e6)


def test_a_request_is_sent_once_and_kills_after_the_grace_time_every_second():
    shutdown = Shutdown()
    shutdown.ask(signal.SIGINT, 10.0)
    assert (shutdown.asked_now(), shutdown.asked_now()) == (signal.SIGINT, None)
    shutdown.grant(30.0, 10.0)
    due = [now for now in range(10, 44) if shutdown.is_kill_due(now)]
    assert due == [40, 41, 42, 43]
    assert not shutdown.is_in_vain(40 + UNENDING_S)
    assert shutdown.is_in_vain(41 + UNENDING_S)


def test_the_same_request_may_come_twice_and_a_later_one_kills():
    shutdown = Shutdown()
    shutdown.ask(signal.SIGTERM, 10.0)
    shutdown.ask(signal.SIGTERM, 10.0 + AGAIN_S)
    assert not shutdown.is_kill_due(11.0)
    shutdown.ask(signal.SIGTERM, 10.1 + AGAIN_S)
    assert shutdown.is_killed
    assert shutdown.is_kill_due(10.1 + AGAIN_S)


def test_others_may_report_a_failure_and_a_clear_one_leaves_them_less():
    unclear, killed = RankEnd(0, 1, 5.0), RankEnd(0, -9, 5.0)
    assert patience_s(killed) < patience_s(unclear) == OTHERS_S
    shutdown = Shutdown()
    shutdown.failed(unclear, 5.0)
    shutdown.failed(unclear, 9.0)  # later looks do not prolong it
    assert [now for now in (9.9, 10.0) if shutdown.is_kill_due(now)] == [10.0]


def test_a_kill_needs_no_request_before_it():
    shutdown = Shutdown()
    shutdown.kill()
    assert shutdown.asked_now() == signal.SIGTERM
    assert shutdown.is_kill_due(0.0)
