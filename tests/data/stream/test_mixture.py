"""The mixture: exact counts, even spread at every prefix, random access both ways, refused
weights.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from base.errors import UserError
from data.stream.mixture import PERIOD, Mixture, counts_over_period, shares_of


def test_one_source_is_the_plain_count():
    mixture = Mixture({"prose": 0.3})
    samples = np.array([0, 1, PERIOD - 1, PERIOD, 10**12])
    source, draw = mixture.locate(samples)
    assert not source.any()
    assert np.array_equal(draw, samples)


def test_counts_are_the_largest_remainders_of_the_weights_as_written():
    assert counts_over_period(shares_of({"a": 3, "b": 1})) == {"a": 49152, "b": 16384}
    assert counts_over_period(shares_of({"a": 0.1, "b": 0.2}), period=10) == {"a": 3, "b": 7}
    assert counts_over_period(shares_of({"b": 1, "a": 1, "c": 1}), period=10) == {
        "a": 4,
        "b": 3,
        "c": 3,
    }


def test_slots_merge_in_the_order_of_exact_fractions():
    """Against a plain sort of fractions, for counts that collide often."""
    for weights in ({"a": 3, "b": 1}, {"a": 1, "b": 1, "c": 2}, {"x": 7, "y": 5, "z": 4}):
        period = int(sum(weights.values())) * 4
        mixture = Mixture(weights, period=period)
        counts = counts_over_period(shares_of(weights), period)
        slots = [
            (Fraction(2 * j + 1, 2 * count), number, j)
            for number, count in enumerate(counts.values())
            for j in range(count)
        ]
        expected = [(number, j) for _, number, j in sorted(slots)]
        source, draw = mixture.locate(np.arange(period))
        assert list(zip(source.tolist(), draw.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 3, "b": 1},
        {"a": 0.999, "b": 0.001},
        {f"s{i:04d}": 1 + i % 17 for i in range(1000)},
    ],
    ids=["3:1", "0.999:0.001", "1000 sources"],
)
def test_every_prefix_is_within_three_samples_of_the_shares(weights):
    mixture = Mixture(weights)
    samples = np.arange(2 * mixture.period)
    source, draw = mixture.locate(samples)
    assert np.array_equal(mixture.sample(source, draw), samples)
    # A source's draw k at sample n: it had k samples before, its share says n * c / P.
    deviation = np.abs(draw - samples * mixture.counts[source] / mixture.period)
    assert deviation.max() <= 3
    total = sum(weights.values())
    achieved = mixture.counts / mixture.period
    wanted = np.array([weights[uid] / total for uid in mixture.uids])
    assert np.abs(achieved - wanted).max() <= 1 / mixture.period


def test_draws_before_agrees_with_counting():
    mixture = Mixture({"a": 5, "b": 2, "c": 1})
    source, _ = mixture.locate(np.arange(PERIOD + 1000))
    for n in (0, 1, 7, 999, PERIOD, PERIOD + 1000):
        expected = np.bincount(source[:n], minlength=3)
        assert np.array_equal(mixture.draws_before(n), expected)
    assert mixture.draws_before(10**15).sum() == 10**15


def test_a_tiny_weight_is_drawn_rarely_and_without_index_errors():
    mixture = Mixture({"big": 1, "tiny": 1e-6})
    assert mixture.period == 2**19
    assert mixture.draws_before(mixture.period)[1] == 1
    source, _ = mixture.locate(np.arange(mixture.period))
    assert np.count_nonzero(source) == 1


def test_a_weight_too_small_for_the_longest_period_is_refused():
    with pytest.raises(UserError, match=r"dust.weight is 1e-09 of the total.*set it to 0"):
        Mixture({"big": 1, "dust": 1e-9})


def test_a_source_of_weight_zero_is_never_drawn():
    mixture = Mixture({"a": 0, "b": 1, "c": 0.0})
    assert mixture.uids == ("b",)
    assert mixture.fingerprint() == Mixture({"b": 1}).fingerprint()


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf, True])
def test_bad_weights_are_refused_by_name(weight):
    with pytest.raises(UserError, match=r"data.sources.b.weight"):
        Mixture({"a": 1, "b": weight})


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": 0, "b": 0}])
def test_a_mixture_of_nothing_is_refused(weights):
    with pytest.raises(UserError, match="one must be above 0"):
        Mixture(weights)


def test_order_of_the_recipe_does_not_matter():
    weights = {"a": 3, "b": 1, "c": 2}
    prints = {Mixture(dict(some)).fingerprint() for some in itertools.permutations(weights.items())}
    assert len(prints) == 1
    assert Mixture({"a": 3, "b": 1, "c": 1}).fingerprint() not in prints
