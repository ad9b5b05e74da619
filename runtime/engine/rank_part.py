"""Builds one rank's part of a run without its other ranks, without GPUs and without memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from model.decoder import Decoder
from parallel import tensor
from parallel.mesh import Mesh, forget_groups, make_mesh
from recipes.schema import Recipe
from runtime.engine import engine
from runtime.engine.deepspeed_import import join_deepspeed
from runtime.resolve import Resolved

META = torch.device("meta")


@contextlib.contextmanager
def part_of_rank(recipe: Recipe, resolved: Resolved, rank: int) -> Iterator[tuple[Mesh, nn.Module]]:
    """Give the mesh and the modules of a rank, inside a process group of ranks that do not
    exist.
    """
    join_fake(rank, resolved.layout.world)
    try:
        mesh = make_mesh(resolved.layout, rank)
        yield mesh, build_part(recipe, mesh)
    finally:
        dist.destroy_process_group()
        forget_groups()


def join_fake(rank: int, world: int) -> None:
    """A process group whose other members do not exist: every collective returns at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # The accelerator is chosen when deepspeed is imported; its modules ask for a local rank.
    os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"] = "cpu", "0"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def build_part(recipe: Recipe, mesh: Mesh) -> nn.Module:
    """The modules of one rank, without memory and before ZeRO-3 divides each weight."""
    join_deepspeed(torch.device("cpu"))
    if mesh.layout.pipeline > 1:
        from runtime.engine.pipeline_engine import build_stage

        return build_stage(recipe, mesh, META)
    whole = engine.decoder_config(recipe)
    with engine.default_dtype(engine.DTYPES[recipe.precision]), META:
        model = Decoder(tensor.local_config(whole, mesh.tensor))
    tensor.apply(model, mesh, whole, recipe.parallel.sequence)
    return model
