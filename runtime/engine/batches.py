"""Moves micro-batches to the device, and gathers small arrays of all ranks.

Rule: no copy to the device waits for the device. On CUDA tensors are pinned first, so the copy is
asynchronous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TENSORS = ("input_ids", "labels", "segment_ids", "cu_seqlens")


def to_device(batch: Any, device: torch.device) -> dict[str, Any]:
    """The decoder's keyword arguments for one micro-batch of `data.stream.stream`.

    input_ids, labels: (micro_batch, seq_len) int64; segment_ids the same, int32; cu_seqlens: int32
    of fixed length; max_seqlen stays a Python int, so that no kernel launch has to ask the device.
    """
    moved: dict[str, Any] = {"max_seqlen": batch.max_seqlen}
    for name in TENSORS:
        tensor = torch.from_numpy(getattr(batch, name))
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        moved[name] = tensor
    return moved


def gather_hashes(local: np.ndarray, device: torch.device) -> np.ndarray:
    """The 64-bit hashes of all ranks, in rank order: uint64 (n,) -> (ranks, n).

    A collective that waits for the device; `data.stream.collect` calls it every few steps.
    """
    mine = torch.from_numpy(local.view(np.int64)).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu().numpy().view(np.uint64)
