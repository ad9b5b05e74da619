"""runtime/log/long_step.py: a step that takes long shows where it is."""

from __future__ import annotations

import contextlib
import io
import re
import time

import pytest
from ranks import PATIENCE

from record.heartbeat import Doing, Heart
from runtime.log import long_step
from runtime.log.console import Console
from runtime.log.long_step import LongStep, looker, text_of


def doing(step_s: float, step: int = 13, part: str = "compute", phase: str = "step") -> Doing:
    return Doing(phase, step, part, 3, 8, step_s)


def test_in_a_pipe_a_long_step_is_shown_after_ten_seconds_and_each_time_the_wait_doubled():
    out = io.StringIO()
    look = looker(Console("tiny", 400, stream=out), 400)
    for second in range(45):
        look(doing(float(second)))
    assert re.findall(r": (\d+) s so far", out.getvalue()) == ["10", "20", "40"]
    look(doing(3.0, step=14))  # the next step begins anew
    look(doing(12.0, step=14))
    assert out.getvalue().count("step 14/400: 12 s so far") == 1


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (doing(10), "step 13/400: 10 s so far, in forward and backward, micro-batch 3 of 8"),
        (doing(75, part="data"), "step 13/400: 1 min 15 s so far, waiting for the batch"),
        (doing(10, part="eval", phase="evaluate"), "step 13/400: 10 s so far, in the evaluation"),
        (doing(10, part="save", phase="save"), "step 13/400: 10 s so far, in the save"),
        (doing(10, part=""), "step 13/400: 10 s so far, between two parts of the step"),
        (doing(10, part="", phase="end"), "after step 13/400: 10 s so far, ending"),
    ],
)
def test_the_text_names_the_part_of_the_step(seen, text):
    assert text_of(seen, 400) == text


def test_before_the_first_step_nothing_is_shown():
    out = io.StringIO()
    look = looker(Console("tiny", 400, stream=out), 400)
    look(doing(100.0, step=0, phase="start"))
    look(doing(100.0, step=5, phase="load"))
    assert out.getvalue() == ""


def test_a_thread_shows_a_step_that_stands_and_ends_with_the_record(monkeypatch):
    monkeypatch.setattr(long_step, "LOOK_S", 0.02)
    clock = [0.0]
    heart, out = Heart(now=lambda: clock[0]), io.StringIO()
    heart.beat("step", 4, 2)
    heart.at_micro_batch(2)
    watch = LongStep(Console("tiny", 9, stream=out), heart, 9)
    watch.start()
    with heart.around(lambda name: contextlib.nullcontext())("compute"):
        clock[0] = 11.0
        deadline = time.monotonic() + 60 * PATIENCE
        while "so far" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    watch.close()
    watch.close()
    assert out.getvalue() == (
        "step 4/9: 11 s so far, in forward and backward, micro-batch 2 of 2\n"
    )
    assert heart.doing().part == ""
