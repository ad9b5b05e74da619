"""Communication volume of one step of a layout, as closed formulas in bytes.

A collective counts as the bytes of its larger side on one rank: an all-reduce of M bytes is M, and
so is a gather that gives M bytes or a scatter that takes them. On a ring 2 (n - 1) / n of an
all-reduce and (n - 1) / n of the others are sent. No torch.

Rule: the formulas follow the bytes that tests count (test_tensor.py, test_pipeline.py).

Letters: n tokens of a micro-batch on this rank's part of its windows, H hidden_size, L blocks, D
head_dim, w bytes of an activation, P parameters of this rank.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from model.cost import BYTES, blocks_recomputed, head_dim
from parallel.layout import Layout
from recipes.schema import Model, Recipe

ALL_REDUCE, GATHER, SCATTER, EXCHANGE = "all_reduce", "gather", "scatter", "exchange"
FP32 = 4


def tensor_bytes(recipe: Recipe, layout: Layout, micro_batches: int) -> Counter[str]:
    """Bytes per kind of collective for a tensor rank, in one step, without pipeline stages.

    Without sequence parallelism there is one all-reduce of n H w bytes in each direction for each
    half of a block, for the embedding and for the head: 4 L + 2. With it each of these becomes a
    scatter and a gather, and the tokens of a half are gathered once more in its backward, so that
    nobody keeps them: 6 L + 2 gathers and 4 L + 2 scatters. Gradients of norms that saw only some
    tokens are summed. The loss needs three fp32 numbers per token. A recomputed block repeats the
    collectives that its backward needs.
    """
    model, size = recipe.model, layout.tensor
    if size == 1:
        return Counter()
    blocks, width = model.num_hidden_layers, BYTES[recipe.precision]
    tokens = layout.micro_batch * recipe.seq_len // layout.context
    again = blocks_recomputed(recipe.recompute, blocks)
    hidden = tokens * model.hidden_size * width
    volume = Counter({ALL_REDUCE: 3 * FP32 * tokens})
    if recipe.parallel.sequence:
        volume[GATHER] += (6 * blocks + 2 + 2 * again) * hidden
        volume[SCATTER] += (4 * blocks + 2 + again) * hidden
        volume[ALL_REDUCE] += (2 * blocks + 1) * model.hidden_size * width
    else:
        volume[ALL_REDUCE] += (4 * blocks + 2 + again) * hidden
    if model.qk_norm:
        volume[ALL_REDUCE] += 2 * blocks * head_dim(model) * width
    return Counter({name: micro_batches * count for name, count in volume.items()})


def context_bytes(recipe: Recipe, layout: Layout, micro_batches: int) -> Counter[str]:
    """Bytes per kind of collective for a context rank, in one step.

    q, k and v are exchanged for heads, the output of attention is exchanged back, and so are all
    their gradients. A key-value head that several ranks need is sent to each of them.
    """
    model, size = recipe.model, layout.context
    if size == 1:
        return Counter()
    blocks, width = model.num_hidden_layers, BYTES[recipe.precision]
    tokens = layout.micro_batch * recipe.seq_len // size
    again = blocks_recomputed(recipe.recompute, blocks)
    heads = model.num_attention_heads // layout.tensor
    kv_heads = max(model.num_key_value_heads // layout.tensor, size)
    once = tokens * (2 * heads + 2 * kv_heads) * head_dim(model) * width
    return Counter({EXCHANGE: micro_batches * (2 * blocks + again) * once})


def gathers(recipe: Recipe, layout: Layout, json: dict[str, Any]) -> tuple[int, int]:
    """(count, bytes) of ZeRO-3's parameter gathers in one micro-batch; an upper bound.

    Forward and backward each gather the embedding, the head and every block, without parameters
    below the persistence threshold, which stay gathered. DeepSpeed does not gather again a block
    that it still holds, so the real number can be smaller.
    """
    model, width = recipe.model, BYTES[recipe.precision]
    threshold = json["zero_optimization"].get("stage3_param_persistence_threshold", 0)
    table = -(-model.vocab_size // layout.tensor) * model.hidden_size
    ends = [table, model.hidden_size] + ([] if model.tie_word_embeddings else [table])
    block = sum(size for size in weights_of_block(model, layout.tensor) if size > threshold)
    parts = [size for size in ends if size > threshold] + [block] * model.num_hidden_layers
    parts = [size for size in parts if size]
    return 2 * len(parts), 2 * sum(parts) * width


def weights_of_block(model: Model, tensor: int) -> list[int]:
    """Elements of a tensor rank's shard of each weight of a block."""
    hidden, dim = model.hidden_size, head_dim(model)
    query, key = model.num_attention_heads * dim, model.num_key_value_heads * dim
    widths = (query, key, key, query, *(model.intermediate_size,) * 3)
    biases = [query // tensor, key // tensor, key // tensor] if model.qkv_bias else []
    norms = [hidden, hidden] + ([dim, dim] if model.qk_norm else [])
    return [hidden * width // tensor for width in widths] + biases + norms


def pipeline_bytes(recipe: Recipe, layout: Layout, micro_batches: int) -> int:
    """Bytes that a rank sends to the next pipeline stage in one step.

    These are the hidden states of every micro-batch, tokens x hidden_size; with sequence
    parallelism only those of the rank's own tokens. As many bytes come back as gradients.
    """
    tokens = micro_batches * layout.micro_batch * recipe.seq_len
    if recipe.parallel.sequence:
        tokens //= layout.tensor
    return tokens * recipe.model.hidden_size * BYTES[recipe.precision]
