"""The parameter groups (with and without weight decay), and the torch optimizer.

Rule: every parameter is in exactly one group, and only matrices decay.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from recipes.schema import Optim


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Two groups: matrices decay, vectors (norms, biases) do not.

    The number of dims decides, not names, which differ between models; under ZeRO-3 the full shape
    is in `ds_shape`, because the parameter itself is empty.
    """
    matrices, vectors = [], []
    for _, parameter in named:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], optim: Optim
) -> torch.optim.Optimizer:
    """The torch optimizer that DeepSpeed wraps: fused AdamW (Loshchilov and Hutter 2019), or SGD.

    Fused runs one kernel per parameter group on CPU and CUDA alike. What an optimizer keeps for
    each parameter is declared in `recipes.schema.OPTIMIZERS`; a test counts it.
    """
    groups = parameter_groups(named, optim.weight_decay)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    assert optim.name == "adamw", f"{optim.name} is declared in OPTIMIZERS and not built here"
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )
