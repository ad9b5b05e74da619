"""plan/choose.py: knobs that say auto become values, and a resumed run keeps them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml

from base.errors import UserError
from plan.choose import prediction, with_choices
from recipes.compose import RECIPES, compose

GPU = "cluster.gpu=A100-80GB"
START = ["recipe=tiny", GPU]


def test_without_auto_nothing_is_touched(tmp_path):
    arguments = ["recipe=tiny", "zero=2"]
    assert with_choices(arguments, 4, tmp_path) == (arguments, [], None)


def test_every_knob_can_be_chosen_alone_or_together_and_what_is_given_is_kept(tmp_path):
    for free in (["zero"], ["micro_batch"], ["recompute"], ["parallel"], ["zero", "micro_batch"]):
        words = [f"{knob}=auto" for knob in free]
        found, lines, choice = with_choices([*START, *words, "seed=7"], 4, tmp_path)
        assert found[:3] == ["recipe=tiny", GPU, "seed=7"]
        assert {word.partition("=")[0].partition(".")[0] for word in found[3:]} == set(free)
        assert not [word for word in found if word.endswith("=auto")]
        recipe = compose("tiny", found[1:]).recipe
        assert recipe.seed == 7
        assert lines == [f"chosen by the plan: {' '.join(found[3:])}"]
        assert (choice["chosen"], choice["free"], choice["ranks"]) == (found[3:], free, 4)


def test_a_recipe_file_leaves_knobs_to_the_plan_and_an_override_takes_them_back(tmp_path):
    base = yaml.safe_load((RECIPES / "tiny.yaml").read_text())
    auto = {"zero": "auto", "micro_batch": "auto", "recompute": "auto", "parallel": "auto"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(base | auto, sort_keys=False))
    name = f"recipe={file}"
    found, _, choice = with_choices([name, GPU], 4, tmp_path)
    assert choice["free"] == ["parallel", "zero", "micro_batch", "recompute"]
    recipe = compose(str(file), found[1:]).recipe
    assert recipe.parallel.model_ranks * recipe.micro_batch >= 1
    assert recipe.zero in (0, 1, 2, 3, "pipeline")
    given, _, choice = with_choices([name, GPU, "zero=2", "parallel.tensor=2"], 4, tmp_path)
    assert choice["free"] == ["micro_batch", "recompute"]
    recipe = compose(str(file), given[1:]).recipe
    assert (recipe.zero, recipe.parallel.tensor) == (2, 2)
    with pytest.raises(UserError) as refused:
        compose(str(file), [GPU])
    assert len(refused.value.problems) == 4
    assert "micro_batch=auto: only make pretrain and make plan choose" in str(refused.value)


def test_the_choice_holds_why_every_kind_of_loser_lost(tmp_path):
    start = ["recipe=7b", "cluster=a100", "cluster.gpu=A100-40GB", "parallel=auto", "zero=auto"]
    _, _, choice = with_choices([*start, "micro_batch=auto", "recompute=auto"], 16, tmp_path)
    slower, large = choice["slower"], choice["too_large"]
    assert slower
    assert large
    assert choice["illegal"]
    assert all(loser["why"] and loser["loses_s"] > -1 for loser in slower)
    for loser in large:
        assert loser["lacks_gib"] > 0 or loser["lacks_host_gib"] > 0
        assert "=" in loser["would_fit"]
        assert "GiB" in loser["would_fit"]
    assert json.loads(json.dumps(choice)) == choice


def test_a_run_keeps_its_choice_on_as_many_ranks_unless_it_starts_afresh(tmp_path):
    arguments = [*START, "zero=auto", "micro_batch=auto"]
    recorded = dataclasses.asdict(compose("tiny", [GPU, "zero=3", "micro_batch=1"]).recipe)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recorded))))
    (tmp_path / "tiny" / "layout.json").write_text(json.dumps({"world": 4}))
    found, lines, _ = with_choices(arguments, 4, tmp_path)
    assert found == [*START, "zero=3", "micro_batch=1"]
    assert lines == ["kept from this run's first attempt: zero=3 micro_batch=1"]
    assert with_choices(arguments, 2, tmp_path)[1][0].startswith("chosen")
    afresh, *_ = with_choices([*arguments, "resume=fresh"], 4, tmp_path)
    assert "zero=3" not in afresh


def test_what_cannot_be_chosen_is_refused(tmp_path):
    with pytest.raises(UserError, match="zero=auto contradicts"):
        with_choices([*START, "zero=auto", "zero=2"], 4, tmp_path)
    with pytest.raises(UserError, match=r"cluster\.gpu is not set"):
        with_choices(["recipe=tiny", "zero=auto"], 4, tmp_path)
    with pytest.raises(UserError, match="no legal choice fits 8 ranks"):
        with_choices(["recipe=70b", "cluster.gpu=A100-40GB", "zero=auto"], 8, tmp_path)


def test_a_start_prints_what_is_predicted_where_the_gpu_is_known():
    terms, (line,) = prediction(compose("7b", ["cluster=h100", "zero=3"]).recipe, 32)
    assert terms["compute_s"] + terms["optimizer_s"] == pytest.approx(terms["step_s"])
    assert sum(terms["seconds"].values()) == pytest.approx(terms["step_s"])
    assert terms["tokens_per_s_low"] < terms["tokens_per_s"] < terms["tokens_per_s_high"]
    assert re.fullmatch(
        r"predicted: [\d,]+ to [\d,]+ tokens/s per GPU \(not calibrated\), [\d.]+ GiB of 80"
        r" \(fits\); make plan explains it",
        line,
    )
    terms, (why,) = prediction(compose("tiny", []).recipe, 1)
    assert terms is None
    assert "cluster.gpu is not set" in why
