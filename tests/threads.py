"""Ranks as threads of one process, for tests of what ranks do together without starting any."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class Killed(BaseException):
    """Stands for SIGKILL: no handler for Exception sees it."""


class Gone(RuntimeError):
    """What a rank gets that waits for a dead one."""


class ThreadRank:
    """One rank of a world of threads; the interface of checkpoint.comm."""

    def __init__(self, rank, world, shared):
        self.rank, self.world = rank, world
        self.slots, self.barrier = shared

    def exchange(self, value, what):
        """All values, in order of rank."""
        try:
            self.slots[self.rank] = value
            self.barrier.wait(timeout=20)
            values = list(self.slots)
            self.barrier.wait(timeout=20)
        except threading.BrokenBarrierError:
            raise Gone(what) from None
        return values


def run_threads(world, action):
    """[what action(comm) returned or raised, by rank]; a rank that raises leaves the others behind."""
    shared = ([None] * world, threading.Barrier(world))

    def one(rank):
        comm = ThreadRank(rank, world, shared)
        try:
            return action(comm)
        except BaseException as error:
            shared[1].abort()
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))
