"""Tensor and context parallelism, applied to the decoder from outside.

The tables below say which module and which weight is sharded, and along which dim.

Rule: modules are built from `local_config`, the shape of one rank's shard, and `apply` replaces
their classes by those that communicate with the other ranks. A model that is not sharded stays as
it is, and the decoder itself does not know about ranks. Token ids, labels and documents are whole
on every rank; a module takes its part of them.

Between blocks a rank holds (B, T, hidden). With sequence parallelism (Korthikanti et al., 2022) it
holds one run of 1 / tensor of the flattened batch's tokens, viewed as (B, T / tensor, hidden): all
computation between sharded modules is token by token. On the context axis (DeepSpeed-Ulysses,
Jacobs et al., 2023) T is this rank's part of every window, except inside attention, where the rank
holds all tokens and 1 / context of its heads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from model.config import DecoderConfig
from parallel.layout import share
from parallel.mesh import Axis, Mesh
from parallel.sharded_modules import (
    RowLinear,
    ShardedAttention,
    ShardedEmbedding,
    ShardedHead,
    ShardedMLP,
    Sharding,
    SharedNorm,
)

# Canonical path of a module -> its class when sharded. q_norm and k_norm see some of the heads; the
# other norms see some of the tokens where sequence parallelism is on.
CLASSES: tuple[tuple[str, type[nn.Module]], ...] = (
    (r".*\.self_attn", ShardedAttention),
    (r".*\.mlp", ShardedMLP),
    (r".*\.(o_proj|down_proj)", RowLinear),
    (r"model\.embed_tokens", ShardedEmbedding),
    (r"lm_head", ShardedHead),
)
HEAD_NORMS = r".*\.(q_norm|k_norm)"
TOKEN_NORMS = r".*\.(input_layernorm|post_attention_layernorm)|model\.norm"
# Canonical name of a parameter -> the dim that is sharded. All others are whole on every rank.
DIMS = (
    (r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)", 0),
    (r".*\.(o_proj|down_proj)\.weight", 1),
    (r"(model\.embed_tokens|lm_head)\.weight", 0),
)


@dataclass(frozen=True)
class ParameterShard:
    """Place of this rank's parameter in the full one; `dim` None: it is the full one."""

    full: tuple[int, ...]
    dim: int | None = None
    offset: int = 0


def local_config(config: DecoderConfig, axis: Axis) -> DecoderConfig:
    """The shape that one rank of the tensor axis builds: its shard of `config`."""
    if axis.size == 1:
        return config
    local = copy.deepcopy(config)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        whole = getattr(config, name)
        assert whole % axis.size == 0, (name, whole, axis.size)
        setattr(local, name, whole // axis.size)
    local.vocab_size = len(share(config.vocab_size, axis.size, axis.index))
    return local


def apply(
    module: nn.Module, mesh: Mesh, config: DecoderConfig, sequence: bool = True, prefix: str = ""
) -> None:
    """Make `module`, built from `local_config(config)`, compute together with the other ranks.

    module: a decoder, or the part of one at the canonical path `prefix`, such as model.layers.3.
    config: the full shape. Every parameter gets an attribute `shard`; sharded ones also get
    `tensor_model_parallel`, by which DeepSpeed counts each weight once in gradient norms.
    """
    tensor, context = mesh.tensor, mesh.context
    if tensor.size == context.size == 1:
        return
    sharding = Sharding(
        size=tensor.size,
        index=tensor.index,
        group=tensor.name,
        is_sequence=sequence and tensor.size > 1,
        context=context.size,
        context_index=context.index,
        context_group=context.name,
        first_row=share(config.vocab_size, tensor.size, tensor.index).start,
        most_rows=-(-config.vocab_size // tensor.size),
    )
    for path, part in _named(module.named_modules(), prefix):
        cls = class_of(path, sharding)
        if cls is not None:
            part.__class__, part.sharding = cls, sharding
    for path, parameter in _named(module.named_parameters(), prefix):
        parameter.shard = shard_of(path, parameter, config, tensor)
        if parameter.shard.dim is not None:
            parameter.tensor_model_parallel = True


def _named(items: Iterable[tuple[str, object]], prefix: str) -> Iterator[tuple[str, object]]:
    for name, item in items:
        yield ".".join(filter(None, (prefix, name))), item


def class_of(path: str, sharding: Sharding) -> type[nn.Module] | None:
    """The class that the module at a canonical path gets; None: it keeps its own."""
    for pattern, cls in CLASSES:
        if re.fullmatch(pattern, path):
            return cls
    is_partial = sharding.size > 1 and re.fullmatch(HEAD_NORMS, path)
    if is_partial or (sharding.is_sequence and re.fullmatch(TOKEN_NORMS, path)):
        return SharedNorm
    return None


def shard_of(
    path: str, parameter: nn.Parameter, config: DecoderConfig, axis: Axis
) -> ParameterShard:
    """Place of this rank's parameter, at a canonical path, in the full one."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    dim = next((dim for pattern, dim in DIMS if re.fullmatch(pattern, path)), None)
    if axis.size == 1 or dim is None:
        return ParameterShard(shape)
    is_vocabulary = path in ("model.embed_tokens.weight", "lm_head.weight")
    whole = config.vocab_size if is_vocabulary else shape[dim] * axis.size
    part = share(whole, axis.size, axis.index)
    assert len(part) == shape[dim], f"{path}: {shape} is no share of {whole} along dim {dim}"
    return ParameterShard((*shape[:dim], whole, *shape[dim + 1 :]), dim, part.start)
