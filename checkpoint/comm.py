"""How the ranks of a save or load agree: one operation, `exchange`.

    comm.rank   comm.world   comm.exchange(value, what) -> [value of rank 0, value of rank 1, ...]

A barrier, a broadcast and a vote are exchanges. The one rule: every rank makes the same exchanges
in the same order, also a rank on which something failed; so failures travel as values, and no rank
waits for another that gave up. Units: seconds.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Protocol

from base.errors import Shared, UserError


class Comm(Protocol):
    """Ranks that save or load one checkpoint together."""

    rank: int
    world: int

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. `what` names the moment."""


class Alone:
    """One process."""

    rank, world = 0, 1

    def exchange(self, value: Any, what: str) -> list[Any]:
        return [value]


class RankComm:
    """All ranks of torch.distributed, over a gloo group of their own.

    Its own group, so that a save beside training never mixes with training's collectives; gloo,
    because only small CPU values travel. Making it is a collective. `timeout_s` bounds the wait for
    the slowest rank, which may still be writing.
    """

    def __init__(self, timeout_s: float = 1800):
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Raises RuntimeError when another rank does not come within `timeout_s`, or is gone."""
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
    """Rank 0's value on every rank."""
    return comm.exchange(value if comm.rank == 0 else None, what)[0]


def together(comm: Comm, action: Callable[[], Any], what: str) -> Any:
    """What `action` gives on this rank; where any rank refuses, all raise its words as Shared."""
    value, problems = None, None
    try:
        value = action()
    except UserError as error:
        problems = error.problems
    refused = [found for found in comm.exchange(problems, what) if found]
    if refused:
        raise Shared(*refused[0])
    return value
