"""Reads all tensors of a checkpoint, for tests that compare runs."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoint.comm import Alone
from checkpoint.load.choosing import at_step
from checkpoint.load.restoring import open_checkpoint


def tensors_of(run: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """Read all full tensors of a checkpoint."""
    source = open_checkpoint(at_step(run, step, Alone()))
    from checkpoint.format.index import Fragment
    from checkpoint.format.rectangles import Box

    found = {}
    for name, number in source.index.tensors.items():
        shape = source.index.shapes[number]
        for kind in source.index.kinds(name):
            tensor = torch.empty(torch.Size(shape).numel())
            source.fill([Fragment(name, kind, Box(shape, shape), 0, tensor)])
            found[name, kind] = tensor
    return found
