"""Counts what this rank sends and receives: every collective of torch.distributed, with its bytes.

    counter = Counter()                 before deepspeed is imported, which keeps some functions
    counter.take() -> [Call, ...]       what was called since; `bytes_by_kind` sums them

Rule: it counts calls and estimates nothing. The bytes of a call are its payload: the larger side as
this rank sees it (the gathered tensor, the tensor before it is scattered), whatever algorithm
moves it. With n ranks a ring sends 2 (n-1)/n of the payload of an all_reduce and (n-1)/n of that of
a gather or a scatter.

Parallel modules call the functional form (`parallel.collectives`), which is counted as well. Not
counted: collectives that torch issues inside a call (only the outermost counts), those of compiled
blocks, which no Python function sees, and those of a save in a thread, which belong to no step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from checkpoint.save.background import is_writer
from parallel import collectives

# Name of torch's function -> kind of collective.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
}
FUNCTIONAL = "functional "  # prefix of calls in the functional form


class Call(NamedTuple):
    """One collective: `function` is torch's name of it, `ranks` the size of its group."""

    kind: str
    function: str
    bytes: int
    ranks: int
    in_backward: bool


class Counter:
    """Wraps the functions of torch.distributed; one per process, until the process ends."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._outer = threading.local()  # autograd may call from a thread of its own
        self._in_backward = False
        for name in COLLECTIVES:
            wrapped = self._wrap(name, getattr(dist, name))
            setattr(dist, name, wrapped)
            # P2POp takes only what torch's own module knows as isend and irecv.
            setattr(distributed_c10d, name, wrapped)
        collectives.intercept(self._wrap_functional)
        self._watch_backward()

    def take(self) -> list[Call]:
        """The calls since the last `take`, in order."""
        taken, self._calls = self._calls, []
        return taken

    def _wrap(self, name: str, function: Any):
        @functools.wraps(function)
        def counted(*arguments, **keywords):
            if getattr(self._outer, "is_inside", False) or is_writer():
                return function(*arguments, **keywords)
            self._outer.is_inside = True
            try:
                given = [*arguments, *keywords.values()]
                group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
                kind, ranks = COLLECTIVES[name], dist.get_world_size(group)
                if ranks > 1:  # alone in a group, a rank sends nothing
                    self._calls.append(Call(kind, name, payload(given), ranks, self._in_backward))
                return function(*arguments, **keywords)
            finally:
                self._outer.is_inside = False

        return counted

    def _wrap_functional(self, name: str, function: Any):
        """Wrap `function(tensor, ..., group name)`, which returns its result as a tensor."""

        def counted(*arguments):
            result = function(*arguments)
            if not torch.compiler.is_compiling():
                ranks = dist.get_world_size(distributed_c10d._resolve_process_group(arguments[-1]))
                size = payload([arguments[0], result])
                call = Call(COLLECTIVES[name], FUNCTIONAL + name, size, ranks, self._in_backward)
                self._calls.append(call)
            return result

        return counted

    def _watch_backward(self) -> None:
        """Keep in `_in_backward` whether autograd runs a backward pass."""
        run = torch.autograd.backward

        def backward(*arguments, **keywords):
            self._in_backward = True
            try:
                return run(*arguments, **keywords)
            finally:
                self._in_backward = False

        torch.autograd.backward = backward


def payload(values: Iterable[Any]) -> int:
    """Bytes of the largest tensor, or list of tensors, among a call's arguments."""
    largest = 0
    for value in values:
        tensors = value if isinstance(value, list | tuple) else [value]
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        largest = max(largest, sum(t.numel() * t.element_size() for t in tensors))
    return largest


def bytes_by_kind(calls: Iterable[Call]) -> dict[str, int]:
    """Bytes of each kind of call, sorted by the name of the kind."""
    total: dict[str, int] = {}
    for call in calls:
        total[call.kind] = total.get(call.kind, 0) + call.bytes
    return dict(sorted(total.items()))
