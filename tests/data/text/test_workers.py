"""Processes that work on tasks: which failure is told, what is broken off, what a killed worker
means.
"""

import os
import signal
import time

import pytest
from ranks import PATIENCE

from base.errors import UserError
from data.text.workers import run_tasks


def act(task, _, advance):
    kind, value = task
    if kind == "sleep":
        time.sleep(value)
    elif kind == "fail":
        raise UserError(f"task {value} failed")
    elif kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    advance(1)
    return value


def run(tasks, workers):
    done = {}
    run_tasks(
        act,
        tasks,
        workers,
        title="test",
        total_bytes=len(tasks),
        on_done=lambda number, value: done.update({number: value}),
    )
    return done


@pytest.mark.parametrize("workers", [1, 2])
def test_the_failure_of_the_first_task_in_order_is_told_and_later_ones_are_broken_off(workers):
    assert run([("give", i) for i in range(5)], workers) == {i: i for i in range(5)}
    tasks = [("sleep", 1.5), ("fail", 1), ("sleep", 10**6), ("fail", 3)]
    start = time.monotonic()
    with pytest.raises(UserError, match="task 1 failed"):
        run(tasks, workers)
    tasks = [("fail", 0), ("sleep", 10**6)]
    with pytest.raises(UserError, match="task 0 failed"):
        run(tasks, workers)
    assert time.monotonic() - start < 120 * PATIENCE
    assert run([], workers) == {}


def test_a_killed_worker_is_told_with_the_way_out():
    with pytest.raises(UserError, match=r"a worker process was killed, .*WORKERS=2.* fewer"):
        run([("give", 0), ("die", 1), ("give", 2)], 2)
