"""`make dryrun`: parts of large layouts, built here, are the parts of the whole."""

from __future__ import annotations

import json
import math
import sys

import pytest
from ranks import ROOT, run_command

from base.errors import UserError
from commands import dryrun
from model.cost import num_parameters
from parallel.layout import parameters_of, solve
from recipes.compose import compose

LAYOUTS = {
    "70b": ("70b", [], 1024),
    "70b, uneven": ("70b", ["parallel.pipeline=7", "parallel.tensor=4"], 28 * 8),
    "7b, ZeRO-3 with context": ("7b", ["zero=3", "parallel.tensor=2", "parallel.context=2"], 64),
    "1b, data only": ("1b", ["zero=2"], 8),
}


@pytest.fixture(scope="module", autouse=True)
def own_environment():
    """A dry run tells deepspeed, through the environment, that it is rank 0 of this host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("LOCAL_RANK", "0")
        yield


def weights(seen: dict) -> dict[str, int]:
    """Elements of this rank by kind of weight."""
    return {line["name"]: math.prod(line["shape"]) * line["count"] for line in seen["weights"]}


@pytest.fixture(scope="module")
def rank_517() -> dict:
    return dryrun.collect("70b", [], 1024, "517")


def test_a_hidden_size_that_is_no_multiple_of_the_heads_is_built_where_head_dim_is_given():
    shape = ["hidden_size=264", "num_attention_heads=5", "num_key_value_heads=5", "head_dim=64"]
    overrides = [f"model.{size}" for size in shape]
    seen = dryrun.collect("tiny", overrides, None, "0")
    assert sum(weights(seen).values()) == num_parameters(compose("tiny", overrides).recipe.model)


def test_a_rank_in_the_middle_of_70b(rank_517):
    # 517 = (4 * 16 + 0) * 8 + 5: tensor is the fastest axis, then data, then pipeline.
    assert rank_517["place"] == {"pipeline": 4, "data": 0, "context": 0, "tensor": 5}
    assert rank_517["host"] == 64
    assert rank_517["groups"]["tensor"] == list(range(512, 520))
    assert rank_517["groups"]["data"] == list(range(517, 640, 8))
    assert rank_517["groups"]["pipeline"] == list(range(5, 1024, 128))
    assert rank_517["neighbours"] == {"before": 517 - 128, "after": 517 + 128}
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & weights(rank_517).keys()
    assert rank_517["ds_config"]["zero_optimization"]["stage"] == 1
    assert rank_517["ds_config"]["pipeline"]["pipe_partitioned"] is False
    assert 5 < sum(rank_517["gib"].values()) < 80  # it fits the recipe's H100s


def test_weights_of_all_places_add_up_to_the_model(rank_517):
    """One data rank of each stage, first and last tensor rank: the others have equal shares."""
    recipe = compose("70b", []).recipe
    layout = solve(recipe, 1024, 1)
    total = 0
    for stage in range(layout.pipeline):
        place = layout.coordinates(stage * 128)
        norms = sum(
            math.prod(line["of"]) * line["count"]
            for line in dryrun.collect("70b", [], 1024, str(layout.rank(place)))["weights"]
            if line["shape"] == line["of"]
        )
        total += layout.tensor * (parameters_of(recipe.model, layout, place) - norms) + norms
    assert total == num_parameters(recipe.model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_built_has_the_parameters_that_the_layout_says(name):
    recipe_name, overrides, world = LAYOUTS[name]
    recipe = compose(recipe_name, overrides).recipe
    seen = dryrun.collect(recipe_name, overrides, world, str(world - 1))
    layout = solve(recipe, world, seen["layout"]["stage"])
    place = layout.coordinates(world - 1)
    assert seen["parameters"] == parameters_of(recipe.model, layout, place)
    assert sum(weights(seen).values()) == seen["parameters"]
    assert "model.norm.weight" in weights(seen)  # the last rank is on the last stage
    assert all(gib >= 0 for gib in seen["gib"].values())


@pytest.mark.parametrize("rank", ["8", "-1", "x", ""])
def test_a_rank_that_does_not_exist_is_refused(rank):
    with pytest.raises(UserError, match="give 0 to 7"):
        dryrun.collect("1b", [], 8, rank)


def test_an_illegal_layout_is_refused_with_its_rule():
    with pytest.raises(UserError, match="not a multiple"):
        dryrun.collect("70b", [], 1000, "0")


def test_the_verb_prints_it_for_people_and_programs(rank_517):
    words = ["RECIPE=70b", "WORLD=1024", "RANK=517", f"PYTHON={sys.executable}"]
    made = run_command(["make", "dryrun", *words], 120, cwd=ROOT)
    assert made.returncode == 0, made.stdout
    for words in ("rank 517 on host 64: pipeline 4 data 0 context 0 tensor 5", "model.layers.N."):
        assert words in made.stdout
    assert dryrun.text(rank_517) in made.stdout
    assert json.loads(json.dumps(rank_517)) == rank_517
