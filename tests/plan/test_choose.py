"""plan/choose.py: knobs that say auto become values, and a resumed run keeps them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml

from base.errors import UserError
from plan.choose import prediction, with_choices
from recipes.compose import compose

GPU = "cluster.gpu=A100-80GB"
START = ["recipe=tiny", GPU]


def test_without_auto_nothing_is_touched(tmp_path):
    arguments = ["recipe=tiny", "zero=2"]
    assert with_choices(arguments, 4, tmp_path) == (arguments, [])


def test_every_knob_can_be_chosen_alone_or_together_and_what_is_given_is_kept(tmp_path):
    for free in (["zero"], ["micro_batch"], ["recompute"], ["parallel"], ["zero", "micro_batch"]):
        words = [f"{knob}=auto" for knob in free]
        found, lines = with_choices([*START, *words, "seed=7"], 4, tmp_path)
        assert found[:3] == ["recipe=tiny", GPU, "seed=7"]
        assert {word.partition("=")[0].partition(".")[0] for word in found[3:]} == set(free)
        assert not [word for word in found if word.endswith("=auto")]
        recipe = compose("tiny", found[1:]).recipe
        assert recipe.seed == 7
        assert lines == [f"chosen by the plan: {' '.join(found[3:])}"]


def test_a_run_keeps_its_choice_on_as_many_ranks_unless_it_starts_afresh(tmp_path):
    arguments = [*START, "zero=auto", "micro_batch=auto"]
    recorded = dataclasses.asdict(compose("tiny", [GPU, "zero=3", "micro_batch=1"]).recipe)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recorded))))
    (tmp_path / "tiny" / "layout.json").write_text(json.dumps({"world": 4}))
    found, lines = with_choices(arguments, 4, tmp_path)
    assert found == [*START, "zero=3", "micro_batch=1"]
    assert lines == ["kept from this run's first attempt: zero=3 micro_batch=1"]
    assert with_choices(arguments, 2, tmp_path)[1][0].startswith("chosen")
    afresh, _ = with_choices([*arguments, "resume=fresh"], 4, tmp_path)
    assert "zero=3" not in afresh


def test_what_cannot_be_chosen_is_refused(tmp_path):
    with pytest.raises(UserError, match="zero=auto contradicts"):
        with_choices([*START, "zero=auto", "zero=2"], 4, tmp_path)
    with pytest.raises(UserError, match=r"cluster\.gpu is not set"):
        with_choices(["recipe=tiny", "zero=auto"], 4, tmp_path)
    with pytest.raises(UserError, match="no legal choice fits 8 ranks"):
        with_choices(["recipe=70b", "cluster.gpu=A100-40GB", "zero=auto"], 8, tmp_path)


def test_a_start_prints_what_is_predicted_where_the_gpu_is_known():
    (line,) = prediction(compose("7b", ["cluster=h100", "zero=3"]).recipe, 32)
    assert re.fullmatch(
        r"predicted: [\d,]+ to [\d,]+ tokens/s per GPU \(not calibrated\), [\d.]+ GiB of 80"
        r" \(fits\); make plan explains it",
        line,
    )
    assert prediction(compose("tiny", []).recipe, 1) == []
