"""Modules of the decoder that compute one shard and communicate with the other ranks.

    Attention, MLP   gather tokens -> products with some rows of weights        backward: scatter
    RowLinear        product with some columns -> sum, scatter tokens           backward: gather
    Embedding, Head  some rows of the vocabulary; logits are never whole
    SharedNorm       whole weight, some of the tokens or heads: gradients are summed

Without sequence parallelism tokens are whole: a gather does nothing and a scatter is an all-reduce.

Rule: each class computes the same as its parent, up to rounding; `sharding` names the other ranks.
Every rank of a tensor group makes the same calls in the same order.

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
    """This rank's place among the sharded modules; plain values, as a compiled block needs them."""

    size: int  # ranks that share a layer
    index: int
    group: str
    is_sequence: bool  # sequence parallelism: tokens between blocks are sharded too
    context: int  # ranks that share a sequence
    context_index: int
    context_group: str
    first_row: int  # of this rank's shard of the vocabulary (embedding and head)
    most_rows: int  # of the vocabulary on any rank

    def of_sequence(self, whole: Tensor) -> Tensor:
        """This rank's part of every window, (B, T) -> (B, T / context)."""
        return whole.chunk(self.context, dim=1)[self.context_index] if self.context > 1 else whole


def _start_gather(x: Tensor, sharding: Sharding) -> Tensor:
    """This rank's tokens (B, T / t, n) -> all tokens (B * T, n); call `wait` before reading."""
    rows = x.flatten(0, 1)
    return start_gather(rows, sharding.size, sharding.group) if sharding.is_sequence else rows


def _start_sum(rows: Tensor, sharding: Sharding) -> Tensor:
    """Partial sums for all tokens (B * T, n) -> sums for this rank's tokens or for all of them.

    Call `wait` before reading the result.
    """
    if sharding.is_sequence:
        return start_scatter(rows, sharding.size, sharding.group)
    return start_all_reduce(rows, sharding.group)


class _Columns(torch.autograd.Function):
    """Products of the same tokens with several weights, of which each rank holds some rows.

    Backward: the gradient of the tokens is communicated while those of the weights are computed.
    The tokens are gathered again; that costs one more gather, and no rank has to keep all tokens
    of every block.
    """

    @staticmethod
    def forward(ctx, x, sharding, *weights_then_biases):
        ctx.sharding, ctx.shape = sharding, x.shape
        count = len(weights_then_biases) // 2
        weights, biases = weights_then_biases[:count], weights_then_biases[count:]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = [bias is not None for bias in biases]
        dtype = product_dtype(x)
        rows = _start_gather(x, sharding)
        if sharding.is_sequence:
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
        sharding = ctx.sharding
        x, *weights = ctx.saved_tensors
        dtype = product_dtype(x)
        rows = _start_gather(x, sharding)
        grads = [grad.flatten(0, 1).to(dtype) for grad in grads]
        grad_rows = grads[0] @ weights[0].to(dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_rows.addmm_(grad, weight.to(dtype))
        if sharding.is_sequence:
            rows = wait(rows)
        grad_x = _start_sum(grad_rows.to(x.dtype), sharding)
        rows = rows.to(dtype)
        grad_weights = [(grad.t() @ rows).to(x.dtype) for grad in grads]
        grad_biases = [
            grad.sum(0).to(x.dtype) if has_bias else None
            for grad, has_bias in zip(grads, ctx.has_bias, strict=True)
        ]
        return wait(grad_x).view(ctx.shape), None, *grad_weights, *grad_biases


def columns(x: Tensor, sharding: Sharding, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """x (B, T / t, in) or (B, T, in) through linears with some rows -> each (B, T, its rows)."""
    if sharding.size == 1:
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    return _Columns.apply(x, sharding, *weights, *(linear.bias for linear in linears))


class _Sum(torch.autograd.Function):
    """Sum over the tensor group of partial sums (B, T, n) -> this rank's tokens, or all of them."""

    @staticmethod
    def forward(ctx, x, sharding):
        ctx.sharding = sharding
        return wait(_start_sum(x.flatten(0, 1), sharding)).unflatten(0, (x.shape[0], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not ctx.sharding.is_sequence:
            return grad, None
        rows = wait(_start_gather(grad, ctx.sharding))
        return rows.unflatten(0, (grad.shape[0], -1)), None


class _Whole(torch.autograd.Function):
    """This rank's tokens, or all of them -> all tokens (B, T, n), for the rank's own shard."""

    @staticmethod
    def forward(ctx, x, sharding):
        ctx.sharding = sharding
        if not sharding.is_sequence:
            return x.view_as(x)
        return wait(_start_gather(x, sharding)).unflatten(0, (x.shape[0], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows = wait(_start_sum(grad.flatten(0, 1), ctx.sharding))
        return rows.unflatten(0, (grad.shape[0], -1)), None


class _Shared(torch.autograd.Function):
    """A weight that is whole on every rank; its gradient is summed over the tensor group."""

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


class ShardedAttention(Attention):
    """Attention over some heads: those of this rank's rows of q, k and v, of them 1 / context."""

    sharding: Sharding

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sharding = self.sharding
        q, k, v = columns(hidden, sharding, self.q_proj, self.k_proj, self.v_proj)
        if sharding.context == 1:
            return q, k, v
        # With fewer key-value heads than ranks each head is sent to several ranks.
        copies = max(1, sharding.context * self.head_dim // k.shape[-1])
        if copies > 1:
            by_head = (k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim)))
            k, v = (x.repeat_interleave(copies, dim=2).flatten(2) for x in by_head)
        return tuple(_ToHeads.apply(x, sharding.context, sharding.context_group) for x in (q, k, v))

    def leave(self, heads: Tensor) -> Tensor:
        if self.sharding.context > 1:
            heads = _ToTokens.apply(heads, self.sharding.context, self.sharding.context_group)
        return self.o_proj(heads)


class ShardedMLP(MLP):
    """An MLP over some of the intermediate features."""

    sharding: Sharding

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return columns(hidden, self.sharding, self.gate_proj, self.up_proj)


class RowLinear(Linear):
    """A product over some of the input features; ranks are summed into the residual stream."""

    sharding: Sharding

    def forward(self, x: Tensor) -> Tensor:
        part = super().forward(x)
        return _Sum.apply(part, self.sharding) if self.sharding.size > 1 else part


class SharedNorm(RMSNorm):
    """A norm over some of the tokens or heads; its weight's gradient is summed over the group."""

    sharding: Sharding

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, _Shared.apply(self.weight, self.sharding.group), self.eps)


class ShardedEmbedding(Embedding):
    """An embedding of some token ids; the vectors of all others are zero, so the sum is complete.

    Token ids (B, T) of whole windows -> (B, T / context / t or T / context, H).
    """

    sharding: Sharding

    def forward(self, input_ids: Tensor) -> Tensor:
        sharding = self.sharding
        rows = sharding.of_sequence(input_ids)
        if sharding.size == 1:
            return super().forward(rows)
        rows = rows - sharding.first_row
        is_other = (rows < 0) | (rows >= self.weight.shape[0])
        part = F.embedding(rows.masked_fill(is_other, 0), self.weight)
        return _Sum.apply(part.masked_fill(is_other[..., None], 0), sharding)


class ShardedHead(Head):
    """The head for some token ids.

    The loss takes three numbers per token from the other ranks, and no logits.
    """

    sharding: Sharding

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, num_items: Tensor | int | None = None
    ) -> Tensor:
        assert labels is not None, "logits of a sharded model are never whole: give labels"
        sharding = self.sharding
        labels = sharding.of_sequence(labels)
        if sharding.size == 1:
            return cross_entropy(hidden, self.weight, labels, num_items)
        # Ranks communicate once per chunk, so chunks are equal also where one rank has a row more.
        chunk = chunk_tokens(sharding.most_rows, hidden.device.type)
        judge = functools.partial(judge_part, sharding)
        whole = _Whole.apply(hidden, sharding)
        return cross_entropy(whole, self.weight, labels, num_items, judge, chunk)


def judge_part(
    sharding: Sharding, logits: Tensor, target: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """`loss.judge` for logits (n, own rows) of one shard (Megatron-LM, Shoeybi et al., 2019).

    The losses (n, 1) are complete and equal on all ranks; the gradient is that of the shard.
    """
    rows = target - sharding.first_row
    is_own = (rows >= 0) & (rows < logits.shape[1])
    rows = rows.clamp(0, logits.shape[1] - 1)
    largest = all_reduce(logits.amax(-1, keepdim=True), sharding.group, "max")
    chosen = torch.where(is_own, logits.gather(1, rows), 0.0)
    powers = logits.sub_(largest).exp_()
    sums = torch.cat((powers.sum(-1, keepdim=True), chosen), dim=1)
    total, chosen = all_reduce(sums, sharding.group).split(1, dim=1)
    losses = largest + total.log() - chosen
    if not with_gradients:
        return losses, None
    return losses, powers.div_(total).scatter_add_(1, rows, -is_own.float())
