"""record/goodput.py counts every second once; record/forecast.py agrees with injected failures."""

from __future__ import annotations

import datetime
import json
import math
import random
from pathlib import Path

import pytest

from base.jsonl import encode
from commands import events
from commands import goodput as command
from record import forecast, goodput
from record.attempts import Attempt
from record.forecast import Costs
from record.goodput import account, attempts_of, shares

BEGAN_S = 1_700_000_000.0


class Recorded:
    """A run with injected failures, on record as a real one leaves it."""

    def __init__(self, costs: Costs, interval: int, start_s: float, detect_s: float):
        self.costs, self.interval = costs, interval
        self.start_s, self.detect_s = start_s, detect_s
        self.now = BEGAN_S
        self.events, self.lines, self.saved = [], [], 0

    def event(self, kind: str, attempt: int, at: float, **fields) -> None:
        when = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat().replace("+00:00", "Z")
        self.events.append({"time": when, "kind": kind, "attempt": attempt} | fields)

    def live(self, number: int, lasts_s: float, restart_s: float = 0.0) -> None:
        """One attempt that fails after `lasts_s` of its own, counted from the failure before."""
        began = self.now + restart_s
        dies = self.now + lasts_s
        del self.lines[self.saved :]  # as a start does with what it trains again
        now, step = began + self.start_s, self.saved
        seconds = {"restart": restart_s, "start": min(self.start_s, max(0.0, dies - began))}
        if now < dies:
            self.event("began", number, now, after_step=step)
        first = step
        while now + self.costs.step_s <= dies:
            now, step = now + self.costs.step_s, step + 1
            self.lines.append(line(number, step, self.costs.step_s))
            if step % self.interval == 0:
                if now + self.costs.stall_s > dies:
                    break
                now += self.costs.stall_s
                self.saved = step
                self.event("saved", number, now, step=step, checkpoint_stall_s=self.costs.stall_s)
        self.now = max(dies, began) + self.detect_s
        self.event(
            "attempt", number, self.now, cause="killed", from_step=first, last_step=step,
            began_unix_s=began, ended_unix_s=self.now,
            seconds=seconds | {"detect": self.detect_s},
        )  # fmt: skip


def line(attempt: int, step: int, step_s: float, **fields) -> dict:
    """What a step leaves, as far as the account reads it."""
    plain = dict(
        segment=0, data_s=0.0, eval_s=0.0, skipped=False, targets=1, first_of_attempt=False
    )
    return {"attempt": attempt, "step": step, "step_s": step_s} | plain | fields


def test_the_account_of_a_run_with_injected_failures_agrees_with_the_formula():
    """Within two points, for rare and for frequent failures; and it adds up to the second."""
    draw = random.Random(4)
    for mtbf_s, interval in ((3000.0, 60), (600.0, 60), (600.0, 300)):
        costs = Costs(step_s=1.0, stall_s=4.0, restart_s=45.0)
        run = Recorded(costs, interval, start_s=30.0, detect_s=10.0)
        # Exponential times at even quantiles, in random order: little noise of so few failures.
        gaps = [-mtbf_s * math.log(1 - (n + 0.5) / 80) for n in range(80)]
        draw.shuffle(gaps)
        # The detection of one failure is part of the time until training goes on.
        for number, gap_s in enumerate(gaps, start=1):
            run.live(number, max(5.0, gap_s - 10.0), restart_s=5.0)
        total = account(attempts_of(run.events, run.lines, run.now))
        assert sum(total.values()) == pytest.approx(run.now - BEGAN_S - 5.0, abs=0.01)
        useful = shares(total)["useful"]
        assert useful == pytest.approx(forecast.goodput(costs, mtbf_s, interval), abs=0.02)
        assert total["redone"] > 0
        assert total["detect"] == pytest.approx(80 * 10.0)
        assert total["restart"] == pytest.approx(79 * 5.0)
        saves = [event for event in run.events if event["kind"] == "saved"]
        assert total["stall"] == pytest.approx(4.0 * len(saves))
        assert total["idle"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("mtbf_s", [400.0, 3600.0, 10_080.0, 10**6])
@pytest.mark.parametrize("stall_s", [0.0, 1.0, 60.0])
def test_the_simulator_agrees_with_the_formula_within_two_points(mtbf_s, stall_s):
    costs = Costs(step_s=2.0, stall_s=stall_s, restart_s=200.0)
    for interval in (10, 100, forecast.best_interval(costs, mtbf_s)):
        formula = forecast.goodput(costs, mtbf_s, interval)
        assert forecast.simulate(costs, mtbf_s, interval) == pytest.approx(formula, abs=0.02)


def test_the_recommended_interval_is_the_best_of_all_and_near_youngs():
    for mtbf_s, stall_s in ((10_000.0, 2.0), (50_000.0, 30.0), (100.0, 5.0)):
        costs = Costs(step_s=1.5, stall_s=stall_s, restart_s=60.0)
        best = forecast.best_interval(costs, mtbf_s)
        every = {n: forecast.goodput(costs, mtbf_s, n) for n in range(1, 3000)}
        assert forecast.goodput(costs, mtbf_s, best) == pytest.approx(max(every.values()), rel=1e-9)
        if stall_s < mtbf_s / 100:
            young_s = math.sqrt(2 * mtbf_s * stall_s)
            assert best * costs.step_s == pytest.approx(young_s, rel=0.05)


def test_restart_time_costs_what_the_record_says():
    """One fault per 2.8 h: 10 minutes of restart 6 %, a stall of 1 s every 142 s about 1 %."""
    costs = Costs(step_s=1.0, stall_s=1.0, restart_s=0.0)
    best = forecast.best_interval(costs, 10_080.0)
    assert 1 - forecast.goodput(costs, 10_080.0, best) == pytest.approx(0.014, abs=0.002)
    slow = Costs(step_s=1.0, stall_s=0.0, restart_s=600.0)
    assert 1 - forecast.goodput(slow, 10_080.0, 1) == pytest.approx(0.06, abs=0.003)


def test_failures_that_come_before_any_save_leave_nothing():
    assert forecast.goodput(Costs(1.0, 1.0, 1.0), 1.0, 10**6) == 0.0
    assert forecast.best_interval(Costs(10.0, 1.0, 1.0), 1.0) == 1


def attempt(number: int, began: float, ended: float, cause: str | None, lines=(), **seconds):
    return Attempt(
        began, ended, cause=cause, number=number, last_step=len(lines), seconds=seconds, lines=lines
    )


def test_a_gap_that_no_launcher_filled_is_idle():
    total = account(
        [attempt(1, 0.0, 100.0, "killed"), attempt(2, 105.0, 150.0, "stopped", restart=5.0),
         attempt(3, 1150.0, 1200.0, None, restart=0.0)]
    )  # fmt: skip
    assert (total["restart"], total["idle"]) == (5.0, 1000.0)
    assert sum(total.values()) == 1200.0


def test_waiting_evaluating_warming_up_and_steps_without_an_update_are_no_goodput():
    lines = [
        line(1, 1, 9.0, first_of_attempt=True),
        line(1, 2, 1.0, data_s=0.25),
        line(1, 3, 1.0, eval_s=2.0),
        line(1, 4, 1.0, skipped=True),
        line(1, 5, 1.0, skipped=True, targets=0),  # a batch that was left out by a skip
    ]
    total = account([attempt(1, 0.0, 20.0, "finished", lines, start=3.0, load=1.0)])
    assert total["start"] == 3.0 + 8.0
    assert total["stall"] == 0.25
    assert total["evaluate"] == 2.0
    assert total["redone"] == 1.0
    assert total["useful"] == 1.0 + 0.75 + 1.0 + 1.0
    assert total["load"] == 1.0
    assert sum(total.values()) == 20.0


def test_stamps_that_overlap_a_little_still_add_up():
    total = account([attempt(1, 0.0, 5.0, "finished", [line(1, 1, 5.5)])])
    assert sum(total.values()) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("jump_s", "ended", "began", "whole"),
    [
        (0, 100.0, 60.0, 90.0),  # a host that was cut off lived on when the next attempt had begun
        (-3600, 20.0, 25.0, None),  # the clock is set back in the first attempt,
        (-3600, 3620.0, 25.0, None),  # between the two
        (3600, 20.0, 25.0, 3655.0),  # or forward
    ],
)
def test_attempts_that_overlap_and_clocks_that_jump_leave_no_second_twice_or_below_0(
    jump_s, ended, began, whole
):
    first = attempt(
        1, 0.0, ended + jump_s, "killed", [line(1, n, 1.0) for n in range(1, 11)], start=5
    )
    lines = [line(2, n, 1.0) for n in range(11, 31)]
    second = attempt(2, began + jump_s, began + jump_s + 30.0, "finished", lines, start=5)
    total = account([first, second])
    assert min(total.values()) >= 0
    assert total["useful"] == 30.0
    assert sum(shares(total).values()) == pytest.approx(1.0)
    if whole is not None:
        assert sum(total.values()) == whole


def test_an_attempt_that_goes_on_lives_until_now_and_older_records_are_read():
    run = Recorded(Costs(1.0, 0.0, 0.0), 10, start_s=3.0, detect_s=0.0)
    run.event("attempt", 1, BEGAN_S + 3, after_step=0, world=2)  # how older runs began an attempt
    [one] = attempts_of(run.events, [line(1, 1, 1.0)], BEGAN_S + 9)
    assert (one.cause, one.began_unix_s, one.ended_unix_s) == (None, BEGAN_S + 3, BEGAN_S + 9)
    run.event("began", 2, BEGAN_S + 20, after_step=0, started_unix_s=BEGAN_S + 12)
    two = attempts_of(run.events, [], BEGAN_S + 30)[1]
    assert (two.began_unix_s, two.seconds["start"]) == (BEGAN_S + 12, 8.0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A run on record, under runs/ of the working directory."""
    monkeypatch.chdir(tmp_path)
    run = Recorded(Costs(1.0, 2.0, 0.0), 10, start_s=5.0, detect_s=1.0)
    run.live(1, 60.0)
    run.live(2, 100.0, restart_s=3.0)
    made = tmp_path / "runs" / "mine"
    made.mkdir(parents=True)
    recipe = "run: mine\nsteps: 900\ncheckpoint:\n  mode: sync\n  interval: 10\n"
    (made / "recipe.yaml").write_text(recipe)
    for name, records in (("events.jsonl", run.events), ("metrics.jsonl", run.lines)):
        (made / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def test_the_command_prints_an_account_of_100_percent_and_an_interval(folder, capsys):
    assert command.main(["mine"]) == 0
    out = capsys.readouterr().out
    assert "2 attempts, 2 failures" in out
    assert "100.0%" in out
    assert "a failure every 1 min" in out
    assert "as it is" in out
    assert command.main(["mine", "--mtbf", "2.8h"]) == 0
    assert "a failure every 2 h 48 min (given)" in capsys.readouterr().out


def test_what_a_user_gets_wrong_is_refused_with_the_way_out(folder, capsys):
    for words, parts in {
        ("goodput", "other"): ["RUN=other", "there are: mine"],
        ("goodput", "mine", "--mtbf", "soon"): ["MTBF=soon", "2.8h"],
        ("goodput", "mine", "--mtbf", "-1"): ["MTBF=-1", "above 0"],
        ("goodput", "mine", "--mtbf", "nan"): ["MTBF=nan"],
        ("events", "mine", "--kind", "attempts"): ["KIND=attempts", "attempt, began, saved"],
    }.items():
        main = events.main if words[0] == "events" else command.main
        assert main(list(words[1:])) == 93
        error = capsys.readouterr().err
        assert all(part in error for part in parts), error
    (folder / "events.jsonl").unlink()
    assert command.main(["mine"]) == 93
    assert "no attempt is on record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 7200), ("90min", 5400), ("30s", 30), ("1.5d", 129_600)]
)
def test_times_between_failures_have_units(text, seconds):
    assert command.hours("MTBF", text) == seconds


def test_steps_that_a_rewind_took_back_are_no_goodput(folder):
    before = account(goodput.read_attempts(folder))
    opened = [
        {"kind": "segment", "segment": 0, "parent": None, "first_step": 1},
        {"kind": "segment", "segment": 1, "parent": {"segment": 0, "step": 20}, "first_step": 21},
    ]
    (folder / "history.jsonl").write_bytes(b"".join(map(encode, opened)))
    after = account(goodput.read_attempts(folder))
    assert after["useful"] == 20.0
    assert after["redone"] == before["redone"] + before["useful"] - 20.0
    assert sum(after.values()) == pytest.approx(sum(before.values()))
