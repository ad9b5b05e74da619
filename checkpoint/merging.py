"""The average of several checkpoints of a run, as a checkpoint in the layout of the newest.

    average([(reader, share), ...], folder)     weights and optimizer states, then MANIFEST.json

Rule: each number is the weighted mean over the checkpoints, computed in fp64 and rounded once, so
that the average of a checkpoint with itself is that checkpoint to the bit. Numbers are read and
written PIECE at a time; a rank's state lies in a file while it is put together, never in memory as
a whole. Units: elements.

Averages of the last checkpoints of a run often evaluate better than the last one (Izmailov et al.,
"Averaging weights leads to wider optima", 2018). Moments are averaged like weights: the mean of
second moments stays positive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from base.durable import sync_folder
from checkpoint.format import manifest as manifests
from checkpoint.format.index import Fragment
from checkpoint.format.index_file import nothing, write_file
from checkpoint.format.manifest import encode
from checkpoint.format.rectangles import Box
from checkpoint.format.storage import write_rank
from checkpoint.load.restoring import CheckpointReader

PIECE = 1 << 24
SCRATCH = ".average"


def average(sources: Sequence[tuple[CheckpointReader, float]], folder: Path) -> None:
    """Write the weighted mean of checkpoints into a new folder; the last one is the newest.

    The shares are normalised to a sum of one. State and random states are those of the newest
    checkpoint, without its validation loss. Raises Damaged, UserError where a checkpoint holds
    other tensors than the newest, OSError.
    """
    newest, _ = sources[-1]
    total = sum(share for _, share in sources)
    folder.mkdir()
    files = {}
    for rank, index in enumerate(newest.indexes):
        scratch = folder / SCRATCH
        pieces = stored(index, scratch)
        for piece in parts(pieces):
            mean = torch.zeros(piece.count, dtype=torch.float64)
            read = dataclasses.replace(piece, tensor=torch.empty(piece.count))
            for reader, share in sources:
                reader.fill([read])
                mean += read.tensor.double() * share
            piece.tensor.copy_(mean / total)
        files |= write_rank(folder, rank, pieces, index["local"])
        scratch.unlink(missing_ok=True)
    state = newest.manifest.state
    state = state | {"health": state["health"] | {"val_loss": None, "val_step": None}}
    made = dataclasses.replace(newest.manifest, state=state, files=files)
    write_file(folder / manifests.NAME, encode(made), 0, nothing, "manifest")
    sync_folder(folder)


def stored(index: dict, scratch: Path) -> list[Fragment]:
    """The pieces that a rank's index lists, over the memory of a new file, in their order."""
    count = sum(len(group["kinds"]) * sum(group["count"]) for group in index["groups"])
    memory = torch.zeros(0)
    if count:
        memory = torch.from_file(str(scratch), shared=True, size=count)
    pieces, at = [], 0
    for group in index["groups"]:
        boxes = [Box(tuple(f), tuple(s), d, o) for f, s, d, o in group["boxes"]]
        columns = [group[name] for name in ("names", "box", "start", "count")]
        for kind, _ in group["kinds"]:
            for name, box, start, size in zip(*columns, strict=True):
                pieces.append(Fragment(name, kind, boxes[box], start, memory[at : at + size]))
                at += size
    return pieces


def parts(pieces: Sequence[Fragment]) -> Iterator[Fragment]:
    """Pieces of at most PIECE elements over the same memory."""
    for piece in pieces:
        for low in range(0, piece.count, PIECE):
            tensor = piece.tensor[low : low + PIECE]
            yield dataclasses.replace(piece, start=piece.start + low, tensor=tensor)
