"""Runs ranks as threads of one process, for tests of collectives without starting processes."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from ranks import PATIENCE


class Killed(BaseException):
    """Takes the place of SIGKILL: no handler for Exception catches it."""


class Gone(RuntimeError):
    """Raised in a rank that waits for a dead one."""


class Threads:
    """State that the ranks share: the values of each exchange, and the ranks that have ended."""

    def __init__(self, world):
        self.world = world
        self.values = defaultdict(dict)
        self.ended = set()
        self.changed = threading.Condition()


class ThreadRank:
    """One rank of several threads, with the interface of checkpoint.comm."""

    def __init__(self, rank, shared):
        self.rank, self.world, self.shared = rank, shared.world, shared
        self.count = 0

    def exchange(self, value, what):
        """Values of all ranks in their order. Raises Gone where a rank has ended."""
        self.count += 1
        shared = self.shared
        with shared.changed:
            values = shared.values[self.count]
            values[self.rank] = value
            shared.changed.notify_all()
            shared.changed.wait_for(
                lambda: len(values) == self.world or shared.ended - values.keys(),
                timeout=20 * PATIENCE,
            )
            if len(values) < self.world:
                raise Gone(what)
            return [values[rank] for rank in range(self.world)]


def run_threads(world, action):
    """Run action(comm) on every rank; returns what each returned or raised."""
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
