"""The dishes and ingredients that ship: short, explained, composable."""

from __future__ import annotations

import re

import pytest

from base.errors import UserError
from base.values import counted
from commands import pretrain
from data.stream.schedule import schedule_of
from parallel.layout import solve
from recipes.compose import GROUPS, RECIPES, compose, dishes, ingredients
from runtime.ds_config.merge import load_preset
from runtime.resolve import settle

MOST_LINES = 25
# Dish -> ranks it is meant for.
RANKS = {"tiny": 2, "125m": 8, "1b": 8, "7b": 64, "70b": 1024}
NUMBER = re.compile(r"^\s*[\w.]+:\s*[\d.]+(e[+-]?\d+)?\b")


def lines_of(dish: str) -> list[str]:
    return (RECIPES / f"{dish}.yaml").read_text().splitlines()


def test_the_named_dishes_exist():
    assert set(dishes()) >= set(RANKS)


@pytest.mark.parametrize("dish", dishes())
def test_a_dish_is_short_and_starts_with_its_command(dish):
    lines = lines_of(dish)
    assert len(lines) <= MOST_LINES
    assert re.match(rf"# make pretrain RECIPE={re.escape(dish)}\b", lines[0])


@pytest.mark.parametrize("dish", dishes())
def test_each_number_of_a_dish_has_a_reason(dish):
    bare = [line for line in lines_of(dish) if NUMBER.match(line) and "#" not in line]
    assert not bare


@pytest.mark.parametrize("dish", dishes())
def test_a_dish_puts_itself_last(dish):
    entries = [line.strip() for line in lines_of(dish) if line.startswith("  - ")]
    assert entries[-1] == "- _self_"


@pytest.mark.parametrize("dish", list(RANKS))
def test_a_dish_settles_on_the_ranks_it_is_meant_for(dish):
    composed = compose(dish)
    recipe = composed.recipe
    assert not composed.warnings
    settled = settle(recipe, RANKS[dish], schedule_of(recipe))
    assert settled.layout.world == RANKS[dish]
    assert dish == "tiny" or not settled.warnings


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
def test_every_ingredient_composes_and_says_what_it_is(group):
    assert ingredients(group)
    for name in ingredients(group):
        extra = ["optim.lr=1e-3"] if group == "optim" else []
        composed = compose("tiny", [f"{group}={name}", *extra])
        assert f"recipes/{group}/{name}.yaml" in composed.origins.values()
        assert (RECIPES / group / f"{name}.yaml").read_text().startswith("# ")


def test_a_wrong_knob_hides_neither_ds_keys_nor_corpora():
    corpus = ["data.sources.own.corpus=no/where", "data.sources.own.weight=1"]
    for words, first in ((["steps=0", "ds.typo=1"], "steps=0"), (["micro_batch=3"], "batch_tok")):
        with pytest.raises(UserError) as refusal:
            pretrain.check(["recipe=tiny", *words, *corpus], 1)
        problems = refusal.value.problems
        assert problems[0].startswith(first)
        assert "no/where has no manifest.json" in problems[-1]
        assert len(problems) == len(words) + 1


def test_one_of_something_is_no_plural():
    assert [counted(n, "step") for n in (0, 1, 2, 2000)] == [
        "0 steps", "1 step", "2 steps", "2,000 steps"
    ]  # fmt: skip
    assert counted(1, "life", "lives") == "1 life"
    assert counted(3, "life", "lives") == "3 lives"
