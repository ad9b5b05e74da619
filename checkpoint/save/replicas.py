"""Compares the working weights that several ranks hold, by a digest per rank at each save.

    replicas of a rank -> digest of each weight -> one digest per group of holders -> exchange
                                                   differs: digests of that group's weights

Master weights and moments exist once. The weights that forward passes use are copies: on every
data-parallel rank (ZeRO-3: those that stay gathered), on every tensor-parallel rank where they are
not sharded (norms), and on two pipeline stages where they are tied. A copy that differs has
drifted: a bit has flipped in memory, on a link or in an arithmetic unit.

Rule: ranks exchange a few numbers each; single weights are compared only where some differ. Every
single flipped bit is found. Digests are compared only among ranks of one run, which have the same
kind of device: host memory is hashed (xxh3), and a GPU sums its words as integers times odd
factors, so that only the sums leave the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from checkpoint.comm import Comm

ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio in 64 bits, odd, as a signed number
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Replica:
    """A weight as this rank holds it; ranks with the same `holders` must hold the same values."""

    name: str
    holders: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Drift:
    """Copies of one weight that differ."""

    parameter: str  # the first one, in the model's order
    more: int  # other weights of the same holders that differ
    holders: str
    ranks: tuple[int, ...]  # the minority, or all holders where no value has a majority

    def __str__(self) -> str:
        more = f" and {self.more} other weights" if self.more else ""
        return (
            f"{self.parameter}{more} differ between ranks that hold copies of them:"
            f" {_named(self.ranks)} of those of {self.holders}"
        )


def digests(replicas: Sequence[Replica]) -> list[int]:
    """Return a 64-bit digest of each weight. On a GPU this synchronizes once, for all of them."""
    tensors = [replica.tensor.detach() for replica in replicas]
    if any(tensor.is_cuda for tensor in tensors):
        return torch.stack([word_sum(tensor) for tensor in tensors]).tolist()
    return [
        xxhash.xxh3_64_intdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for tensor in tensors
    ]


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2**64, of the tensor's words times an odd factor per column, () int64.

    A flipped bit changes the sum by a power of two below 2**64 times an odd number, which is never
    zero modulo 2**64.
    """
    words = tensor.contiguous().view(WORDS[tensor.element_size()])
    columns = words.reshape(-1, words.shape[-1]).sum(0, dtype=torch.int64)
    places = torch.arange(len(columns), dtype=torch.int64, device=tensor.device)
    return (columns * ((2 * places + 1) * ODD)).sum()


def summary(replicas: Sequence[Replica]) -> dict[str, int]:
    """Return, for each group of holders, one digest of all weights that this rank shares with
    it.
    """
    text: dict[str, xxhash.xxh3_64] = {}
    for replica, value in zip(replicas, digests(replicas), strict=True):
        one = text.setdefault(replica.holders, xxhash.xxh3_64())
        one.update(f"{replica.name} {value} ".encode())
    return {holders: one.intdigest() for holders, one in text.items()}


def differing(summaries: Sequence[dict[str, int]]) -> list[str]:
    """Return the groups of holders whose digests differ; `summaries` has those of all ranks."""
    values: dict[str, set[int]] = {}
    for one in summaries:
        for holders, value in one.items():
            values.setdefault(holders, set()).add(value)
    return [holders for holders, found in values.items() if len(found) > 1]


def locate(replicas: Sequence[Replica], holders: Sequence[str], comm: Comm) -> list[Drift]:
    """Find the weights that differ in each group of `holders`; a collective of all ranks, which
    pass the same `holders`.
    """
    mine: dict[str, dict[str, int]] = {one: {} for one in holders}
    for replica, value in zip(replicas, digests(replicas), strict=True):
        if replica.holders in mine:
            mine[replica.holders][replica.name] = value
    everyone = comm.exchange(mine, "replicas")
    found = []
    for one in holders:
        of_ranks = {rank: answer[one] for rank, answer in enumerate(everyone) if answer[one]}
        wrong = []
        for name in next(iter(of_ranks.values())):
            values = {rank: answer.get(name) for rank, answer in of_ranks.items()}
            if len(set(values.values())) > 1:
                wrong.append((name, _minority(values)))
        if wrong:
            name, ranks = wrong[0]
            found.append(Drift(name, len(wrong) - 1, one, ranks))
    return found


def _minority(values: dict[int, int | None]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of the majority; all ranks where there is none."""
    (common, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return tuple(values)
    return tuple(rank for rank, value in values.items() if value != common)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} others" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
