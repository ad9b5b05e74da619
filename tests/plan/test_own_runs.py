"""plan/own_runs.py: a site's own runs in the table of published ones."""

from __future__ import annotations

import json

import pytest

from base import jsonl
from base.errors import UserError
from plan.own_runs import own_runs
from plan.search import option_of
from plan.validation import validation_report
from recipes.compose import compose, recipe_yaml


def run_at(folder, factor, *words):
    """A run that was `factor` times as fast as predicted."""
    from plan.recipe_jobs import machine_for

    recipe = compose("1b", ["cluster=a100", "zero=3", *words]).recipe
    option = option_of(recipe, 8, 3, machine_for(recipe)[0])
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe))
    (folder / "layout.json").write_text(json.dumps(option.layout.as_dict()))
    speed = factor * option.tokens_per_s
    line = {"segment": 0, "attempt": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8,
            "tokens_per_s": speed, "tokens_per_s_per_rank": speed / 8, "step_s": 1.0,
            "device_memory_gib": option.memory.peak / 2**30}  # fmt: skip
    lines = [line | {"step": step, "first_of_attempt": step == 1} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_bytes(b"".join(map(jsonl.encode, lines)))
    return folder


def test_runs_are_predicted_anew_and_compared_with_their_records(tmp_path):
    folders = [run_at(tmp_path / "a", 1.0), run_at(tmp_path / "b", 0.8, "micro_batch=1")]
    lines, tests = validation_report(folders=folders)
    errors = [test.error for test in tests]
    assert abs(errors[0]) < 0.03  # the constants are fitted anew, on all published rows
    assert errors[1] == pytest.approx(0.25, abs=0.04)
    text = "\n".join(lines)
    for part in ("own runs, A100-80GB", "each run", "a: zero=3", "b: zero=3", "memory that"):
        assert part in text, part


def test_a_run_without_numbers_is_counted_with_the_reason_and_a_missing_one_refused(tmp_path):
    good = run_at(tmp_path / "a", 1.0)
    (good / "metrics.jsonl").write_bytes(b"")
    found, refused = own_runs([good])
    assert not found
    assert list(refused) == ["a: no step after the first is on record"]
    with pytest.raises(UserError, match="there is no run nope"):
        own_runs([good, tmp_path / "nope"])
