"""The pieces of weights and optimizer states that this rank owns, read from DeepSpeed's internals.

    stages 1, 2, BF16_Optimizer   one flat fp32 partition per parameter group; `_hp_mapping` of a
                                  parameter gives which of its elements it contains, and where
    stage 3                       one flat fp32 partition per sub-group; every parameter is split
                                  into equal parts over the ranks, and the last part is padded

Rule: fragments are views of live memory. Every element of every tensor is in the written fragments
of exactly one rank, and padding is in none. The attributes used here are those of the DeepSpeed
version that requirements.txt pins. Units: elements, optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from checkpoint.format.index import WEIGHT, Fragment
from checkpoint.format.rectangles import Box
from checkpoint.save.replicas import Replica
from parallel.mesh import Mesh

STEP = "step"


def fragments(ds: Any, tensor_index: int = 0) -> list[Fragment]:
    """Return the pieces of fp32 master weights and optimizer states that this rank owns, as
    one-dimensional views.

    `tensor_index` is the rank's index on the tensor axis: a tensor that every rank of that axis
    holds is written by the first. Optimizer states that do not exist yet are left out, so call
    `create_states` before.
    """
    found = []
    for name, parameter, shape, start, count, flat, offset in _pieces(ds):
        box, is_written = place(parameter, shape, tensor_index)
        tensors = {WEIGHT: flat} | _states(ds, flat)
        for kind, tensor in tensors.items():
            piece = tensor.detach()[offset : offset + count]
            assert piece.dtype == torch.float32, (name, kind, piece.dtype)
            found.append(Fragment(name, kind, box, start, piece, is_written))
    return found


def place(
    parameter: torch.nn.Parameter, shape: tuple[int, ...], tensor_index: int
) -> tuple[Box, bool]:
    """Return the box of a parameter of this rank in the full one, and whether this rank writes it.

    Reads two marks that parallel/ leaves on a parameter: `shard` (a `ParameterShard`),
    and `is_copy` on the second copy of a tied weight that two pipeline stages hold.
    """
    shard = getattr(parameter, "shard", None)
    box = Box(shape, shape)
    if shard is not None and shard.dim is not None:
        box = Box(shard.full, shape, shard.dim, shard.offset)
    is_replica = box.dim is None and tensor_index > 0
    return box, not (is_replica or getattr(parameter, "is_copy", False))


def replicas(ds: Any, mesh: Mesh) -> list[Replica]:
    """Return the working weights of this rank that other ranks hold as well, in the model's order.

    Under ZeRO-3 these are the ones that stay gathered. Secondary partitions (ZeRO++) are not
    compared.
    """
    found = []
    for name, parameter in ds.module.named_parameters():
        if hasattr(parameter, "ds_id") and not parameter.ds_persist:
            continue
        shard = getattr(parameter, "shard", None)
        is_sharded = shard is not None and shard.dim is not None
        is_tied = getattr(parameter, "is_tied", False)
        if mesh.data.size > 1 or is_tied or (mesh.tensor.size > 1 and not is_sharded):
            places = [
                "tied weights" if is_tied else f"pipeline stage {mesh.pipeline.index}",
                *([f"tensor rank {mesh.tensor.index}"] if is_sharded else []),
            ]
            found.append(Replica(name, ", ".join(places), parameter))
    return found


def create_states(ds: Any) -> None:
    """Create the optimizer's states as zeros with step 0, so that a load can fill them.

    This runs torch's own lazy creation: one optimizer step with zero gradients, learning rate and
    weight decay, which changes no weight. States that exist already are kept.
    """
    optimizer = _torch_optimizer(ds)
    groups = optimizer.param_groups
    for flat, group in _partitions(ds):
        if optimizer.state.get(flat):
            continue
        still = dict.fromkeys({"lr", "weight_decay"} & group.keys(), 0.0)
        grad, flat.grad = flat.grad, torch.zeros_like(flat)
        try:
            optimizer.param_groups = [group | still | {"params": [flat]}]
            # Call the step of the class, because that of the instance may be wrapped by a schedule.
            type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups
            flat.grad = grad
        _set_step(optimizer.state[flat], 0)


def optimizer_step(ds: Any) -> int | None:
    """Return the number of updates that the optimizer has counted; None for one that does not
    count, such as SGD.

    All partitions have the same number, because all of them skip a skipped step.
    """
    counts = {int(s[STEP]) for s in _torch_optimizer(ds).state.values() if STEP in s}
    assert len(counts) <= 1, f"partitions have taken different numbers of steps: {sorted(counts)}"
    return counts.pop() if counts else None


def set_optimizer_step(ds: Any, step: int) -> None:
    """Set the number of updates that bias correction uses, in every partition."""
    for state in _torch_optimizer(ds).state.values():
        _set_step(state, step)


def _set_step(state: dict, step: int) -> None:
    if torch.is_tensor(state.get(STEP)):
        state[STEP].fill_(step)
    elif STEP in state:
        state[STEP] = step


@torch.no_grad()
def after_load(ds: Any, optimizer_step: int) -> None:
    """Recompute everything that is derived from the fp32 state; a collective.

    These are the 16-bit (or working fp32) weights of all ranks, the optimizer's step count, and the
    parameters that ZeRO-3 keeps gathered.
    """
    set_optimizer_step(ds, optimizer_step)
    zero = ds.optimizer
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        # Do what the end of a step does: release everything, refresh the partitions, gather the
        # small ones.
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()
    else:
        zero.update_lp_params()
        zero._lazy_init_hp_params_optimizer_state()


def _torch_optimizer(ds: Any) -> torch.optim.Optimizer:
    """Return the optimizer that DeepSpeed wraps."""
    return ds.optimizer.optimizer


def _partitions(ds: Any) -> Iterator[tuple[torch.Tensor, dict]]:
    """Give each (flat fp32 partition of this rank, its parameter group of the torch optimizer)."""
    zero, groups = ds.optimizer, _torch_optimizer(ds).param_groups
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        assert not zero.swap_optimizer, "optimizer states on NVMe are not in memory"
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            yield flat, groups[zero.sub_group_to_group_id[number]]
    elif isinstance(zero, DeepSpeedZeroOptimizer):
        yield from zip(zero.single_partition_of_fp32_groups, groups, strict=True)
    elif isinstance(zero, BF16_Optimizer):
        yield from zip(zero.fp32_groups_flat_partition, groups, strict=True)
    else:
        raise AssertionError(f"{type(zero).__name__} has no fp32 partitions: use ZeRO 1, 2 or 3")


def _pieces(ds: Any) -> Iterator[tuple]:
    """Give (name, parameter, its shape, first element, number of elements, flat partition, offset
    in it) for each piece that this rank owns.
    """
    zero = ds.optimizer
    flats = [flat for flat, _ in _partitions(ds)]
    names = {id(parameter): name for name, parameter in ds.module.named_parameters()}
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        for flat, group in zip(flats, zero.fp16_groups, strict=True):
            offset = 0
            for parameter in group:
                part = parameter.partition_numel()
                start = comm.get_rank(group=parameter.ds_process_group) * part
                count = max(0, min(part, parameter.ds_numel - start))
                if count:
                    shape = tuple(parameter.ds_shape)
                    yield names[id(parameter)], parameter, shape, start, count, flat, offset
                offset += part
        return
    for name, parameter in ds.module.named_parameters():
        mapping = parameter._hp_mapping  # None where other ranks own all of it
        if mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = flats[mapping.param_group_index]
            shape = tuple(parameter.shape)
            yield name, parameter, shape, here.start, here.numel, flat, there.start


def _states(ds: Any, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the optimizer's states of a flat partition that have one value per element."""
    states = {}
    for key, value in _torch_optimizer(ds).state.get(flat, {}).items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            states[key] = value
        else:
            assert key == STEP or value is None, f"optimizer state {key} has no value per element"
    return states
