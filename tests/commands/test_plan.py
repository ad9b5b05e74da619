"""make plan, make plan-check and make budget, as a person calls them."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest

from commands import budget, plan, plan_check


def said(command, capsys, *arguments: str) -> str:
    assert command.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_winner_is_explained_with_the_command_that_runs_it(capsys):
    text = said(plan, capsys, "--cluster=h100", "--nodes=4", "7b", "cluster.price_per_hour=2.5")
    for part in ("memory of a rank", "time of a step", "MFU", "GPU-hours", "cost", "limited by",
                 "network half as fast", "assumed", "not calibrated", "causal half"):  # fmt: skip
        assert part in text, part
    run = text.strip().splitlines()[-1]
    assert "make pretrain RECIPE=7b HOSTFILE=hosts NPROC=8" in run
    assert "micro_batch=" in run


def test_given_knobs_are_kept_and_one_layout_is_explained(capsys):
    words = ["zero=2", "parallel.tensor=2", "micro_batch=1", "recompute=full"]
    text = said(plan, capsys, "--cluster=a100", "--nodes=4", "7b", *words)
    assert "against the first" not in text
    assert text.startswith("7b: parallel.tensor=2 zero=2 micro_batch=1 recompute=full")


def test_versus_says_where_the_seconds_differ(capsys):
    text = said(plan, capsys, "--cluster=h100", "--nodes=4", "--versus=zero=3|zero=1", "7b")
    rows = [line.split() for line in text.splitlines()]
    step = next(row for row in rows if row[0] == "step")
    parts = [row for row in rows[1:] if row[-1] == "s" and row[0] != "step"]
    difference = sum(float(row[-2]) for row in parts)
    assert difference == pytest.approx(float(step[-2]), abs=0.01)


def test_json_holds_exact_values(capsys):
    shown = json.loads(said(plan, capsys, "--json", "--cluster=h100", "--nodes=128", "70b"))
    winner = shown["winner"]
    assert winner["step_s"] == pytest.approx(sum(winner["time_s"].values()))
    assert winner["tokens_per_s_low"] < winner["tokens_per_s"] < winner["tokens_per_s_high"]
    peaks = [stage["peak"] for stage in winner["memory_of_stages_bytes"]]
    assert winner["memory_bytes"] == max(peaks)
    assert shown["assumed"]
    assert shown["run"].startswith("make pretrain RECIPE=70b HOSTFILE=hosts NPROC=8")
    assert shown["fit"] + shown["at_edge"] + len(shown["too_large"]) > 50
    assert shown["slower"][0]["loses_s"] > -1
    assert {"limited_by", "changes", "host_memory_bytes", "run"} <= winner.keys()
    sides = ["--json", "--cluster=h100", "--nodes=4", "--versus=zero=3|zero=1", "7b"]
    both = json.loads(said(plan, capsys, *sides))
    assert both["one"]["knobs"] != both["other"]["knobs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster=h100", "--nodes=0", "7b"], "NODES"),
        (["--cluster=h100", "--world=1", "70b"], "no layout of 1 ranks"),
        (["--cluster=h100", "--nodes=1", "--versus=zero=1", "7b"], "two sets of overrides"),
        (["--cluster=h9000", "7b"], "h9000"),
        (["7b", "zero=7"], "zero=7"),
        (["tiny"], "cluster.gpu is not set"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(arguments, message, capsys):
    assert plan.main(arguments) == 93
    error = capsys.readouterr().err
    assert "refused: " in error
    assert message in error


def test_pictures_are_well_formed(tmp_path, capsys):
    path = tmp_path / "plan.svg"
    said(plan, capsys, "--cluster=h100", "--nodes=128", f"--picture={path}", "70b")
    assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_budget_gives_a_size_its_price_of_over_training_and_a_plan(capsys):
    text = said(budget, capsys, "--gpu-hours=10000", "--cluster=h100")
    for part in ("least loss", "over-trained", "memory of a rank", "make pretrain RECIPE="):
        assert part in text, part
    assert "GPU-hours" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of"),
        (["--gpu-hours=5", "--days=1"], "give one of"),
        (["--gpu-hours=-5"], "above 0"),
        (["--gpu-hours=many"], "GPU_HOURS"),
        (["--money=100"], "price"),
        (["--days=3"], "NODES"),
    ],
)
def test_a_budget_that_is_none_is_refused(arguments, message, capsys):
    assert budget.main(arguments) == 93
    assert message in capsys.readouterr().err


def test_plan_check_of_a_missing_file_is_refused(capsys):
    assert plan_check.main(["--rows=/nowhere.csv"]) == 93
    assert "cannot be read" in capsys.readouterr().err


def test_a_knob_that_says_auto_is_chosen_and_the_command_holds_its_value(capsys):
    text = said(plan, capsys, "--cluster=a100", "--nodes=1", "1b", "zero=auto", "seed=7")
    run = text.strip().splitlines()[-1]
    assert "auto" not in run
    assert "seed=7" in run
    assert "zero=" in run
    text = said(plan, capsys, "--cluster=a100", "--nodes=1", "1b", "parallel.tensor=2")
    assert text.strip().splitlines()[-1].count("parallel.tensor=2") == 1
