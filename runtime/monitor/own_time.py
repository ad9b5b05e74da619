"""Own time of a rank in a step: the time in which it does not wait for other ranks.

    step     | own | all_gather | own | own ... | reduce | own | eval | own |
    own_s    = the parts marked `own`: data, forward, backward and optimizer between collectives

Rule: everything that another rank can delay is left out, so that a rank that waits is not taken for
a rank that is slow. All ranks of a step end together, whichever of them was late; only the own time
tells which. It holds for every layout, because it looks at calls and not at phases: in ZeRO-3 and
under tensor parallelism a forward is full of collectives.

Left out: every call of a process group and every `wait` for one, also those of parallel modules
(parallel.collectives), evaluation and saves. On a GPU the host does not wait in these calls; there
the stamps are events in the stream of the computation, around the same calls and around that
stream's waits for other streams (where DeepSpeed hides its prefetches), and they are read late.

On a CPU also left out: the time in which this thread was ready to run and another program had its
core. That is the load of the machine and no property of the rank.

Not seen: collectives inside compiled blocks (they count as own time of all ranks alike), and a slow
network, which delays every rank and no own time (`make doctor` measures links). Units: seconds.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallel import collectives
from runtime.monitor.stamps import cuda_seconds, cuda_stamp

# Methods of a process group that end when other ranks have come; torch versions differ in names.
CALLS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier",
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "gather", "gather_into_tensor",
    "gather_single", "scatter",
    "send", "recv", "recv_anysource",
)  # fmt: skip
STREAM_WAITS = ("wait_stream", "wait_event", "synchronize")

Pairs = list[tuple[Any, Any]]  # stamps around each part that is own time


class OwnTime:
    """Adds up a rank's own time, step by step. One per process; `listen` makes calls report.

    `stamp()` takes a time and `seconds(a, b)` is the difference of two, as in
    `runtime.monitor.clock`. One of `every` steps is measured, because on a GPU stamps are not free;
    the others give None.
    """

    def __init__(
        self,
        stamp: Callable[[], Any] | None = None,
        seconds: Callable[[Any, Any], float] = lambda begin, end: end - begin,
        every: int = 1,
        is_counted: Callable[[], bool] = lambda: True,
    ):
        self._stamp = stamp or running_clock()
        self._seconds, self._every, self._is_counted = seconds, every, is_counted
        self._depth, self._steps = 0, 0
        self._since: Any = None
        self._pairs: Pairs | None = None

    def begin(self) -> None:
        """Begin a step here."""
        self._pairs = [] if self._steps % self._every == 0 else None
        self._since = self._stamp() if self._pairs is not None else None
        self._steps += 1

    def finish(self) -> Callable[[], float | None]:
        """End the step here and begin the next one.

        Returns a function to be called late: the own seconds of the step, None where they were not
        measured.
        """
        pairs = self._pairs
        if pairs is not None:
            pairs.append((self._since, self._stamp()))
        self.begin()
        if pairs is None:
            return lambda: None
        return lambda: sum(self._seconds(begin, end) for begin, end in pairs)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out the time inside the block. May be nested; is ignored on other threads."""
        if self._pairs is None or not is_training_thread() or not self._is_counted():
            yield
            return
        if self._depth == 0:
            self._pairs.append((self._since, self._stamp()))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._since = self._stamp()

    def listen(self) -> None:
        """Leave out the calls of torch.distributed in this process from now on."""
        for name in CALLS:
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._heard(getattr(dist.ProcessGroup, name)))
        dist.Work.wait = self._heard(dist.Work.wait)
        collectives.intercept_wait(self._heard)

    def listen_to_streams(self) -> None:
        """On CUDA: leave out the waits of the computation's stream for other streams, and the waits
        of the host for the device."""
        computing = torch.cuda.current_stream()
        for name in STREAM_WAITS:
            function = getattr(torch.cuda.Stream, name)
            heard = self._heard(function)

            def chosen(stream, *arguments, function=function, heard=heard, name=name):
                # Other streams may wait for each other; a `synchronize` makes the host wait.
                is_ours = name == "synchronize" or stream == computing
                return (heard if is_ours else function)(stream, *arguments)

            setattr(torch.cuda.Stream, name, functools.wraps(function)(chosen))
        torch.cuda.synchronize = self._heard(torch.cuda.synchronize)

    def _heard(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def heard(*arguments, **keywords):
            if torch.compiler.is_compiling():
                return function(*arguments, **keywords)
            with self.apart():
                return function(*arguments, **keywords)

        return heard


def own_time(device: torch.device, every: int) -> OwnTime:
    """The own time of this process, listening; on a GPU it measures one of `every` steps."""
    if device.type != "cuda":
        own = OwnTime()
    else:
        computing = torch.cuda.current_stream()
        own = OwnTime(
            cuda_stamp, cuda_seconds, every, lambda: torch.cuda.current_stream() == computing
        )
        own.listen_to_streams()
    own.listen()
    return own


def is_training_thread() -> bool:
    """True on a thread that trains: the main one, or one that autograd made, not Python."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


def running_clock() -> Callable[[], float]:
    """A clock of this thread that does not count the time in which it waits for a core.

    Linux keeps that time in the second number of schedstat; elsewhere this is a plain clock.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        float(os.pread(file, 100, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return time.perf_counter

    def now() -> float:
        return time.perf_counter() - int(os.pread(file, 100, 0).split()[1]) / 1e9

    return now
