"""Small tensors and their fragments on several ranks, for tests of checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from checkpoint.format.index import Fragment
from checkpoint.format.rectangles import Box

KINDS = ("weight", "exp_avg", "exp_avg_sq")


def full_tensors(shapes, seed=0):
    """Map (name, kind) to a full tensor in which all elements differ."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, kind): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
        for kind in KINDS
    }


def cut_flat(tensors, world):
    """Split tensors like ZeRO-3: flat elements in equal parts, of which the last may be shorter."""
    return _cut(tensors, world, lambda full: [(Box(full, full), r, world) for r in range(world)])


def _cut(tensors, world, parts):
    ranks = [[] for _ in range(world)]
    for (name, kind), tensor in tensors.items():
        for rank, part in enumerate(parts(tuple(tensor.shape))):
            if part is None:
                continue
            box, number, of = part
            own = tensor
            if box.dim is not None:
                own = tensor.narrow(box.dim, box.offset, box.shape[box.dim])
            flat = own.reshape(-1)
            size = -(-flat.numel() // of)
            start = min(number * size, flat.numel())
            piece = flat[start : start + size].clone()
            ranks[rank].append(Fragment(name, kind, box, start, piece))
    return ranks


def blank(fragments):
    """Copy of the fragments whose memory is full of NaN."""
    return [
        Fragment(f.name, f.kind, f.box, f.start, torch.full_like(f.tensor, math.nan))
        for f in fragments
    ]


class Payload:
    """An object whose unpickling creates the file `mark`."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))
