"""Cuts the decoder over ranks from outside: which module and which weight is cut along which dim.

The one rule: modules are built from `local_config`, one rank's share of the shape, and `apply`
gives them the class that talks to the other ranks; a model that is not cut is left alone, and the
decoder knows nothing of it. Word numbers, labels and documents are whole on every rank; a module
takes its part of them.

Between blocks a rank holds (B, T, hidden); with sequence parallelism (Korthikanti et al., 2022) its
run of 1 / tensor of the flattened batch's tokens, viewed as (B, T / tensor, hidden): what lies
between cut modules works token by token. On the context axis (DeepSpeed-Ulysses, Jacobs et al.,
2023) T is this rank's part of every window, except inside attention: there it has all tokens and
1 / context of its heads.
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
    CutAttention,
    CutEmbedding,
    CutHead,
    CutMLP,
    RowLinear,
    Sharding,
    SharedNorm,
)

# Canonical path of a module -> its class when cut. q_norm and k_norm see some heads; the others
# see some tokens, if the sequence is cut.
CLASSES: tuple[tuple[str, type[nn.Module]], ...] = (
    (r".*\.self_attn", CutAttention),
    (r".*\.mlp", CutMLP),
    (r".*\.(o_proj|down_proj)", RowLinear),
    (r"model\.embed_tokens", CutEmbedding),
    (r"lm_head", CutHead),
)
HEAD_NORMS = r".*\.(q_norm|k_norm)"
TOKEN_NORMS = r".*\.(input_layernorm|post_attention_layernorm)|model\.norm"
# Canonical name of a parameter -> the dim that is cut. All others are whole on every rank.
DIMS = (
    (r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)", 0),
    (r".*\.(o_proj|down_proj)\.weight", 1),
    (r"(model\.embed_tokens|lm_head)\.weight", 0),
)


@dataclass(frozen=True)
class Shard:
    """Where a parameter of this rank lies in the full one; `dim` None: it is the full one."""

    full: tuple[int, ...]
    dim: int | None = None
    offset: int = 0


def local_config(config: DecoderConfig, axis: Axis) -> DecoderConfig:
    """The shape of the part of `config` that one rank of the tensor axis builds."""
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
    """Make `module`, built from `local_config(config)`, work together with the other ranks.

    module: a decoder, or the part of one at the canonical path `prefix`, such as model.layers.3.
    config: the full shape. Marks every parameter with its `shard`, and those that are cut with
    `tensor_model_parallel`, by which DeepSpeed counts norms.
    """
    tensor, context = mesh.tensor, mesh.context
    if tensor.size == context.size == 1:
        return
    cut = Sharding(
        size=tensor.size,
        index=tensor.index,
        group=tensor.name,
        is_sequence=sequence and tensor.size > 1,
        context=context.size,
        context_index=context.index,
        context_group=context.name,
        first_word=share(config.vocab_size, tensor.size, tensor.index).start,
        most_words=-(-config.vocab_size // tensor.size),
    )
    for path, part in _named(module.named_modules(), prefix):
        cls = class_of(path, cut)
        if cls is not None:
            part.__class__, part.cut = cls, cut
    for path, parameter in _named(module.named_parameters(), prefix):
        parameter.shard = shard_of(path, parameter, config, tensor)
        if parameter.shard.dim is not None:
            parameter.tensor_model_parallel = True


def _named(items: Iterable[tuple[str, object]], prefix: str) -> Iterator[tuple[str, object]]:
    for name, item in items:
        yield ".".join(filter(None, (prefix, name))), item


def class_of(path: str, cut: Sharding) -> type[nn.Module] | None:
    """What the module at a canonical path becomes; None: it stays."""
    for pattern, cls in CLASSES:
        if re.fullmatch(pattern, path):
            return cls
    is_partial = cut.size > 1 and re.fullmatch(HEAD_NORMS, path)
    if is_partial or (cut.is_sequence and re.fullmatch(TOKEN_NORMS, path)):
        return SharedNorm
    return None


def shard_of(path: str, parameter: nn.Parameter, config: DecoderConfig, axis: Axis) -> Shard:
    """Where this rank's parameter at a canonical path lies in the full one."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    dim = next((dim for pattern, dim in DIMS if re.fullmatch(pattern, path)), None)
    if axis.size == 1 or dim is None:
        return Shard(shape)
    is_vocabulary = path in ("model.embed_tokens.weight", "lm_head.weight")
    whole = config.vocab_size if is_vocabulary else shape[dim] * axis.size
    part = share(whole, axis.size, axis.index)
    assert len(part) == shape[dim], f"{path}: {shape} is no share of {whole} along dim {dim}"
    return Shard((*shape[:dim], whole, *shape[dim + 1 :]), dim, part.start)
