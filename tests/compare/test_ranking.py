"""compare.ranking: the order by validation loss, the spread over seeds, distinguishable variants.

Records are made by hand; tests/commands/test_compare.py trains a real sweep with seeds.
"""

from __future__ import annotations

import math

import pytest

from compare import ranking
from compare.results import RunResult, Side


def run(*losses: float | None, seed: int = 1) -> RunResult:
    """A run whose validation losses, one every ten steps, are these."""
    lines = [{"step": 1, "loss": 9.0}]
    for number, loss in enumerate(losses, start=1):
        lines += [{"step": 10 * number, "loss": 1.0, "val_loss": loss}]
    return RunResult("r", 1, lines, {}, [], {}, {}, 0, {"seed": seed}, {})


def side(label: str, *finals: float | None) -> Side:
    return Side(label, [run(8.0, final) for final in finals])


def test_variants_are_ordered_by_the_mean_of_their_last_losses():
    order = ranking.ranked([side("a", 3.0, 3.2), side("b", 2.0, 2.1), side("c", 2.5, 2.5)])
    assert [one.side.label for one in order] == ["b", "c", "a"]
    assert [one.mean for one in order] == pytest.approx([2.05, 2.5, 3.1])
    assert [one.spread for one in order] == pytest.approx([0.1, 0.0, 0.2])
    assert [one.difference for one in order] == pytest.approx([0.0, 0.45, 1.05])


@pytest.mark.parametrize(("gap", "is_distinguishable"), [(0.29, False), (0.31, True)])
def test_a_difference_that_is_not_larger_than_the_spread_of_either_is_not_told_apart(
    gap, is_distinguishable
):
    """The best has a spread of 0.1, the other one of 0.3."""
    best = side("best", 2.0, 2.05, 2.1)
    mean = 2.05 + gap
    order = ranking.ranked([side("other", mean - 0.15, mean, mean + 0.15), best])
    assert [one.side.label for one in order] == ["best", "other"]
    assert order[1].noise == pytest.approx(0.3)
    assert order[1].is_distinguishable is is_distinguishable


def test_with_one_seed_nothing_is_known_of_the_spread():
    best, other = ranking.ranked([side("a", 2.0), side("b", 3.0)])
    assert (best.spread, other.noise, other.is_distinguishable) == (None, None, None)


def test_a_run_that_diverged_is_last_and_told_apart_and_one_without_evaluation_is_left_out():
    order = ranking.ranked([side("nan", None, 2.0), side("good", 2.0, 2.1), Side("none", [run()])])
    assert [one.side.label for one in order] == ["good", "nan"]
    assert math.isinf(order[1].mean)
    assert order[1].is_distinguishable is True
    assert ranking.ranked([Side("failed", reason="out of memory")]) == []
    both = ranking.ranked([side("a", None), side("b", None)])
    assert [one.difference for one in both] == [0.0, 0.0]


def test_the_curve_has_all_finite_losses_of_each_step():
    found = ranking.curve(Side("a", [run(8.0, 3.0), run(7.0, None)]), "val_loss")
    assert found == {10: [8.0, 7.0], 20: [3.0]}
