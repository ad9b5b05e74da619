"""Counts the bytes that autograd keeps between forward and backward of a training step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class SavedTensor:
    """A saved tensor. When it is freed, the bytes that it keeps are no longer counted."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class AutogradBytes:
    """Context manager that counts. `most` is the largest sum of unique storages at one time.

    Not counted: weights; masks of (seq_len, seq_len), which only CPUs make; tensors that are saved
    while a block is recomputed in backward.
    """

    def __init__(self, model: nn.Module, seq_len: int):
        self._model, self._mask = model, (seq_len, seq_len)
        self._uses: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._now = self.most = 0

    def __enter__(self) -> AutogradBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
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
        held = SavedTensor(tensor)
        weakref.finalize(held, self._gone, address)
        return held

    def _unpack(self, saved: torch.Tensor | SavedTensor) -> torch.Tensor:
        return saved.tensor if isinstance(saved, SavedTensor) else saved

    def _gone(self, address: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self._now -= self._bytes[address]
