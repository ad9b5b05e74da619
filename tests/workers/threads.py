"""Ranks as threads of one process, for tests of what ranks do together without starting any."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor


class Killed(BaseException):
    """Stands for SIGKILL: no handler for Exception sees it."""


class Gone(RuntimeError):
    """What a rank gets that waits for a dead one."""


class Threads:
    """What the ranks share: the values of each exchange, and who has ended."""

    def __init__(self, world):
        self.world = world
        self.values = defaultdict(dict)
        self.ended = set()
        self.changed = threading.Condition()


class ThreadRank:
    """One rank of a world of threads; the interface of checkpoint.comm."""

    def __init__(self, rank, shared):
        self.rank, self.world, self.shared = rank, shared.world, shared
        self.count = 0

    def exchange(self, value, what):
        """All values, in order of rank; Gone when a rank has ended without coming."""
        self.count += 1
        shared = self.shared
        with shared.changed:
            values = shared.values[self.count]
            values[self.rank] = value
            shared.changed.notify_all()
            shared.changed.wait_for(
                lambda: len(values) == self.world or shared.ended - values.keys(), timeout=20
            )
            if len(values) < self.world:
                raise Gone(what)
            return [values[rank] for rank in range(self.world)]


def run_threads(world, action):
    """[what action(comm) returned or raised, by rank]."""
    shared = Threads(world)

    def one(rank):
        try:
            return action(ThreadRank(rank, shared))
        except BaseException as error:
            return error
        finally:
            with shared.changed:
                shared.ended.add(rank)
                shared.changed.notify_all()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))
