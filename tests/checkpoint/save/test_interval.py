"""Young's interval: the formula, its bounds, the same answer on every rank and after a resume."""

from __future__ import annotations

import json

import pytest

from base.errors import UserError
from checkpoint.save import interval
from checkpoint.save.interval import (
    FIRST_STEPS,
    REMEMBERED,
    Cost,
    Pace,
    Timer,
    is_due,
    limit_s,
    risk,
    young_steps,
)
from recipes.compose import compose

HOUR = 3600.0


def lost_share(interval_s: float, mtbf_s: float, stall_s: float) -> float:
    """What stalls and repeated work take, to first order: stall / T + T / (2 MTBF)."""
    return stall_s / interval_s + interval_s / (2 * mtbf_s)


def test_the_final_step_is_saved_once_whatever_the_interval():
    for every, expected in ((3, [3, 6, 7]), (7, [7]), (10, [7]), (0, [7])):
        assert [step for step in range(1, 8) if is_due(step, every, last_step=7)] == expected


@pytest.mark.parametrize(("mtbf_h", "stall_s"), [(2.8, 1.0), (2.8, 60.0), (100.0, 5.0)])
def test_no_other_interval_loses_less(mtbf_h, stall_s):
    steps = young_steps(mtbf_h * HOUR, stall_s, save_s=stall_s, step_s=0.5)
    best = lost_share(steps * 0.5, mtbf_h * HOUR, stall_s)
    for other in (0.5, 0.8, 1.25, 2.0):
        assert lost_share(other * steps * 0.5, mtbf_h * HOUR, stall_s) > best
    assert steps * 0.5 == pytest.approx((2 * mtbf_h * HOUR * stall_s) ** 0.5, rel=0.01)


def test_the_interval_stays_within_bounds():
    assert young_steps(HOUR, stall_s=1e-6, save_s=40.0, step_s=2.0) == 20  # as long as a save takes
    assert young_steps(10.0, stall_s=1000.0, save_s=1000.0, step_s=1.0) == 10  # the next failure
    assert young_steps(HOUR, stall_s=1.0, save_s=1.0, step_s=1e6) == 1  # a step at least


def measured(stall_s=2.0, save_s=3.0, step_s=1.0):
    return [Cost(stall_s, save_s, step_s)]


def test_the_median_of_the_slowest_ranks_counts_and_small_changes_do_not():
    pace = Pace(mtbf_s=HOUR)
    assert not pace.decide(10, [Cost(None, None, 1.0)] * 3)
    assert pace.next == 10 + FIRST_STEPS
    costs = [Cost(0.5, 3.0, 0.9), Cost(2.0, 2.5, 0.8), Cost(1.0, 3.0, 1.0)]
    assert pace.decide(20, costs)
    assert pace.interval == young_steps(HOUR, 2.0, 3.0, 1.0) == 120
    assert pace.next == 140
    assert not pace.decide(140, measured(stall_s=200.0))  # one of two
    assert pace.decide(260, measured()) is False
    assert pace.interval == 120
    for number in range(20):
        pace.decide(400 + number, measured(stall_s=32.0))
    assert pace.interval == 480
    assert len(pace.stalls_s) == REMEMBERED


def test_a_run_that_goes_on_saves_next_where_the_other_would_have():
    straight = Pace(mtbf_s=HOUR)
    for step in (10, 20):
        straight.decide(step, measured())
    stored = json.loads(json.dumps(straight.as_dict()))
    resumed = Pace(mtbf_s=HOUR)
    resumed.go_on(20, stored)
    assert resumed.next == straight.next == 140
    for pace in (straight, resumed):
        pace.decide(140, measured(stall_s=8.0))
    assert resumed.as_dict() == straight.as_dict()
    without = Pace(mtbf_s=HOUR)  # the checkpoint is of a run with a fixed interval
    without.go_on(33, {})
    assert without.next == 33 + FIRST_STEPS


def test_the_first_step_after_a_save_is_not_measured(monkeypatch):
    times = iter([50.0, 54.0])  # the first step, which compiles, ends at 50
    monkeypatch.setattr(interval.time, "perf_counter", lambda: next(times))
    pace = Pace(mtbf_s=HOUR)
    assert pace.step_s() is None
    pace.edge()
    assert pace.step_s() is None
    pace.edge()
    pace.edge()
    assert pace.step_s() == 2.0


def test_a_run_saves_by_time_unless_the_recipe_says_otherwise():
    assert compose("1b").recipe.checkpoint.interval == "auto"
    with pytest.raises(UserError, match="give a number of steps, or auto"):
        compose("tiny", ["checkpoint.interval=often"])
    with pytest.raises(UserError, match="must be from 0"):
        compose("tiny", ["checkpoint.interval=-1"])
    with pytest.raises(UserError, match=r"checkpoint\.minutes=5\.0 has no effect with .*=100"):
        compose("tiny", ["checkpoint.interval=100", "checkpoint.minutes=5"])
    words = ["checkpoint.interval=auto", "cluster.mtbf_hours=2.8"]
    assert compose("tiny", words).recipe.checkpoint.interval == "auto"
    warned = compose("tiny", [*words, "checkpoint.keep_every=100"]).warnings
    assert any("few saves fall on a multiple" in line for line in warned)


def test_at_most_ten_minutes_are_at_risk_where_nothing_is_chosen():
    assert limit_s("auto", None, None) == 600
    assert limit_s("auto", 2.5, None) == limit_s("auto", 2.5, 3.0) == 150
    assert limit_s("auto", None, 3.0) is None  # Young's formula
    assert limit_s(100, None, None) is limit_s(0, None, None) is None
    assert risk("auto", None, None).startswith("about 10 min 00 s of work")
    assert "all work since the start" in risk(0, None, None)
    assert "the work of 40 steps" in risk(40, None, None)
    assert "Young" in risk("auto", None, 2.8)


def test_the_timer_counts_work_since_the_last_save():
    now = 0.0
    timer = Timer(600, lambda: now)
    now = 599.0
    assert not timer.is_over()
    now = 600.0
    assert timer.is_over()
    timer.restart()
    assert not timer.is_over()
    assert not Timer(None, lambda: now).is_over()
