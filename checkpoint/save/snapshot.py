"""A copy, in host memory, of what a rank writes, so that training can go on.

    live fragments --take--> the same fragments over the copy, in the order of the data file

Rule: one snapshot exists at a time, in memory that is allocated once. It has as many bytes as this
rank's file (fp32 weights and optimizer states: 12 bytes with AdamW for each parameter that the rank
owns). With CUDA that memory is page-locked, so that the copy runs at the speed of the bus. Units:
bytes, seconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import torch

from checkpoint.format.index import Fragment, describe
from checkpoint.format.storage import runs


class Snapshot:
    """Host memory for one state of this rank, reused for every save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.made_s = 0.0  # part of the last call that allocated memory, which happens once

    def take(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """Copy those of `fragments` that are written; returns when live memory may change again.

        The copies of the call before are overwritten. Raises RuntimeError where memory is too
        small.
        """
        # Order the pieces as in the data file, and allocate memory for them once.
        _, ordered = describe(fragments)
        sizes = [one.count * one.tensor.element_size() for one in ordered]
        on_cuda = any(one.tensor.is_cuda for one in ordered)
        began = time.perf_counter()
        if sum(sizes) > len(self._memory):
            self._memory = host_memory(sum(sizes), on_cuda)
        self.made_s = time.perf_counter() - began
        # Copy neighbouring pieces together, asynchronously on CUDA, then wait once.
        at = 0
        for run in runs(one.tensor for one in ordered):
            self._memory[at : at + len(run)].copy_(run, non_blocking=True)
            at += len(run)
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        # Give each fragment its part of the copy.
        copies, at = [], 0
        for one, size in zip(ordered, sizes, strict=True):
            tensor = self._memory[at : at + size].view(one.tensor.dtype)
            copies.append(dataclasses.replace(one, tensor=tensor))
            at += size
        return copies


def host_memory(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    """Allocate uint8 (num_bytes,) with all pages present. Raises RuntimeError where this fails.

    torch's own pinned memory comes in powers of two, up to twice what is asked for. So the pages
    are locked by a direct call of CUDA, and stay locked until the process ends.
    """
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    if is_pinned and num_bytes:
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"{num_bytes} bytes of host memory could not be locked ({status})")
    return memory
