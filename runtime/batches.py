"""Micro-batches on their way to the device, and small arrays on their way between ranks.

The one rule: no copy here waits for the device. Tensors are pinned first on CUDA, so the copy to it
is asynchronous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel.layout import Layout
from runtime.process import Shared

TENSORS = ("input_ids", "labels", "segment_ids", "cu_seqlens")


def to_device(batch: Any, device: torch.device) -> dict[str, Any]:
    """The decoder's keyword arguments for one micro-batch of `data.stream`.

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


def gather_hashes(local: np.ndarray, device: torch.device, layout: Layout) -> np.ndarray:
    """The 64-bit hashes of each data rank, in order: uint64 (n,) -> (data, n). A collective call.

    Raises UserError on every rank where ranks that share a data coordinate hold other samples.
    """
    mine = torch.from_numpy(local.view(np.int64)).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    by_rank = torch.stack(everyone).cpu().numpy().view(np.uint64)
    data_of = np.array([layout.coordinates(rank).data for rank in range(layout.world)])
    first = np.array([np.flatnonzero(data_of == data)[0] for data in range(layout.data)])
    strays = np.flatnonzero((by_rank != by_rank[first[data_of]]).any(axis=1))
    if len(strays):
        rank = int(strays[0])
        raise Shared(
            f"ranks {first[data_of[rank]]} and {rank} share data coordinate {data_of[rank]} but"
            " trained on different samples: their hosts do not hold the same corpus"
        )
    return by_rank[first]
