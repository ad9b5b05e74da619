"""plan/compute_budget.py: the closed form is the least loss, and sizes are met."""

from __future__ import annotations

import pytest

from model.cost import num_parameters
from plan.compute_budget import (
    Allocation,
    best_allocation,
    flops_for_loss,
    over_trained,
    shape_with,
)
from recipes.compose import compose


@pytest.mark.parametrize("flops", [1e19, 5.76e23, 1e26])
def test_no_other_size_with_the_same_flops_has_less_loss(flops):
    best = best_allocation(flops)
    assert best.flops == pytest.approx(flops)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        size = best.parameters * factor
        assert Allocation(size, flops / 6 / size).loss > best.loss


def test_about_twenty_tokens_per_parameter_at_chinchillas_budget():
    assert 18 < best_allocation(5.76e23).ratio < 24


def test_over_training_costs_flops_for_the_same_loss_and_one_time_costs_nothing():
    best = best_allocation(1e22)
    assert flops_for_loss(best.loss, 1) == pytest.approx(1e22, rel=1e-6)
    more = [flops_for_loss(best.loss, times) for times in (1, 2, 4, 8)]
    assert more == sorted(more)
    assert over_trained(best, 4).ratio == pytest.approx(4 * best.ratio)


@pytest.mark.parametrize("parameters", [2e8, 1.2e9, 1.16e10, 1.3e11])
def test_a_shape_of_the_wanted_size_is_found_that_tensor_parallelism_can_split(parameters):
    model = shape_with(parameters, compose("7b", []).recipe.model)
    assert num_parameters(model) == pytest.approx(parameters, rel=0.06)
    if parameters > 2e9:
        assert model.num_attention_heads % 8 == 0
    assert model.hidden_size == 128 * model.num_attention_heads
