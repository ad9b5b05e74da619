"""What the ranks of a layout say to each other in one step, as closed formulas in bytes.

The one rule: the formulas follow the counts (test_tensor.py, test_pipeline.py), not the reverse. A
collective is counted as the bytes of its larger side on one rank: an all-reduce of M bytes is M, as
is the gather that gives M or the scatter that takes it. What travels on a ring is 2 (n - 1) / n of
an all-reduce and (n - 1) / n of the others. No torch.

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
    """Per collective, what a tensor rank of an undivided stack of blocks says in one step.

    Without sequence parallelism an all-reduce of n H w in each direction of each of a block's two
    halves, of the embedding and of the head: 4 L + 2. With it each is a scatter and a gather; the
    tokens of a half are gathered once more in its backward, which saves keeping them: 6 L + 2
    gathers, 4 L + 2 scatters. The gradients of norms that saw a part are summed. The loss needs
    three fp32 numbers per token. A block that runs again repeats what its backward needs.
    """
    model, size = recipe.model, layout.tensor
    if size == 1:
        return Counter()
    blocks, width = model.num_hidden_layers, BYTES[recipe.precision]
    tokens = layout.micro_batch * recipe.seq_len // layout.context
    again = blocks_recomputed(recipe.recompute, blocks)
    hidden = tokens * model.hidden_size * width
    said = Counter({ALL_REDUCE: 3 * FP32 * tokens})
    if recipe.parallel.sequence:
        said[GATHER] += (6 * blocks + 2 + 2 * again) * hidden
        said[SCATTER] += (4 * blocks + 2 + again) * hidden
        said[ALL_REDUCE] += (2 * blocks + 1) * model.hidden_size * width
    else:
        said[ALL_REDUCE] += (4 * blocks + 2 + again) * hidden
    if model.qk_norm:
        said[ALL_REDUCE] += 2 * blocks * head_dim(model) * width
    return Counter({name: micro_batches * count for name, count in said.items()})


def context_bytes(recipe: Recipe, layout: Layout, micro_batches: int) -> Counter[str]:
    """What a context rank says in one step: q, k and v go to heads, attention's output comes back,
    and so do their gradients. A key-value head that several ranks need is sent to each.
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
    """Under ZeRO-3, gathers of one micro-batch and their bytes: (count, bytes).

    Forward and backward each gather the embedding, the head and every block whole, save parameters
    below the threshold of persistence, which stay. A block that DeepSpeed still holds is not
    gathered again, so this is the most there can be.
    """
    model, width = recipe.model, BYTES[recipe.precision]
    threshold = json["zero_optimization"].get("stage3_param_persistence_threshold", 0)
    words = -(-model.vocab_size // layout.tensor) * model.hidden_size
    ends = [words, model.hidden_size] + ([] if model.tie_word_embeddings else [words])
    block = sum(size for size in weights_of_block(model, layout.tensor) if size > threshold)
    parts = [size for size in ends if size > threshold] + [block] * model.num_hidden_layers
    parts = [size for size in parts if size]
    return 2 * len(parts), 2 * sum(parts) * width


def weights_of_block(model: Model, tensor: int) -> list[int]:
    """Elements of a tensor rank's part of each weight of a block."""
    hidden, dim = model.hidden_size, head_dim(model)
    query, key = model.num_attention_heads * dim, model.num_key_value_heads * dim
    widths = (query, key, key, query, *(model.intermediate_size,) * 3)
    biases = [query // tensor, key // tensor, key // tensor] if model.qkv_bias else []
    norms = [hidden, hidden] + ([dim, dim] if model.qk_norm else [])
    return [hidden * width // tensor for width in widths] + biases + norms


def pipeline_bytes(recipe: Recipe, layout: Layout, micro_batches: int) -> int:
    """Bytes that a rank sends to the next stage in one step, and gets back as their gradient.

    Hidden states of every micro-batch, tokens x hidden_size; with sequence parallelism only those
    of the rank's own tokens.
    """
    tokens = micro_batches * layout.micro_batch * recipe.seq_len
    if recipe.parallel.sequence:
        tokens //= layout.tensor
    return tokens * recipe.model.hidden_size * BYTES[recipe.precision]
