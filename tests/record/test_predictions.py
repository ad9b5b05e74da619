"""record/predictions.py: a term is compared only where a run counts it."""

from __future__ import annotations

import json

import pytest

from base import jsonl
from record.predictions import apart, comparison, event_of, measured, read_plan

LINE = {
    "segment": 0, "attempt": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8,
    "tokens_per_s_per_rank": 50.0, "mfu": None, "compute_s": 0.8, "optimizer_s": 0.1,
}  # fmt: skip


def run_of(folder, steps, device_gib=None):
    with open(folder / "metrics.jsonl", "wb") as file:
        for step, seconds in enumerate(steps, start=1):
            line = LINE | {"step": step, "step_s": seconds, "tokens_per_s": 100.0}
            line |= {"first_of_attempt": step == 1, "device_memory_gib": device_gib}
            file.write(jsonl.encode(line))
    return folder


def test_warm_up_is_left_out_and_terms_that_are_not_counted_are_absent(tmp_path):
    found = measured(run_of(tmp_path, [9.0, 1.0, 3.0, 2.0]))
    assert found == {"step_s": 2.0, "compute_s": 0.8, "optimizer_s": 0.1, "tokens_per_s": 100.0}
    assert measured(run_of(tmp_path, [9.0, 1.0], 3.5))["peak_memory_gib"] == 3.5
    assert measured(tmp_path, [3.0, 4.5])["peak_memory_gib"] == 4.5
    assert "step_s" not in measured(run_of(tmp_path, [9.0]))


def test_a_difference_is_a_percentage_or_beyond_a_factor_of_two_a_factor():
    assert (apart(1.1, 1.0), apart(3.0, 1.0), apart(1.0, None)) == ("+10.0%", "x 3", "-")
    (row,) = comparison({"step_s": 1.5, "bubble": None}, {"step_s": 2.0, "mfu": 0.3})
    assert row == ("step", "1.5 s", "2 s", "-25.0%")


def test_an_event_holds_both_and_there_is_none_without_a_prediction(tmp_path):
    run_of(tmp_path, [9.0, 2.0])
    assert event_of(tmp_path) is None
    assert read_plan(tmp_path) == {}
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": None, "why": ["no GPU"]}))
    assert event_of(tmp_path) is None
    predicted = {"step_s": 2.2, "mfu": 0.4, "is_calibrated": False}
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": predicted}))
    event = event_of(tmp_path)
    assert event["predicted"] == predicted
    assert event["measured"]["step_s"] == pytest.approx(2.0)
    assert event["text"] == (
        "predicted (not calibrated) against measured: step 2.2 s against 2 s (+10.0%)"
    )
