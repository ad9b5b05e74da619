"""The doctor's collective test; it is started like the ranks of a run.

    python -m runtime.process.link_test OUT DEVICE

    sum      an all-reduce with a known answer: ranks that compute another sum are listed
    pairs    every two hosts exchange blocks, in rounds in which each host is in one pair at most

It only measures; launch.hosts.link_speeds judges the result. Rank 0 writes it to OUT as JSON.
Units: MiB/s, seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from base.errors import UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED
from base.units import MIB
from recipes.schema import Cluster
from runtime.process import process

BLOCK_MIB = 4
LONGEST_S = 2.0  # time for one pair; it is enough to recognize a slow link
MOST_BLOCKS = 8
TIMEOUT_S = 120

Speeds = Mapping[tuple[int, int], float]


def main(arguments: list[str]) -> int:
    """Entry on every rank; returns the exit status."""
    out, device = Path(arguments[0]), arguments[1]
    try:
        me = process.start(Cluster(device=device, timeout_s=TIMEOUT_S))
        wrong = check_sum(me)
        speeds = measure_pairs(me)
        if me.is_first:
            result = {"wrong": wrong, "mib_per_s": [[a, b, s] for (a, b), s in speeds.items()]}
            out.write_text(json.dumps(result))
    except UserError as error:
        process.report(error)
        return DO_NOT_RETRY
    except OSError as error:
        print(f"failed on rank {process.launched_rank()}: {error}", file=sys.stderr)
        return FAILED
    finally:
        process.finish()
    return FINISHED


def check_sum(me: process.Process) -> list[int]:
    """Ranks on which an all-reduce of known numbers gave a wrong sum; all ranks get the list."""
    values = torch.arange(1024, dtype=torch.float32, device=me.device) + me.rank
    dist.all_reduce(values)
    expected = me.world * torch.arange(1024, dtype=torch.float32) + sum(range(me.world))
    verdict = torch.zeros(me.world, device=me.device)
    verdict[me.rank] = float(not torch.equal(values.cpu(), expected))
    dist.all_reduce(verdict)
    return [rank for rank, is_wrong in enumerate(verdict.tolist()) if is_wrong]


def measure_pairs(me: process.Process) -> Speeds:
    """MiB/s between every two hosts, by (host, host); the first rank of each host measures.

    All ranks get the same table.
    """
    hosts = me.world // me.local_world
    host = me.rank // me.local_world
    table = torch.zeros(hosts, hosts)
    for pairs in rounds(hosts):
        other = next((a + b - host for a, b in pairs if host in (a, b)), None)
        if me.local_rank == 0 and other is not None:
            speed = exchange(me, other * me.local_world, host < other)
            table[min(host, other), max(host, other)] = speed
        dist.barrier()
    table = table.to(me.device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {(a, b): float(table[a, b]) for a in range(hosts) for b in range(a + 1, hosts)}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of hosts once, in rounds without a host in two pairs (the circle method)."""
    players = list(range(count + count % 2))
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(p), max(p)) for p in pairs if max(p) < count])
        players.insert(1, players.pop())
    return found


def exchange(me: process.Process, other: int, is_leader: bool) -> float:
    """Best MiB/s of several blocks that are sent to rank `other` and back."""
    block = torch.zeros(BLOCK_MIB * MIB // 4, dtype=torch.float32, device=me.device)
    go_on = torch.ones(1, device=me.device)
    best, began = 0.0, time.perf_counter()
    for number in range(MOST_BLOCKS + 1):
        start = time.perf_counter()
        for sends in (is_leader, not is_leader):
            (dist.send if sends else dist.recv)(block, other)
        if me.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if number:  # the first block is not counted: it makes the connection
            best = max(best, 2 * BLOCK_MIB / (now - start))
        # Only the leader looks at the clock, or the two ranks might not agree on the end.
        if is_leader:
            go_on.fill_(float(now - began < LONGEST_S or number == 0))
            dist.send(go_on, other)
        else:
            dist.recv(go_on, other)
        if not go_on.item():
            break
    return best


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
