"""Writes the initial weights that a rank holds; draws only the rows that the rank needs.

Rule: the whole weight is a function of (seed, name), and a rank takes its part of it: its shard of
a parameter that is sharded, and under ZeRO-3 a flat range of that. Only the rows that the part
touches are drawn, a few at a time, so ranks share the work and no host holds a whole weight that it
does not own. Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from model.init import BLOCK_ROWS
from parallel.mesh import Axis
from parallel.tensor import ParameterShard

# (name, full shape, seed, config, rows) -> those rows of a weight, fp32.
Draw = Callable[[str, tuple[int, ...], int, Any, slice], torch.Tensor]


@torch.no_grad()
def fill_owned(
    named: Iterable[tuple[str, nn.Parameter]],
    config: Any,
    seed: int,
    stage: int,
    data: Axis,
    draw: Draw,
) -> None:
    """Fill the parameters of this rank, given under their canonical names.

    config: the configuration of the full model. data: the axis over which ZeRO-3 has divided each
    parameter into equal flat ranges.
    """
    import deepspeed

    for name, parameter in named:
        shape, part, start = tuple(parameter.shape), parameter.data.view(-1), 0
        if stage == 3:
            shape, part = tuple(parameter.ds_shape), parameter.ds_tensor
            start = part.ds_numel * data.index
        shard = getattr(parameter, "shard", ParameterShard(shape))
        columns = slice(None)
        if shard.dim == 1:
            columns = slice(shard.offset, shard.offset + shape[1])
        above = shard.offset if shard.dim == 0 else 0  # rows of other ranks before ours
        stop = min(start + part.numel(), math.prod(shape))
        width = math.prod(shape[1:])
        first_row, end_row = above + start // width, above - (-stop // width)
        # Rows come in whole blocks, because each block of random weights is drawn as one. The last
        # parts of a weight that is divided into many may consist of padding.
        lows = range(first_row // BLOCK_ROWS * BLOCK_ROWS, end_row, BLOCK_ROWS)
        for low in lows if start < stop else ():
            rows = slice(max(low, first_row), min(low + BLOCK_ROWS, end_row))
            drawn = draw(name, shard.full, seed, config, rows)
            drawn = (drawn[:, columns] if drawn.ndim > 1 else drawn).flatten()
            offset = (rows.start - above) * width
            first, last = max(start, offset), min(stop, (rows.stop - above) * width)
            part[first - start : last - start].copy_(drawn[first - offset : last - offset])
        if stage == 3 and parameter.ds_secondary_tensor is not None:
            # ZeRO++ hpZ keeps a second copy per group of ranks; leaving the context renews it.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                pass
