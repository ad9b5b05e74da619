"""Lets the plan choose knobs that say `auto`: parallel, zero, micro_batch, recompute.

    overrides with parallel=auto ...  ->  search  ->  overrides with values, and why

Rule: what is not `auto` is never changed, and the chosen values are plain overrides, so a run's
recipe holds what was chosen and a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.cost import num_parameters
from recipes.compose import Composed, compose
from recipes.schema import Recipe
from runtime.ds_config.merge import ds_problems
from runtime.resolve import CHINCHILLA

FREE = ("parallel", "zero", "micro_batch", "recompute")
AUTO = "auto"


def given_knobs(words: Sequence[str]) -> set[str]:
    """Which of FREE some overrides set to a value, `parallel` also by one of its axes."""
    found = set()
    for word in words:
        name, _, value = word.partition("=")
        group = name.partition(".")[0]
        if group in FREE and value != AUTO and name != "parallel.sequence":
            found.add(group)
    return found


def compose_free(name: str, words: Sequence[str]) -> Composed:
    """A recipe whose `auto` knobs stand at values that are always legal to compose."""
    return compose(name, [word for word in words if not is_auto(word)], ds_problems)


def is_auto(word: str) -> bool:
    """Whether an override lets the plan choose."""
    name, _, value = word.partition("=")
    return name in FREE and value == AUTO


def tokens_of(recipe: Recipe) -> float:
    """Tokens of the whole run, as far as the recipe says it in plain numbers."""
    if recipe.steps is not None:
        pieces = recipe.batch_tokens
        last = pieces if isinstance(pieces, int) else pieces[-1][1]
        return float(recipe.steps * last)
    if recipe.tokens == "chinchilla":
        return float(CHINCHILLA * num_parameters(recipe.model))
    return float(recipe.tokens)
