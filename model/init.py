"""Initial weights as a pure function of (seed, canonical name, shape), equal on every layout.

A matrix is drawn in blocks of BLOCK_ROWS rows, each from its own torch generator on the CPU, in
fp32, seeded by `block_seed(seed, name, block)`. A rank that owns some rows draws only the blocks
that contain them, and no host holds more than one block beyond the weight that it fills.

Rule: no generator is shared between blocks, so the order of drawing does not matter.

Distribution: matrices normal(0, initializer_range); the two projections that write into the
residual stream, o_proj and down_proj, narrower by 1 / sqrt(2 * num_hidden_layers), so that the
stream's variance at the end does not grow with depth (GPT-2, Radford et al., 2019); norms 1; biases
0. Equal to the bit for one torch version and CPU capability; torch draws with vector code whose
last bit may differ between them.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

# Part of the definition of every weight: changing it changes all of them. 256 rows of an 8192-wide
# matrix are 8 MiB, and an embedding of 128k rows takes 500 generators, which cost microseconds
# each.
BLOCK_ROWS = 256

RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def block_seed(seed: int, name: str, block: int) -> int:
    """Seed of one block's generator.

    It is the first 8 bytes, big-endian, of SHA-256 of "seed|name|block", without the sign bit.
    """
    digest = hashlib.sha256(f"{seed}|{name}|{block}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & (2**63 - 1)


def standard_deviation(name: str, config) -> float:
    """Standard deviation of the matrix `name`; `config` has its range and num_hidden_layers."""
    if name.endswith(RESIDUAL_OUTPUTS):
        return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    return config.initializer_range


def initial_weight(
    name: str, shape: tuple[int, ...], seed: int, config, rows: slice = slice(None)
) -> Tensor:
    """Rows `rows` of the initial value of the whole parameter `name`, an fp32 CPU tensor.

    name: canonical (Hugging Face) name. shape: of the WHOLE parameter, also where only some rows
    are wanted; a shard split along columns is a slice of the result. rows: step 1, as
    `tensor[rows]` takes them. Raises ValueError for a name whose kind is unknown.
    """
    start, stop, step = rows.indices(shape[0])
    if step != 1:
        raise ValueError(f"rows={rows} of {name}: only step 1 is defined")
    size = (max(0, stop - start), *shape[1:])
    if name.endswith("norm.weight"):
        return torch.ones(size)
    if name.endswith(".bias"):
        return torch.zeros(size)
    if len(shape) != 2:
        raise ValueError(
            f"{name} of shape {tuple(shape)} is no norm, bias or matrix: it has no initial value"
        )
    deviation = standard_deviation(name, config)
    weight = torch.empty(size)
    for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        first, last = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, shape[0])
        generator = torch.Generator().manual_seed(block_seed(seed, name, block))
        drawn = torch.empty(last - first, shape[1]).normal_(0.0, deviation, generator=generator)
        low, high = max(first, start), min(last, stop)
        weight[low - start : high - start] = drawn[low - first : high - first]
    return weight


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Set every parameter of a whole decoder to its initial value, one block of rows at a time.

    `runtime.engine.initial_weights` does the same for the part that a rank owns. Tied weights are
    visited once, under their first name (the embedding's).
    """
    for name, parameter in model.named_parameters():
        for start in range(0, parameter.shape[0], BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            drawn = initial_weight(name, tuple(parameter.shape), seed, model.config, rows)
            parameter[rows] = drawn
