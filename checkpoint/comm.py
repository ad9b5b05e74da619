"""The ranks of a save or load agree by one operation, `exchange`.

    comm.rank   comm.world   comm.exchange(value, what) -> [value of rank 0, value of rank 1, ...]

A barrier, a broadcast and a vote are all exchanges. Rule: every rank makes the same exchanges in
the same order, also a rank on which something failed. Failures are therefore sent as values, and no
rank waits for another that has given up. Units: seconds.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Protocol

from base.errors import Shared, UserError


class Comm(Protocol):
    """The ranks that save or load one checkpoint together."""

    rank: int
    world: int

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, in order of rank, on every rank. `what` names the moment,
        for messages.
        """


class Alone:
    """Comm of a single process."""

    rank, world = 0, 1

    def exchange(self, value: Any, what: str) -> list[Any]:
        return [value]


class RankComm:
    """Comm of all ranks of torch.distributed, over a gloo group of its own.

    The group is separate so that a save beside training never mixes with training's collectives. It
    uses gloo because only small CPU values are exchanged. Creating it is a collective. `timeout_s`
    bounds the wait for the slowest rank, which may still be writing.
    """

    def __init__(self, timeout_s: float = 1800):
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def exchange(self, value: Any, what: str) -> list[Any]:
        """See Comm. Raises RuntimeError when a rank is gone, or makes no call within
        `timeout_s`.
        """
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited for the other ranks ({what}, {self.timeout_s:g} s at"
                " most): one of them is gone, or did not make this call. Saving and loading are"
                " collective: call them on every rank, never under a condition on the rank."
                f" ({error})"
            ) from error
        return values


def broadcast(comm: Comm, value: Any, what: str) -> Any:
    """Return rank 0's value on every rank."""
    return comm.exchange(value if comm.rank == 0 else None, what)[0]


def together(comm: Comm, action: Callable[[], Any], what: str) -> Any:
    """Return what `action` returns on this rank. Where it raises UserError on any rank, all ranks
    raise that rank's problems as Shared.
    """
    value, problems = None, None
    try:
        value = action()
    except UserError as error:
        problems = error.problems
    refused = [found for found in comm.exchange(problems, what) if found]
    if refused:
        raise Shared(*refused[0])
    return value
