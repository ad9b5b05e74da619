"""The small modules of a decoder block: matrix product, embedding, RMSNorm.

Weights are left uninitialised: every value comes from `model.init` or a checkpoint, and drawing
them here first would cost minutes at 7B.

Rule: a module reads only its own weights, inside its own forward. ZeRO-3 gathers a weight around
exactly that call, and tensor parallelism replaces these modules by sharded ones with the same call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# True where oneDNN runs bf16 matrix products on this CPU (AVX-512 or Arm bf16); a build of torch
# without oneDNN has no such operator. Read once, because a compiled block must not call it.
_bf16_probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
CPU_HAS_BF16_PRODUCTS = bool(_bf16_probe and _bf16_probe())


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which matrix products of `tensor` run.

    It is the tensor's own dtype, but fp32 for bf16 on a CPU without bf16 units. There torch falls
    back to a scalar loop, up to a hundred times slower than fp32 (2048x8192 by 8192x256 on one AVX2
    core: 10.7 s against 0.1 s). Products in fp32, rounded once, are also the more exact ones.
    """
    is_slow = tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
    return torch.float32 if is_slow and not CPU_HAS_BF16_PRODUCTS else tensor.dtype


class _WideProduct(torch.autograd.Function):
    """x @ weight.T + bias, computed in fp32 and stored in the dtype of the inputs."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(
            x.dtype
        )

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_rows = grad.float().flatten(0, -2)
        grad_x = (grad_rows @ weight.float()).view_as(x).to(x.dtype)
        grad_weight = (grad_rows.t() @ x.float().flatten(0, -2)).to(weight.dtype)
        grad_bias = grad_rows.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in `product_dtype`: x (..., in), weight (out, in) -> (..., out), dtype of x."""
    if product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    return _WideProduct.apply(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` with uninitialised weights and products in `product_dtype`."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with uninitialised weights."""

    def reset_parameters(self) -> None:
        pass


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps x and one number per row for backward.

    Autograd's own backward would keep two fp32 copies of x.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad * weight
        grad_x = (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True)) * scale
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in the type of x."""
    # torch's kernel keeps the same two tensors and computes the same. torch 2.11 compiles
    # `_RMSNorm` with silently wrong gradients: it loses what forward saved beside its inputs.
    if x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich, 2019).

    Computed in fp32 and rounded once; Llama's rounds 16-bit activations a second time, before the
    product with the weight.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
