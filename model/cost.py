"""Exact arithmetic of the decoder: parameters, FLOPs per token, bytes of activations.

Each number is a closed formula over the shape; tests compare it with the built model. No torch, and
no model is built. `shape` is anything with the fields of `recipes.schema.Model` or `DecoderConfig`.
Units: parameters, FLOPs (a multiply-add is two), bytes.

Letters: H hidden_size, I intermediate_size, L num_hidden_layers, V vocab_size, D head_dim, A query
heads, K key/value heads, T tokens of a sequence.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import NamedTuple

BYTES = {"bf16": 2, "fp32": 4}
CHOICES = "none, selective, full or every-K (every-2: every second block)"  # of recompute
EVERY = re.compile(r"every-([1-9]\d*)")

# Logits that `model.loss` holds at one time. CPU: 16 MiB of fp32, which stays in the last-level
# cache (forward and backward at N=2048, V=8192, H=256 on one AVX2 core: 381 ms with 256 tokens per
# chunk, 400 with 512, 426 with 1024, 511 for the plain form; small chunks lose to thread barriers).
# Elsewhere: 512 MiB, because every chunk also reads and writes the whole fp32 weight gradient,
# which thousands of tokens of matrix product outweigh.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    `head` is 0 where the embedding is tied. `norms` counts those of all blocks and the last one;
    `block` is one block with its norms.
    """

    embedding: int
    head: int
    block: int
    norms: int
    total: int


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank for one micro-batch.

    `saved` is kept from forward to backward and is proportional to micro_batch. `workspace` is the
    loss's chunk of logits and the head's gradient; it exists when `saved` is complete and does not
    depend on micro_batch once that fills a chunk.
    """

    saved: int
    workspace: int

    @property
    def total(self) -> int:
        return self.saved + self.workspace


class ExactShape(NamedTuple):
    """A shape in Python's integers, which do not overflow as NumPy's and torch's do."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool


def exact(shape) -> ExactShape:
    """The exact form of a shape; head_dim is H / A where it is None.

    Raises TypeError for a size that is no whole number, such as 4096.0.
    """
    sizes = {name: operator.index(getattr(shape, name)) for name in ExactShape._fields[:6]}
    given = shape.head_dim
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    flags = {name: bool(getattr(shape, name)) for name in ExactShape._fields[7:]}
    return ExactShape(**sizes, head_dim=width if given is None else operator.index(given), **flags)


def chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Number of tokens whose logits exist at one time."""
    largest = CHUNK_LOGITS.get(device_type, CHUNK_LOGITS["cuda"])
    return max(1, largest // operator.index(vocab_size))


def head_dim(shape) -> int:
    """D: as given, or H / A."""
    return exact(shape).head_dim


def _widths(shape: ExactShape) -> tuple[int, int]:
    """Width of all query heads, width of all key heads."""
    return (
        shape.num_attention_heads * shape.head_dim,
        shape.num_key_value_heads * shape.head_dim,
    )


def _matrices(shape: ExactShape) -> int:
    """Parameters of one block that are multiplied with each token: 2 H A D + 2 H K D + 3 H I."""
    query, key = _widths(shape)
    return shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)


def parameters(shape) -> Parameters:
    """The numbers of parameters of a shape, by place."""
    shape = exact(shape)
    query, key = _widths(shape)
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    block = _matrices(shape) + norms + (query + 2 * key if shape.qkv_bias else 0)
    embedding = shape.vocab_size * shape.hidden_size
    head = 0 if shape.tie_word_embeddings else embedding
    layers = shape.num_hidden_layers
    return Parameters(
        embedding=embedding,
        head=head,
        block=block,
        norms=layers * norms + shape.hidden_size,
        total=embedding + head + layers * block + shape.hidden_size,
    )


def num_parameters(shape) -> int:
    """Every trained number once; tied embedding and head are one matrix."""
    return parameters(shape).total


def flops_per_token(shape, seq_len: int, convention: str = "palm") -> int:
    """FLOPs of training on one token: forward, and twice as much for backward.

    Recomputed forwards do not count.

    "palm" (Chowdhery et al., 2022, appendix B; MFU uses it): 6 M + 12 L A D T. M is the parameters
    of matrix products: all block matrices, and V H once for the head, tied or not; the embedding is
    a lookup, norms and biases are left out. The second term is q k^T and its product with v, over
    the full T x T square: no discount for the causal half or for documents shorter than T.
    "6n" (Kaplan et al., 2020, with all parameters): 6 num_parameters, attention left out.
    """
    if convention == "6n":
        return 6 * num_parameters(shape)
    if convention != "palm":
        raise ValueError(f"convention={convention!r} is not one of 'palm', '6n'")
    shape, seq_len = exact(shape), operator.index(seq_len)
    query, _ = _widths(shape)
    matrices = shape.num_hidden_layers * _matrices(shape) + shape.vocab_size * shape.hidden_size
    return 6 * matrices + 12 * shape.num_hidden_layers * query * seq_len


def _block_bytes_per_token(shape: ExactShape, width: int) -> int:
    """Bytes per token that one block keeps for its backward, eager, with fused attention.

    In elements of `width` bytes: both norms' inputs and outputs 4 H; q, k (rotated), v and the
    attention's output 2 A D + 2 K D; with qk_norm also q and k before it; gate (for relu2:
    relu(gate)), up, act(gate) and their product 4 I. In fp32: one number per token and norm row,
    and the log-sum-exp of every query head.
    """
    query, key = _widths(shape)
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    elements = 4 * shape.hidden_size + 2 * query + 2 * key + 4 * shape.intermediate_size
    rows = 2 + heads
    if shape.qk_norm:
        elements += query + key
        rows += heads + kv_heads
    return width * elements + 4 * rows


def _selective_bytes_per_token(shape: ExactShape, width: int) -> int:
    """Bytes per token that a block with selective recomputation keeps.

    They are its input, the outputs of the seven products and of attention, and attention's
    log-sum-exp in fp32.
    """
    query, key = _widths(shape)
    elements = 3 * shape.hidden_size + 2 * query + 2 * key + 2 * shape.intermediate_size
    return width * elements + 4 * shape.num_attention_heads


def recomputed(recompute: str, index: int) -> str:
    """The recomputation of block number `index` under the knob: none, selective or full.

    See `model.recompute`. Raises ValueError for a value that the knob does not have.
    """
    if recompute in ("none", "selective", "full"):
        return recompute
    every = EVERY.fullmatch(recompute)
    if every is None:
        raise ValueError(f"recompute={recompute!r} is not {CHOICES}")
    return "none" if index % int(every.group(1)) else "full"


def blocks_recomputed(recompute: str, blocks: int) -> int:
    """Number of the first `blocks` blocks that are recomputed whole in backward."""
    return sum(recomputed(recompute, index) == "full" for index in range(blocks))


def activation_bytes(
    shape,
    micro_batch: int,
    seq_len: int,
    precision: str = "bf16",
    recompute: str = "none",
    device: str = "cuda",
) -> Activations:
    """Bytes between the forward and the backward of `micro_batch` sequences of `seq_len` tokens.

    `saved` counts unique storages that autograd keeps, eager blocks: within 2 % of the counted ones
    (test), an upper bound for compiled blocks. With recompute="full": every block's input, and all
    of one block. `device` sets the chunk of the loss. Not counted: gradients in flight inside one
    block, the (T x T) mask of the masked attention that only CPUs use, and on a CPU without bf16
    units the fp32 copies its kernels work on.
    """
    shape = exact(shape)
    width, tokens = BYTES[precision], operator.index(micro_batch) * operator.index(seq_len)
    block = _block_bytes_per_token(shape, width)
    # Token ids (int64) for the embedding's backward; the last norm's input and row statistic; the
    # loss's gradient of the last hidden state; the rotary tables.
    ends = 8 + 2 * width * shape.hidden_size + 4 + 2 * width * shape.head_dim
    layers = shape.num_hidden_layers
    again = blocks_recomputed(recompute, layers)
    if recompute == "selective":
        blocks = layers * _selective_bytes_per_token(shape, width) + block
    else:
        blocks = (layers - again) * block + again * width * shape.hidden_size
        # Where the last block does not run again, its activations are gone before one that does.
        blocks += block if again > blocks_recomputed(recompute, layers - 1) else 0

    chunk = min(tokens, chunk_tokens(shape.vocab_size, device))
    head = shape.vocab_size * shape.hidden_size
    narrow = 0 if width == 4 else width  # 16-bit copies of what was summed up or normalised in fp32
    # Logits and their softmax in fp32; the head's gradient, summed in fp32.
    workspace = chunk * shape.vocab_size * (8 + 2 * narrow) + head * (4 + narrow)
    return Activations(saved=tokens * (blocks + ends), workspace=workspace)
