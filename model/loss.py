"""Next-token cross-entropy that never holds all logits.

Logits of N tokens are N * vocab_size numbers, with 128k rows more than the rest of the model. Here
a chunk of tokens goes through the head, its loss and both gradients are computed at once, and its
logits are freed. The head needs three matrix products, as in the plain form; recomputing logits in
backward would need a fourth. The price: the gradient of the head's weight exists from the forward
on, when activations peak. Without gradients (evaluation) only the first product runs.

Rule: the loss is the sum over targets divided by `num_items`, in fp32, and the caller gives
`num_items` (targets of the global batch). So neither padding nor the split of a batch into
micro-batches changes the weight of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.cost import chunk_tokens
from model.layers import Linear, linear, product_dtype

IGNORED = -100  # label of a token without target; the value of torch and Transformers


def judge(logits: Tensor, target: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """-log softmax(logits)[target] and its gradient in logits, softmax - one-hot, or None.

    logits (n, vocab_size) fp32, target (n, 1) int64 -> (n, 1) and (n, vocab_size). The gradient
    may overwrite the logits. Tensor parallelism gives `cross_entropy` another function, because a
    rank holds only some rows of the weight.
    """
    if not with_gradients:
        return logits.logsumexp(-1, keepdim=True) - logits.gather(1, target), None
    probabilities, losses = _softmax_and_losses(logits, target)
    return losses, probabilities.scatter_add_(1, target, -torch.ones_like(losses))


Judge = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items: Tensor | int | None = None,
    judge: Judge = judge,
    chunk: int | None = None,
) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[label] over labels != IGNORED, divided by num_items.

    hidden (..., hidden_size), weight (vocab_size, hidden_size), labels (...) int64: the target of
    the hidden state in the same place. Returns an fp32 scalar; without any target it is 0, not NaN.
    num_items: by default the number of targets in labels. chunk: tokens whose logits exist at one
    time, by default chosen by the size of weight.
    """
    labels = labels.reshape(-1)
    if num_items is None:
        num_items = (labels != IGNORED).sum().clamp(min=1)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device.type)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedCrossEntropy.apply(hidden, weight, labels, judge, chunk) / num_items
    return _run(hidden, weight, labels, judge, chunk, False)[0] / num_items


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of losses; its gradients are made in forward and only scaled in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, judge, chunk):
        loss, grad_hidden, grad_weight = _run(hidden, weight, labels, judge, chunk, True)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # In place: a copy would double the largest gradient of the model. A second backward over
        # the same graph is refused by autograd, which sees that the saved tensors changed.
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None, None


def _run(
    hidden: Tensor, weight: Tensor, labels: Tensor, judge: Judge, size: int, with_gradients: bool
):
    dtype = product_dtype(hidden)
    wide_weight = weight.to(dtype)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if with_gradients else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_gradients else None
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        chunk, target = hidden[rows].to(dtype), labels[rows, None]
        is_target = target != IGNORED
        target = target.clamp(min=0)
        logits = F.linear(chunk, wide_weight).float()
        losses, grad_logits = judge(logits, target, with_gradients)
        loss += (losses * is_target).sum()
        if grad_logits is None:
            continue
        # Rows without target are zeroed on the narrow side of each product.
        grad_logits = grad_logits.to(dtype)
        grad_hidden[rows] = (grad_logits @ wide_weight) * is_target
        _add_product(grad_weight, grad_logits, chunk * is_target)
    if with_gradients:
        grad_weight = grad_weight.to(weight.dtype)
    return loss, grad_hidden, grad_weight


def _softmax_and_losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits) and -log of its target entries, (n, 1). logits are fp32.

    log(sum(exp)) is taken from the largest entry, whose probability cannot underflow, so there is
    one exponential per logit.
    """
    largest, chosen = logits.amax(-1, keepdim=True), logits.gather(1, target)
    probabilities = torch.softmax(logits, dim=-1)
    log_sum = largest - probabilities.amax(-1, keepdim=True).log()
    return probabilities, log_sum - chosen


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, the sum over chunks kept in fp32 also for 16-bit products."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        total += left.t() @ right


class Head(Linear):
    """The output projection, which also computes the loss.

    Only inside this call is its weight whole under ZeRO-3, tied or not. head(hidden) -> logits
    (..., vocab_size); head(hidden, labels, num_items) -> fp32 scalar, see `cross_entropy`.
    """

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, num_items: Tensor | int | None = None
    ) -> Tensor:
        if labels is None:
            return linear(hidden, self.weight)
        return cross_entropy(hidden, self.weight, labels, num_items)
