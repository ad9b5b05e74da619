"""Seconds of each part of a step, measured without making the device wait.

    step N:   | data | compute | optimizer | eval | save | data | ...     : step N+1
              ^                                   ^
           finish()         with phase(name)   finish()                the rest is `other`

Rule: stamps are taken now and read late. On a GPU a stamp is a CUDA event in the current stream,
and `finish()` returns a `TimeSpan` that is read one step later, when the device has passed it: no
stamp costs a synchronisation. Differences are then the device's own time line (`data_s` is how long
the device was idle because no batch had come). On a CPU a stamp is the clock itself.

A save begins when its step has been recorded: its seconds are in the event `saved`, in no step's
line. Units: seconds of this rank. `step_s` is the time between two boundaries WITHOUT evaluation
and saves; every tokens/s and MFU of this project is computed from it, so neither is in any speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.monitor.stamps import cuda_seconds, cuda_stamp

if TYPE_CHECKING:
    from runtime.monitor.own_time import OwnTime

# data: waiting for the batch; compute: forward and backward of all micro-batches; eval and save are
# not part of step_s; other: time outside of all phases (logging, the learning rate, Python itself).
PHASES = ("data", "compute", "optimizer", "eval", "save", "other")
APART = ("eval", "save")  # left out of every speed


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. step_s = data_s + compute_s + optimizer_s + other_s."""

    step_s: float
    data_s: float = 0.0
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    eval_s: float = 0.0
    save_s: float = 0.0
    other_s: float = 0.0
    is_first: bool = False  # first step of this process: compiles, allocates, fills caches


class TimeSpan:
    """The stamps of one finished step: its begin, then (phase that ended, stamp) in order."""

    def __init__(
        self,
        stamps: list[tuple[str, Any]],
        seconds: Callable,
        is_first: bool,
        own: Callable[[], float | None] = lambda: None,
    ):
        self._stamps, self._seconds, self._is_first = stamps, seconds, is_first
        # Seconds without waits for other ranks; call it as late as `times`.
        self.own_s = own

    def times(self) -> StepTimes:
        """Read the stamps; on a GPU this waits for the end of the step: call it one step later."""
        total = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in zip(self._stamps, self._stamps[1:], strict=False):
            total[phase] += self._seconds(begin, end)
        step_s = sum(total[phase] for phase in PHASES if phase not in APART)
        parts = {f"{phase}_s": total[phase] for phase in PHASES}
        return StepTimes(step_s=step_s, is_first=self._is_first, **parts)


class StepClock:
    """Splits steps into phases: `start()` once, `with phase(name)` inside, `finish()` per step.

    `stamp()` takes a time, `seconds(a, b)` is the difference of two; the default pair is the CPU's
    `time.perf_counter`, `cuda_clock()` makes the other. A phase may come several times in a step
    (they add up), and never inside another.
    """

    def __init__(
        self,
        stamp: Callable[[], Any] = time.perf_counter,
        seconds: Callable[[Any, Any], float] = lambda begin, end: end - begin,
        own: OwnTime | None = None,
    ):
        self._stamp, self._seconds, self._own = stamp, seconds, own
        self._stamps: list[tuple[str, Any]] = []
        self._open: str | None = None
        self._is_first = True

    def start(self) -> None:
        """Begin a step here; the time before belongs to no step."""
        self._stamps = [("begin", self._stamp())]
        if self._own:
            self._own.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step; `name` is one of PHASES."""
        assert name in PHASES, f"phase {name!r} is not one of {PHASES}"
        assert self._open is None, f"phase {name} begins inside of phase {self._open}"
        self._mark("other")  # the time since the last phase
        self._open = name
        is_apart = self._own is not None and name in APART
        try:
            with self._own.apart() if is_apart else nullcontext():
                yield
        finally:
            self._mark(name)
            self._open = None

    def finish(self) -> TimeSpan:
        """End the step here and begin the next one; time outside of all phases is `other`."""
        self._mark("other")
        own = [self._own.finish()] if self._own else []
        span = TimeSpan(self._stamps, self._seconds, self._is_first, *own)
        self._stamps, self._is_first = [("begin", self._stamps[-1][1])], False
        return span

    def _mark(self, phase: str) -> None:
        """Count the time since the last stamp to `phase`."""
        assert self._stamps, "start() first"
        self._stamps.append((phase, self._stamp()))


def cuda_clock(own: OwnTime | None = None) -> StepClock:
    """A StepClock on the current CUDA stream; its stamps are events, read when the step is over."""
    return StepClock(cuda_stamp, cuda_seconds, own)
