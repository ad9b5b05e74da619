"""Bytes that autograd keeps between forward and backward, counted while a step runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class Held:
    """A saved tensor; its end is the end of what it holds."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Kept:
    """A context manager. `most`: the largest sum of unique storages that lived at one time.

    Not counted: weights; masks of (seq_len x seq_len), which only CPUs make; what is saved while a
    block runs again in backward.
    """

    def __init__(self, model: nn.Module, seq_len: int):
        self._model, self._mask = model, (seq_len, seq_len)
        self._uses: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._now = self.most = 0

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Held:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        weights = {weight.untyped_storage().data_ptr() for weight in self._model.parameters()}
        if address in weights or (tensor.dim() == 4 and tuple(tensor.shape[-2:]) == self._mask):
            return tensor
        self._uses[address] = self._uses.get(address, 0) + 1
        if self._uses[address] == 1:
            self._bytes[address] = storage.nbytes()
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
        held = Held(tensor)
        weakref.finalize(held, self._gone, address)
        return held

    def _unpack(self, saved: torch.Tensor | Held) -> torch.Tensor:
        return saved.tensor if isinstance(saved, Held) else saved

    def _gone(self, address: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self._now -= self._bytes[address]
