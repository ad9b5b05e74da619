"""Causal attention inside documents, and rotary positions that restart with each document.

    once per forward:  segment_ids or cu_seqlens -> start of each token's document -> tables, mask
    in every block:    q, k, v and those -> attention()

Query i sees key j if start(i) <= j <= i; this one comparison gives causality and isolation of
documents together.

Rule: shapes are fixed and do not depend on values, so no step synchronises with the device and a
block compiles whole.

Letters in names: B batch, T tokens of a window, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from model.config import Rotary
from model.layers import product_dtype

# The keywords moved between torch 2.10 (is_causal), 2.11 (window_size) and 2.12 (enable_gqa).
_VARLEN_KEYWORDS = inspect.signature(varlen_attn).parameters
_VARLEN_CAUSAL = (
    {"window_size": (-1, 0)} if "window_size" in _VARLEN_KEYWORDS else {"is_causal": True}
)
_VARLEN_HAS_GQA = "enable_gqa" in _VARLEN_KEYWORDS


@dataclass(frozen=True)
class Attend:
    """Positions and visibility of the tokens of a window, made by `prepare` once per forward.

    cos, sin: (B or 1, T, 1, D), rotary tables in the dtype of the activations.
    mask: (B, 1, T, T) additive, 0 or -inf; None: plain causal, or the kernel reads cu_seqlens.
    cu_seqlens, max_seqlen: int32 boundaries of the documents in the flattened batch, and the
    length of the longest one; or None.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


def document_starts(
    segment_ids: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int
) -> Tensor:
    """Position at which each token's document begins in its window, (B, T) int64.

    segment_ids: (B, T); a document is a run of equal ids.

    cu_seqlens: boundaries in the flattened (B * T) batch, every window boundary among them; padding
    at the end repeats the last. Used only where segment_ids is None.
    """
    if segment_ids is None:
        flat = torch.arange(batch * length, device=cu_seqlens.device)
        document = torch.searchsorted(cu_seqlens.long(), flat, right=True) - 1
        return (cu_seqlens.long()[document] % length).view(batch, length)
    places = torch.arange(length, device=segment_ids.device)
    is_first = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return torch.where(is_first, places, 0).cummax(dim=1).values


def inverse_frequencies(head_dim: int, rotary: Rotary, device: torch.device | str) -> Tensor:
    """Angle per position of each rotary pair, (D/2,) fp32: theta^(-2i/D) (Su et al., 2021), then
    scaled as `rotary` says.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rotary.theta**exponents
    if rotary.rope_type == "default":
        return frequencies
    if rotary.rope_type == "linear":
        return frequencies / rotary.factor
    assert rotary.rope_type == "llama3", rotary
    # Turns of each pair inside the original context decide: many turns keep their frequency, few
    # are divided by the factor, and those between are blended linearly in the number of turns.
    turns = rotary.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rotary.factor + kept * frequencies


def rotary_tables(
    positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, (..., T, 1, D), for positions (..., T) (Su et al., 2021).

    Layout of Transformers: pair i is (i, i + D/2), its frequency theta^(-2i/D). Angles are fp32
    whatever the model's type (bf16 cannot count beyond 256), and only the finished tables are
    rounded; there is no buffer to lose bits.
    """
    angles = positions[..., None].float() * inverse_frequencies(head_dim, rotary, positions.device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of every head by its angle; x and result (B, T, H, D)."""
    left, right = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos + torch.cat((-right, left), dim=-1) * sin


def prepare(
    like: Tensor,
    head_dim: int,
    rotary: Rotary,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Attend:
    """The `Attend` of one micro-batch.

    Without segment_ids and cu_seqlens the whole window is one document.

    like: (B, T, hidden), gives batch, length, device and type. segment_ids: (B, T), equal inside a
    document and different next to its neighbours. cu_seqlens and max_seqlen: the same documents for
    the variable-length kernel (see `document_starts`); max_seqlen may be any upper bound and is the
    window where None.
    """
    batch, length = like.shape[:2]
    places = torch.arange(length, device=like.device)
    if segment_ids is None and cu_seqlens is None:
        return Attend(*rotary_tables(places[None], head_dim, rotary, like.dtype))
    starts = document_starts(segment_ids, cu_seqlens, batch, length)
    cos, sin = rotary_tables(places - starts, head_dim, rotary, like.dtype)
    if cu_seqlens is not None and _has_varlen_kernel(like, head_dim):
        return Attend(cos, sin, cu_seqlens=cu_seqlens.int(), max_seqlen=max_seqlen or length)
    is_seen = (places[:, None] >= places) & (places >= starts[:, :, None])
    # Additive and in the kernel's type: a boolean mask would be converted again in every layer.
    mask = torch.zeros((), dtype=product_dtype(like), device=like.device).masked_fill(
        ~is_seen, -torch.inf
    )
    return Attend(cos, sin, mask=mask[:, None])


def _has_varlen_kernel(like: Tensor, head_dim: int) -> bool:
    """True where flash attention can run: CUDA, 16 bit, head_dim a multiple of 8 up to 256."""
    is_16_bit = like.dtype in (torch.bfloat16, torch.float16)
    return like.is_cuda and is_16_bit and head_dim % 8 == 0 and head_dim <= 256


def attention(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, attend: Attend) -> Tensor:
    """softmax(q k^T / sqrt(D)) v inside documents and causally, (B, T, H, D). H is a multiple of K.

    Backends: variable-length flash attention where `attend` has cu_seqlens; else scaled-dot-product
    attention, masked or plain causal. Measured on CPU, forward + backward, B=8 T=256 H=8 K=2 D=32
    fp32, one thread: causal 33.8 ms, this mask 34.9, boolean mask 35.3, with keys and values
    repeated for each query head 2 ms more.
    """
    heads = q_BTHD.shape[2]
    is_grouped = heads != k_BTKD.shape[2]
    if attend.cu_seqlens is not None:
        if is_grouped and not _VARLEN_HAS_GQA:
            k_BTKD, v_BTKD = _repeat_heads(k_BTKD, heads), _repeat_heads(v_BTKD, heads)
        flat = (tensor.flatten(0, 1) for tensor in (q_BTHD, k_BTKD, v_BTKD))
        keywords = _VARLEN_CAUSAL | ({"enable_gqa": is_grouped} if _VARLEN_HAS_GQA else {})
        bounds, longest = attend.cu_seqlens, attend.max_seqlen
        return varlen_attn(*flat, bounds, bounds, longest, longest, **keywords).view_as(q_BTHD)

    dtype = product_dtype(q_BTHD)
    # CUDA has grouped kernels only for 16 bit without a mask; elsewhere grouping would select the
    # unfused one.
    has_grouped = q_BTHD.device.type == "cpu" or (attend.mask is None and dtype != torch.float32)
    if is_grouped and not has_grouped:
        k_BTKD, v_BTKD = _repeat_heads(k_BTKD, heads), _repeat_heads(v_BTKD, heads)
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (q_BTHD, k_BTKD, v_BTKD))
    out = F.scaled_dot_product_attention(
        q, k, v, attend.mask, is_causal=attend.mask is None, enable_gqa=is_grouped and has_grouped
    )
    return out.transpose(1, 2).to(q_BTHD.dtype)


def _repeat_heads(x_BTKD: Tensor, heads: int) -> Tensor:
    return x_BTKD.repeat_interleave(heads // x_BTKD.shape[2], dim=2)
