"""runtime/engine/optimizer.py: who decays, and with which numbers."""

from __future__ import annotations

import torch
from torch import nn

from recipes.schema import Optim
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


def test_optimizers_take_the_recipes_numbers():
    model = nn.Linear(4, 3)
    adamw = build_optimizer(model.named_parameters(), Optim(lr=0.5, beta1=0.8, beta2=0.7, eps=1e-5))
    assert adamw.defaults["betas"] == (0.8, 0.7)
    assert (adamw.defaults["lr"], adamw.defaults["eps"]) == (0.5, 1e-5)
    assert isinstance(
        build_optimizer(model.named_parameters(), Optim(lr=0.5, name="sgd")), torch.optim.SGD
    )
