"""Modules of the decoder that work on a part, and what they say to the other ranks.

    Attention, MLP   gather tokens -> products with some rows of weights        backward: scatter
    RowLinear        product with some columns -> sum, scatter tokens           backward: gather
    Embedding, Head  some words of the vocabulary; logits are never whole
    SharedNorm       whole weight, some of the tokens or heads: gradients are summed

Without sequence parallelism tokens are whole, a gather is nothing and a scatter an all-reduce. The
one rule: each class computes what its parent does, to rounding; `cut` says with whom. Every rank of
a tensor group makes the same calls in the same order.

Letters: B batch, T tokens of a window, t ranks of the tensor axis, H hidden_size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.cost import chunk_tokens
from model.decoder import MLP, Attention
from model.layers import Embedding, Linear, RMSNorm, product_dtype, rms_norm
from model.loss import Head, cross_entropy
from parallel.collectives import (
    all_reduce,
    start_all_reduce,
    start_exchange,
    start_gather,
    start_scatter,
    wait,
)


class Sharding(NamedTuple):
    """This rank's part of the cut modules; plain values, as a compiled block wants them."""

    size: int  # ranks that share a layer
    index: int
    group: str
    is_sequence: bool  # whether tokens between blocks are cut, too
    context: int  # ranks that share a sequence
    context_index: int
    context_group: str
    first_word: int  # of this rank's rows of embedding and head
    most_words: int  # that a rank has

    def of_sequence(self, whole: Tensor) -> Tensor:
        """This rank's part of every window, (B, T) -> (B, T / context)."""
        return whole.chunk(self.context, dim=1)[self.context_index] if self.context > 1 else whole


def _start_gather(x: Tensor, cut: Sharding) -> Tensor:
    """This rank's tokens (B, T / t, n) -> all tokens (B * T, n), on their way."""
    rows = x.flatten(0, 1)
    return start_gather(rows, cut.size, cut.group) if cut.is_sequence else rows


def _start_sum(rows: Tensor, cut: Sharding) -> Tensor:
    """Parts of the sum of all tokens (B * T, n) -> this rank's tokens, or all, on their way."""
    if cut.is_sequence:
        return start_scatter(rows, cut.size, cut.group)
    return start_all_reduce(rows, cut.group)


class _Columns(torch.autograd.Function):
    """Products of the same tokens with several weights of which each rank has some rows.

    Backward: the gradient of the tokens travels while those of the weights are computed, and the
    tokens are gathered again, which costs a gather and saves holding all tokens of every block.
    """

    @staticmethod
    def forward(ctx, x, cut, *weights_then_biases):
        ctx.cut, ctx.shape = cut, x.shape
        count = len(weights_then_biases) // 2
        weights, biases = weights_then_biases[:count], weights_then_biases[count:]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = [bias is not None for bias in biases]
        dtype = product_dtype(x)
        rows = _start_gather(x, cut)
        if cut.is_sequence:
            rows = wait(rows)
        rows = rows.to(dtype)
        products = []
        for weight, bias in zip(weights, biases, strict=True):
            wide = None if bias is None else bias.to(dtype)
            product = F.linear(rows, weight.to(dtype), wide).to(x.dtype)
            products.append(product.unflatten(0, (x.shape[0], -1)))
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        cut = ctx.cut
        x, *weights = ctx.saved_tensors
        dtype = product_dtype(x)
        rows = _start_gather(x, cut)
        grads = [grad.flatten(0, 1).to(dtype) for grad in grads]
        grad_rows = grads[0] @ weights[0].to(dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_rows.addmm_(grad, weight.to(dtype))
        if cut.is_sequence:
            rows = wait(rows)
        grad_x = _start_sum(grad_rows.to(x.dtype), cut)
        rows = rows.to(dtype)
        grad_weights = [(grad.t() @ rows).to(x.dtype) for grad in grads]
        grad_biases = [
            grad.sum(0).to(x.dtype) if has_bias else None
            for grad, has_bias in zip(grads, ctx.has_bias, strict=True)
        ]
        return wait(grad_x).view(ctx.shape), None, *grad_weights, *grad_biases


def columns(x: Tensor, cut: Sharding, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """x (B, T / t, in) or (B, T, in) through linears with some rows -> each (B, T, its rows)."""
    if cut.size == 1:
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    return _Columns.apply(x, cut, *weights, *(linear.bias for linear in linears))


class _Sum(torch.autograd.Function):
    """Sum over the tensor group of parts (B, T, n) -> this rank's tokens, or all of them."""

    @staticmethod
    def forward(ctx, x, cut):
        ctx.cut = cut
        return wait(_start_sum(x.flatten(0, 1), cut)).unflatten(0, (x.shape[0], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not ctx.cut.is_sequence:
            return grad, None
        rows = wait(_start_gather(grad, ctx.cut))
        return rows.unflatten(0, (grad.shape[0], -1)), None


class _Whole(torch.autograd.Function):
    """This rank's tokens, or all of them -> all (B, T, n), each rank using them for its part."""

    @staticmethod
    def forward(ctx, x, cut):
        ctx.cut = cut
        if not cut.is_sequence:
            return x.view_as(x)
        return wait(_start_gather(x, cut)).unflatten(0, (x.shape[0], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows = wait(_start_sum(grad.flatten(0, 1), ctx.cut))
        return rows.unflatten(0, (grad.shape[0], -1)), None


class _Shared(torch.autograd.Function):
    """A weight that every rank has, its gradient summed over the tensor group."""

    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _ToHeads(torch.autograd.Function):
    """(B, T / c, heads * D), own tokens -> (B, T, heads / c * D), own heads; c context ranks."""

    @staticmethod
    def forward(ctx, x, size, group):
        ctx.size, ctx.group = size, group
        return _to_heads(x, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _to_tokens(grad, ctx.size, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    """The inverse of `_ToHeads`."""

    @staticmethod
    def forward(ctx, x, size, group):
        ctx.size, ctx.group = size, group
        return _to_tokens(x, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _to_heads(grad, ctx.size, ctx.group), None, None


def _to_heads(x: Tensor, size: int, group: str) -> Tensor:
    batch, length, width = x.shape
    parts = x.view(batch, length, size, -1).permute(2, 0, 1, 3)  # heads first: one run per rank
    received = wait(start_exchange(parts.reshape(-1, width // size), size, group))
    by_token = received.view(size, batch, length, -1).transpose(0, 1)
    return by_token.reshape(batch, size * length, -1)


def _to_tokens(x: Tensor, size: int, group: str) -> Tensor:
    batch, length, width = x.shape
    parts = x.view(batch, size, length // size, width).transpose(0, 1)
    received = wait(start_exchange(parts.reshape(-1, width), size, group))
    by_head = received.view(size, batch, length // size, width).permute(1, 2, 0, 3)
    return by_head.reshape(batch, length // size, -1)


class CutAttention(Attention):
    """Some heads: those of this rank's rows of q, k and v, of them 1 / context."""

    cut: Sharding

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cut = self.cut
        q, k, v = columns(hidden, cut, self.q_proj, self.k_proj, self.v_proj)
        if cut.context == 1:
            return q, k, v
        # Fewer key-value heads than ranks: each goes to several.
        copies = max(1, cut.context * self.head_dim // k.shape[-1])
        if copies > 1:
            by_head = (k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim)))
            k, v = (x.repeat_interleave(copies, dim=2).flatten(2) for x in by_head)
        return tuple(_ToHeads.apply(x, cut.context, cut.context_group) for x in (q, k, v))

    def leave(self, heads: Tensor) -> Tensor:
        if self.cut.context > 1:
            heads = _ToTokens.apply(heads, self.cut.context, self.cut.context_group)
        return self.o_proj(heads)


class CutMLP(MLP):
    """Some of the intermediate features."""

    cut: Sharding

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return columns(hidden, self.cut, self.gate_proj, self.up_proj)


class RowLinear(Linear):
    """Some of the input features; the sum over ranks goes to the residual stream."""

    cut: Sharding

    def forward(self, x: Tensor) -> Tensor:
        part = super().forward(x)
        return _Sum.apply(part, self.cut) if self.cut.size > 1 else part


class SharedNorm(RMSNorm):
    """A norm that sees some of the tokens or heads."""

    cut: Sharding

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, _Shared.apply(self.weight, self.cut.group), self.eps)


class CutEmbedding(Embedding):
    """Some words: zero for all others, and the sum over ranks has every word once.

    word numbers (B, T), of whole windows -> (B, T / context / t or T / context, H).
    """

    cut: Sharding

    def forward(self, input_ids: Tensor) -> Tensor:
        cut = self.cut
        words = cut.of_sequence(input_ids)
        if cut.size == 1:
            return super().forward(words)
        words = words - cut.first_word
        is_other = (words < 0) | (words >= self.weight.shape[0])
        part = F.embedding(words.masked_fill(is_other, 0), self.weight)
        return _Sum.apply(part.masked_fill(is_other[..., None], 0), cut)


class CutHead(Head):
    """Some words. The loss needs three numbers per token of the other ranks, and no logits."""

    cut: Sharding

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, num_items: Tensor | int | None = None
    ) -> Tensor:
        assert labels is not None, "logits of a cut model are never whole: give labels"
        cut = self.cut
        labels = cut.of_sequence(labels)
        if cut.size == 1:
            return cross_entropy(hidden, self.weight, labels, num_items)
        # The same chunks on every rank, also where one has a word more: each talks once per chunk.
        chunk = chunk_tokens(cut.most_words, hidden.device.type)
        judge = functools.partial(judge_part, cut)
        whole = _Whole.apply(hidden, cut)
        return cross_entropy(whole, self.weight, labels, num_items, judge, chunk)


def judge_part(
    cut: Sharding, logits: Tensor, target: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """`loss.judge` of logits (n, own words) that are a part (Megatron-LM, Shoeybi et al., 2019).

    The losses (n, 1) are whole and equal on all ranks, the gradient is that of the part.
    """
    words = target - cut.first_word
    is_own = (words >= 0) & (words < logits.shape[1])
    words = words.clamp(0, logits.shape[1] - 1)
    largest = all_reduce(logits.amax(-1, keepdim=True), cut.group, "max")
    chosen = torch.where(is_own, logits.gather(1, words), 0.0)
    powers = logits.sub_(largest).exp_()
    sums = torch.cat((powers.sum(-1, keepdim=True), chosen), dim=1)
    total, chosen = all_reduce(sums, cut.group).split(1, dim=1)
    losses = largest + total.log() - chosen
    if not with_gradients:
        return losses, None
    return losses, powers.div_(total).scatter_add_(1, words, -is_own.float())
