"""Initial weights under ZeRO-3: what every rank fills, put together, is the whole weight."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from model.config import DecoderConfig
from model.init import initial_weight
from parallel.mesh import Axis
from runtime.engine.initial_weights import fill_owned

CONFIG = DecoderConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)


def partitioned(shape: tuple[int, ...], ranks: int) -> SimpleNamespace:
    """A parameter as zero.Init leaves it on one of `ranks`: a flat, padded part of it."""
    part = torch.full((-(-math.prod(shape) // ranks),), math.nan)
    part.ds_numel = part.numel()
    return SimpleNamespace(
        shape=(0,), data=torch.empty(0), ds_shape=shape, ds_tensor=part, ds_secondary_tensor=None
    )


# Of 48 parts of 128 elements, 3 each, part 42 holds two and the last five hold none.
@pytest.mark.parametrize(("ranks", "size"), [(48, 128), (7, 16), (3, 64), (1, 5), (5, 3)])
def test_parts_of_any_number_of_ranks_make_the_whole_weight(ranks, size):
    for name, shape in (("model.norm.weight", (size,)), ("lm_head.weight", (300, size))):
        parts = []
        for rank in range(ranks):
            parameter = partitioned(shape, ranks)
            fill_owned([(name, parameter)], CONFIG, 3, 3, Axis(ranks, rank), initial_weight)
            parts.append(parameter.ds_tensor)
        whole, padding = torch.cat(parts).tensor_split([math.prod(shape)])
        assert torch.equal(whole.view(shape), initial_weight(name, shape, 3, CONFIG))
        assert padding.isnan().all()
