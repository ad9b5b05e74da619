"""What this rank owns of the weights and the optimizer's states: where DeepSpeed's internals end.

    stages 1, 2, BF16_Optimizer   one flat fp32 partition per parameter group; `_hp_mapping` of a
                                  parameter says which of its elements lie there, and where
    stage 3                       one flat fp32 partition per sub-group; every parameter is cut into
                                  equal parts over the ranks, the last one padded

The one rule: fragments are views of the live memory. Every element of every tensor is in the
written fragments of exactly one rank, padding is in none. Names of attributes are those of
the DeepSpeed version that requirements.txt pins. Units: elements, optimizer steps.
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
    """Pieces of fp32 master weights and optimizer states that this rank owns, one-dim views.

    `tensor_index` is the rank's place on the tensor axis: what every rank of it has is written by
    the first. Optimizer states that do not exist yet are left out: call `create_states` before.
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
    """Where a parameter of this rank lies in the full one, and whether this rank writes it.

    Its marks are read: `shard` (a ParameterShard of `parallel.tensor`), and `is_copy` where a tied
    weight lives on two pipeline stages and this is not the first.
    """
    shard = getattr(parameter, "shard", None)
    box = Box(shape, shape)
    if shard is not None and shard.dim is not None:
        box = Box(shard.full, shape, shard.dim, shard.offset)
    is_replica = box.dim is None and tensor_index > 0
    return box, not (is_replica or getattr(parameter, "is_copy", False))


def replicas(ds: Any, mesh: Mesh) -> list[Replica]:
    """Working weights of this rank that other ranks hold too, in the model's order.

    Under ZeRO-3 those that stay gathered. Secondary partitions (ZeRO++) are not looked at.
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
    """Make the optimizer's states exist, as zeros with step 0; a load can then fill them.

    Runs torch's own lazy creation: one optimizer step with zero gradients, rate and decay, which
    leaves every weight as it is. Does nothing where states exist already.
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
            # The class's step: that of the instance may be wrapped by a schedule.
            type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups
            flat.grad = grad
        _set_step(optimizer.state[flat], 0)


def optimizer_step(ds: Any) -> int | None:
    """Updates that the optimizer has counted; None for one that does not count, such as SGD.

    The same in all partitions, since a skipped step is skipped by all.
    """
    counts = {int(s[STEP]) for s in _torch_optimizer(ds).state.values() if STEP in s}
    assert len(counts) <= 1, f"partitions have taken different numbers of steps: {sorted(counts)}"
    return counts.pop() if counts else None


def set_optimizer_step(ds: Any, step: int) -> None:
    """Set the count that bias correction uses, in every partition."""
    for state in _torch_optimizer(ds).state.values():
        _set_step(state, step)


def _set_step(state: dict, step: int) -> None:
    if torch.is_tensor(state.get(STEP)):
        state[STEP].fill_(step)
    elif STEP in state:
        state[STEP] = step


@torch.no_grad()
def after_load(ds: Any, optimizer_step: int) -> None:
    """Bring everything that follows from the fp32 state in line with it; a collective.

    The 16-bit (or working fp32) weights of all ranks, the optimizer's step count, the parameters
    that ZeRO-3 keeps gathered.
    """
    set_optimizer_step(ds, optimizer_step)
    zero = ds.optimizer
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        # As at the end of a step: release everything, refresh partitions, gather the small ones.
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
    """The optimizer that DeepSpeed wraps."""
    return ds.optimizer.optimizer


def _partitions(ds: Any) -> Iterator[tuple[torch.Tensor, dict]]:
    """(flat fp32 partition of this rank, its parameter group of the torch optimizer)."""
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
    """(name, parameter, its shape, first element, elements, flat partition, offset in it) of what
    is ours.
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
    """The optimizer's states of a flat partition that have a value per element."""
    states = {}
    for key, value in _torch_optimizer(ds).state.get(flat, {}).items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            states[key] = value
        else:
            assert key == STEP or value is None, f"optimizer state {key} has no value per element"
    return states
