"""Process groups of the axes of a layout, made once per process.

    tensor    ranks that share every layer          context   ranks that share every sequence
    data      ZeRO's group: data x context          pipeline  one rank of each pipeline stage

With no axis but data no group is made: the data group is the world.

Rule: groups are made here and nowhere else, so that all ranks make the same groups in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from parallel.layout import Coordinates, Layout


@dataclass(frozen=True)
class Axis:
    """This rank's place on one axis; `group` None: the world, or this rank alone for size 1."""

    size: int
    index: int
    group: dist.ProcessGroup | None = None

    @property
    def name(self) -> str:
        """Name of the group for functional collectives."""
        return self.group.group_name if self.group is not None else ""


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout and the groups it belongs to."""

    layout: Layout
    place: Coordinates
    tensor: Axis
    context: Axis
    data: Axis
    pipeline: Axis

    @property
    def is_plain(self) -> bool:
        """True where data is the only axis, so that no module is sharded."""
        return self.tensor.size == self.context.size == self.pipeline.size == 1


_MADE: dict[tuple[int, ...], dict[str, dist.ProcessGroup]] = {}


def make_mesh(layout: Layout, rank: int) -> Mesh:
    """The mesh of `layout` as `rank` sees it. The first call for new sizes is collective."""
    place = layout.coordinates(rank)
    sizes = {
        "tensor": layout.tensor,
        "context": layout.context,
        "data": layout.data * layout.context,
        "pipeline": layout.pipeline,
    }
    index = place._asdict() | {"data": place.data * layout.context + place.context}
    groups: dict[str, dist.ProcessGroup] = {}
    if layout.tensor * layout.context * layout.pipeline > 1:
        key = (layout.pipeline, layout.data, layout.context, layout.tensor)
        if key not in _MADE:
            _MADE[key] = {axis: _own_group(layout, rank, axis) for axis in sizes}
        groups = _MADE[key]
    axes = {axis: Axis(sizes[axis], index[axis], groups.get(axis)) for axis in sizes}
    return Mesh(layout, place, **axes)


def forget_groups() -> None:
    """Forget all groups: the end of the process group ended them."""
    _MADE.clear()


# What stays equal inside a group of each axis.
FIXED: dict[str, Callable[[Coordinates], Coordinates]] = {
    "tensor": lambda place: place._replace(tensor=0),
    "context": lambda place: place._replace(context=0),
    "data": lambda place: place._replace(data=0, context=0),
    "pipeline": lambda place: place._replace(pipeline=0),
}


def members(layout: Layout, rank: int, axis: str) -> list[int]:
    """Global ranks of `rank`'s group on `axis`, ordered by their index in it."""
    fixed = FIXED[axis]
    own = fixed(layout.coordinates(rank))
    return [other for other in range(layout.world) if fixed(layout.coordinates(other)) == own]


def _own_group(layout: Layout, rank: int, axis: str) -> dist.ProcessGroup:
    own = members(layout, rank, axis)
    if not _MADE:
        # Only members take part in making a group: a rank need not know the thousands of others.
        return dist.new_group(own, use_local_synchronization=True)
    # torch names such a group by how many groups a rank is in. That number differs between ranks
    # once a pipeline has tied its first and last stage, and members would wait under other names.
    every = sorted({tuple(members(layout, other, axis)) for other in range(layout.world)})
    made = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return made[tuple(own)]


class ModelParallelUnit:
    """The mesh as the `mpu` object of `deepspeed.initialize`, under Megatron's names."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.data_ranks = members(mesh.layout, mesh.layout.rank(mesh.place), "data")

    def get_data_parallel_group(self):
        return self.mesh.data.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.data_ranks

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.data.size

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data.index

    def get_model_parallel_group(self):
        return self.mesh.tensor.group

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tensor.size

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tensor.index

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
