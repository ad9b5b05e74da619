"""The recipes and config group options that ship: short, explained, composable."""

from __future__ import annotations

import re

import pytest

from base.errors import UserError
from base.paths import ROOT
from base.values import counted
from commands import pretrain
from data.stream.schedule import schedule_of
from data.stream.sources import corpus_problems
from parallel.layout import solve
from recipes.compose import RECIPES, compose, compose_command, group_options, recipe_names
from recipes.overrides import GROUPS
from runtime.ds_config.merge import ds_problems, load_preset
from runtime.resolve import resolve

MOST_LINES = 25
# Recipe -> ranks it is meant for.
RANKS = {"tiny": 2, "125m": 8, "1b": 8, "7b": 64, "70b": 1024}
NUMBER = re.compile(r"^\s*[\w.]+:\s*[\d.]+(e[+-]?\d+)?\b")


def lines_of(recipe_name: str) -> list[str]:
    return (RECIPES / f"{recipe_name}.yaml").read_text().splitlines()


def test_the_named_recipes_exist():
    assert set(recipe_names()) >= set(RANKS)


@pytest.mark.parametrize("recipe_name", recipe_names())
def test_a_recipe_is_short_and_starts_with_its_command(recipe_name):
    lines = lines_of(recipe_name)
    assert len(lines) <= MOST_LINES
    assert re.match(rf"# make pretrain RECIPE={re.escape(recipe_name)}\b", lines[0])


@pytest.mark.parametrize("recipe_name", recipe_names())
def test_each_number_of_a_recipe_has_a_reason(recipe_name):
    bare = [line for line in lines_of(recipe_name) if NUMBER.match(line) and "#" not in line]
    assert not bare


@pytest.mark.parametrize("recipe_name", recipe_names())
def test_a_recipe_puts_itself_last(recipe_name):
    entries = [line.strip() for line in lines_of(recipe_name) if line.startswith("  - ")]
    assert entries[-1] == "- _self_"


@pytest.mark.parametrize("recipe_name", list(RANKS))
def test_a_recipe_resolves_on_the_ranks_it_is_meant_for(recipe_name):
    composed = compose(recipe_name)
    recipe = composed.recipe
    assert not composed.warnings
    resolved = resolve(recipe, RANKS[recipe_name], schedule_of(recipe))
    assert resolved.layout.world == RANKS[recipe_name]
    assert recipe_name == "tiny" or not resolved.warnings


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("zero", [1, 2, 3, "zero3_offload"])
def test_every_layout_can_be_tried_on_tiny(world, zero):
    recipe = compose("tiny", [f"zero={zero}"]).recipe
    assert solve(recipe, world, load_preset(zero).stage).data == world


def test_tiny_is_shaped_for_every_axis():
    recipe = compose("tiny").recipe
    assert recipe.model.num_hidden_layers >= 4
    assert recipe.model.num_key_value_heads == 2
    assert recipe.batch_tokens // recipe.seq_len >= 8
    assert recipe.model.vocab_size == 8192


@pytest.mark.parametrize("group", GROUPS)
def test_every_config_group_option_composes_and_describes_itself(group):
    assert group_options(group)
    for name in group_options(group):
        extra = ["optim.lr=1e-3"] if group == "optim" else []
        composed = compose("tiny", [f"{group}={name}", *extra])
        assert f"recipes/{group}/{name}.yaml" in composed.origins.values()
        assert (RECIPES / group / f"{name}.yaml").read_text().startswith("# ")


def test_a_wrong_knob_hides_neither_ds_keys_nor_corpora():
    def start(*overrides: str) -> None:
        given = ["recipe=tiny", *overrides]
        composed = compose_command(given, ds_problems, lambda data: corpus_problems(data, ROOT))
        pretrain.check(composed.recipe, 1)

    corpus = ["data.sources.own.corpus=no/where", "data.sources.own.weight=1"]
    for words, first in ((["steps=0", "ds.typo=1"], "steps=0"), (["micro_batch=3"], "batch_tok")):
        with pytest.raises(UserError) as refusal:
            start(*words, *corpus)
        problems = refusal.value.problems
        assert problems[0].startswith(first)
        assert "no/where has no manifest.json" in problems[-1]
        assert len(problems) == len(words) + 1


def test_one_of_something_is_no_plural():
    assert [counted(n, "step") for n in (0, 1, 2, 2000)] == [
        "0 steps", "1 step", "2 steps", "2,000 steps"
    ]  # fmt: skip
    assert counted(1, "attempt", "attempts") == "1 attempt"
    assert counted(3, "attempt", "attempts") == "3 attempts"
