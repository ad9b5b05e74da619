"""The collectives of cut modules, in the form that a compiled block may contain.

The one rule: functional, by the name of a group, and in two halves - a `start_` launches and gives
a tensor that must not be read before `wait` - so what lies between them overlaps with it. Tensors
are cut along their flattened leading dims: rank i of n holds the i-th of n equal runs of tokens of
the flattened batch, which makes every gather one contiguous copy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

SAID = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_OPS = torch.ops._c10d_functional


def intercept(wrap: Callable[[str, Callable], Callable]) -> None:
    """From now on every operator of `SAID` is `wrap(name, operator)`: for counting."""
    global _OPS
    wrapped = {name: wrap(name, getattr(_OPS, name)) for name in SAID}
    _OPS = SimpleNamespace(**wrapped, wait_tensor=_OPS.wait_tensor)


def intercept_wait(wrap: Callable[[Callable], Callable]) -> None:
    """From now on `wait` goes through `wrap(operator)`: for timing."""
    global _OPS
    said = {name: getattr(_OPS, name) for name in SAID}
    _OPS = SimpleNamespace(**said, wait_tensor=wrap(_OPS.wait_tensor))


def wait(tensor: Tensor) -> Tensor:
    """The result of a `start_`, complete; on CUDA in the order of the stream, without the host."""
    return _OPS.wait_tensor(tensor)


def start_all_reduce(tensor: Tensor, group: str, op: str = "sum") -> Tensor:
    """The sum (or "max") over the group, on every rank; bit-equal on all of them."""
    return _OPS.all_reduce(tensor.contiguous(), op, group)


def start_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """(n, ...) of every rank -> (size * n, ...), by rank."""
    return _OPS.all_gather_into_tensor(tensor.contiguous(), size, group)


def start_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """(size * n, ...) -> this rank's (n, ...) of the sum over the group."""
    return _OPS.reduce_scatter_tensor(tensor.contiguous(), "sum", size, group)


def start_exchange(tensor: Tensor, size: int, group: str) -> Tensor:
    """(size * n, ...): run i goes to rank i; what came from rank i is run i of the result."""
    runs = [tensor.shape[0] // size] * size
    return _OPS.all_to_all_single(tensor.contiguous(), runs, runs, group)


def all_reduce(tensor: Tensor, group: str, op: str = "sum") -> Tensor:
    """`start_all_reduce`, complete."""
    return wait(start_all_reduce(tensor, group, op))
