"""Builds the engine of a recipe on one rank: model, weights, optimizer, DeepSpeed's engine.

    recipe, layout, JSON -> process groups -> modules of this rank -> weights -> optimizer -> Engine

Rule: DeepSpeed is imported inside of functions, after the process has chosen its device: DeepSpeed
takes its accelerator when it is imported.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from base.errors import Shared
from model.decoder import Decoder, compile_blocks
from model.init import initial_weight
from parallel import tensor
from parallel.layout import Layout
from parallel.mesh import Mesh, ModelParallelUnit, make_mesh
from recipes.schema import Recipe
from runtime.ds_config.key_rules import kernel_problems
from runtime.engine.deepspeed_import import join_deepspeed
from runtime.engine.engine import DTYPES, Engine, decoder_config, default_dtype
from runtime.engine.initial_weights import Draw, fill_owned
from runtime.engine.optimizer import build_optimizer
from runtime.process.process import Process


def build(
    recipe: Recipe,
    layout: Layout,
    config: dict[str, Any],
    process: Process,
    draw: Draw | None = initial_weight,
) -> Engine:
    """The engine of `recipe` on this rank: model, weights, optimizer, DeepSpeed.

    `config` is the full DeepSpeed JSON without any "auto". `draw` gives the weights; None leaves
    them undefined, for a checkpoint that will fill them. A collective. Raises Shared where
    DeepSpeed refuses the JSON.
    """
    import deepspeed  # after process.start: the accelerator is chosen when it is imported
    from deepspeed.utils import groups

    join_deepspeed(process.device)
    mesh = make_mesh(layout, process.rank)
    if layout.pipeline > 1:
        from runtime.engine.pipeline_engine import build_pipeline

        return build_pipeline(recipe, config, process, mesh, draw)
    unit = None if mesh.is_plain else ModelParallelUnit(mesh)
    groups.mpu = unit  # a global, also read where none is given
    model = build_model(recipe, config, process, mesh, unit, draw)
    optimizer = build_optimizer(model.named_parameters(), recipe.optim)
    try:
        ds, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=unit)
    except (AssertionError, ValueError, NotImplementedError) as error:
        # A combination of keys that only the engine refuses, alike on all ranks.
        raise Shared(f"DeepSpeed refuses the JSON: {' '.join(str(error).split())}") from error
    ds.train()
    return Engine(ds, mesh, process)


def check_kernels(config: dict[str, Any], device: torch.device) -> None:
    """Raise Shared where the JSON asks for kernels that `device` does not have."""
    problems = kernel_problems(config, device.type)
    if problems:
        raise Shared(*problems)


def build_model(
    recipe: Recipe,
    config: dict[str, Any],
    process: Process,
    mesh: Mesh,
    unit: ModelParallelUnit | None,
    draw: Draw | None,
) -> Decoder:
    """This rank's part of the decoder with its weights, in the training dtype, on the device.

    Under ZeRO-3 each module is partitioned when it is created. Weights are drawn by rows, so they
    are the same in every layout and no host holds more of them than its own part.
    """
    import deepspeed

    dtype, stage = DTYPES[recipe.precision], mesh.layout.stage
    whole = decoder_config(recipe)
    partition: contextlib.AbstractContextManager = contextlib.nullcontext()
    if stage == 3:
        partition = deepspeed.zero.Init(
            config_dict_or_path=config, mpu=unit, data_parallel_group=mesh.data.group
        )
    with default_dtype(dtype), process.device, partition:
        model = Decoder(tensor.local_config(whole, mesh.tensor))
    tensor.apply(model, mesh, whole, recipe.parallel.sequence)
    if draw is not None:
        fill_owned(model.named_parameters(), whole, recipe.seed, stage, mesh.data, draw)
    model.recompute = recipe.recompute
    if recipe.compile:
        compile_blocks(model.model.layers)
    return model
