"""runtime/engine/optimizer.py: who decays, and with which numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.schema import OPTIMIZERS, Optim
from runtime.ds_config.state_bytes import state_bytes
from runtime.engine.optimizer import build_optimizer, parameter_groups


def test_only_matrices_decay_and_each_parameter_is_in_one_group():
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    groups = parameter_groups(model.named_parameters(), 0.1)
    decayed, undecayed = groups
    assert [p.shape for p in decayed["params"]] == [(7, 4), (3, 4)]
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(
        p.numel() for p in model.parameters()
    )


def test_a_parameter_partitioned_by_zero_3_is_judged_by_its_full_shape():
    empty = nn.Parameter(torch.empty(0))
    empty.ds_shape = torch.Size((8, 4))
    (group,) = parameter_groups([("weight", empty)], 0.1)
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_the_bytes_that_it_declares(name):
    model = nn.Linear(64, 33)
    optimizer = build_optimizer(model.named_parameters(), Optim(lr=0.5, name=name))
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    kept = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1  # a step count is no state of a parameter
    ]
    size = sum(value.numel() * value.element_size() for value in kept)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert size == OPTIMIZERS[name] * parameters
    assert Optim(lr=0.5, name=name).checkpoint_bytes * parameters == size + 4 * parameters
    assert state_bytes(1, "bf16", "fp32", True, True, 8, False, name)["moments"] == (
        OPTIMIZERS[name] / 8
    )


def test_an_optimizer_that_declares_no_state_is_never_counted_as_none():
    with pytest.raises(KeyError):
        state_bytes(1, "bf16", "fp32", True, True, 8, False, "adafactor")


def test_optimizers_take_the_recipes_numbers():
    model = nn.Linear(4, 3)
    adamw = build_optimizer(model.named_parameters(), Optim(lr=0.5, beta1=0.8, beta2=0.7, eps=1e-5))
    assert adamw.defaults["betas"] == (0.8, 0.7)
    assert (adamw.defaults["lr"], adamw.defaults["eps"]) == (0.5, 1e-5)
    assert isinstance(
        build_optimizer(model.named_parameters(), Optim(lr=0.5, name="sgd")), torch.optim.SGD
    )
