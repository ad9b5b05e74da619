"""A copy of what a rank writes, in host memory of its own, so that training may go on.

    live fragments --take--> the same fragments over the copy, in the order of the data file

The one rule: one snapshot exists at a time, in memory that is made once: as many bytes as this
rank's file has (fp32 weights and two moments of Adam: 12 for each parameter that the rank owns).
On CUDA that memory is page-locked, so that the copy runs at the speed of the bus. Units: bytes,
seconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import torch

from checkpoint.format.index import Fragment, describe
from checkpoint.format.storage import runs


class Snapshot:
    """Host memory for one state of this rank, used again for every save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.made_s = 0.0  # of the last call: making the memory, which happens once

    def take(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """Copy what is written of `fragments`; returns when the live memory may change again.

        The copies of the call before are overwritten. Raises RuntimeError where there is not
        enough memory.
        """
        _, ordered = describe(fragments)
        sizes = [one.count * one.tensor.element_size() for one in ordered]
        on_cuda = any(one.tensor.is_cuda for one in ordered)
        began = time.perf_counter()
        if sum(sizes) > len(self._memory):
            self._memory = host_memory(sum(sizes), on_cuda)
        self.made_s = time.perf_counter() - began
        at = 0
        for run in runs(one.tensor for one in ordered):
            self._memory[at : at + len(run)].copy_(run, non_blocking=True)
            at += len(run)
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        copies, at = [], 0
        for one, size in zip(ordered, sizes, strict=True):
            tensor = self._memory[at : at + size].view(one.tensor.dtype)
            copies.append(dataclasses.replace(one, tensor=tensor))
            at += size
        return copies


def host_memory(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    """uint8 (num_bytes,), its pages present. Raises RuntimeError where it cannot be had.

    torch's own pinned memory comes in powers of two, which may be twice what is asked for; so the
    pages are locked by hand, and stay so for the attempt of the process.
    """
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    if is_pinned and num_bytes:
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"{num_bytes} bytes of host memory could not be locked ({status})")
    return memory
