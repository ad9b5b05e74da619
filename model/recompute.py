"""Activation checkpointing: what a block keeps for its backward, and what it computes again.

    none        keeps everything
    selective   keeps matrix products, attention and what came from other ranks
    full        keeps only its input
    every-K     full in blocks 0, K, 2K, ..., none in the others

Rule: numbers do not change. There is no dropout, so the random state is not saved, which would
synchronise with the device.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KEPT = re.compile(
    r"aten::(mm|addmm|bmm|linear|_?scaled_dot_product.*)|mkldnn::.*|torch_attn::.*|_c10d_functional::.*"
)


def run(block: nn.Module, hidden: Tensor, attend, how: str) -> Tensor:
    """block(hidden, attend); `how` is none, selective or full."""
    if how == "none" or not torch.is_grad_enabled():
        return block(hidden, attend)
    keywords = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, hidden, attend, **keywords)


def _policy(context, op, *arguments, **keywords) -> CheckpointPolicy:
    is_kept = KEPT.fullmatch(op.name().partition(".")[0]) is not None
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
