"""Collectives of the sharded modules, in the form that a compiled block may contain.

They are functional, take the name of a group, and have two halves: `start_...` launches the
collective, `wait` completes it, and computation between the two overlaps with it. Tensors are split
along their flattened leading dims: rank i of n holds the i-th of n equal runs of tokens of the
flattened batch, so every gather is one contiguous copy.

Rule: what a `start_...` returns must not be read before `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

COUNTED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_OPS = torch.ops._c10d_functional


def intercept(wrap: Callable[[str, Callable], Callable]) -> None:
    """Replace every operator of `COUNTED` by `wrap(name, operator)`, for counting bytes."""
    global _OPS
    wrapped = {name: wrap(name, getattr(_OPS, name)) for name in COUNTED}
    _OPS = SimpleNamespace(**wrapped, wait_tensor=_OPS.wait_tensor)


def intercept_wait(wrap: Callable[[Callable], Callable]) -> None:
    """Replace the operator behind `wait` by `wrap(operator)`, for timing."""
    global _OPS
    others = {name: getattr(_OPS, name) for name in COUNTED}
    _OPS = SimpleNamespace(**others, wait_tensor=wrap(_OPS.wait_tensor))


def wait(tensor: Tensor) -> Tensor:
    """The completed result of a `start_...`. On CUDA the stream waits, not the host."""
    return _OPS.wait_tensor(tensor)


def start_all_reduce(tensor: Tensor, group: str, op: str = "sum") -> Tensor:
    """The sum (or "max") over the group, on every rank; bit-equal on all of them."""
    return _OPS.all_reduce(tensor.contiguous(), op, group)


def start_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """(n, ...) of every rank -> (size * n, ...), ordered by rank."""
    return _OPS.all_gather_into_tensor(tensor.contiguous(), size, group)


def start_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """(size * n, ...) -> this rank's (n, ...) of the sum over the group."""
    return _OPS.reduce_scatter_tensor(tensor.contiguous(), "sum", size, group)


def start_exchange(tensor: Tensor, size: int, group: str) -> Tensor:
    """All-to-all of (size * n, ...): run i goes to rank i; run i of the result came from it."""
    runs = [tensor.shape[0] // size] * size
    return _OPS.all_to_all_single(tensor.contiguous(), runs, runs, group)


def all_reduce(tensor: Tensor, group: str, op: str = "sum") -> Tensor:
    """The sum (or "max") over the group, on every rank: `start_all_reduce` and `wait` in one."""
    return wait(start_all_reduce(tensor, group, op))
