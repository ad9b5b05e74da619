"""The hardware under a run: GPUs of all hosts and own times of all ranks, gathered on rank 0.

    every rank            step(): own time -> window of 4 steps -----\\
    first rank of a host  Devices: readings of its GPUs, alarms ------+-> key-value store
                                                                            |
    rank 0                news() <- runtime.monitor.readings.ReadingsCollector

Rule: training never waits for it. The loop hands over numbers and takes the news that have come;
all communication is in a thread. Where it fails, it ends with one notice and the run goes on.
Units: seconds.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from parallel.layout import Layout
from recipes.output_knobs import Hardware
from runtime.monitor.clock import StepClock, TimeSpan, cuda_clock
from runtime.monitor.devices import Devices
from runtime.monitor.key_value_store import KeyValueStore, open_store
from runtime.monitor.own_time import OwnTime, own_time
from runtime.monitor.readings import DEFAULT_EVERY_S, HardwareEvent, News, ReadingsCollector
from runtime.monitor.stragglers import WINDOW_STEPS, quartile
from runtime.process.process import Process

LOOK_EVERY_S = 0.5
KEPT_WINDOWS = 4  # in a rank's post: rank 0 may look late
WARM_STEPS = 2  # first steps of an attempt: they compile, allocate and fill caches


class HardwareWatch:
    """One rank's part of the watch. `news` returns something on rank 0 only."""

    def __init__(
        self,
        wanted: Hardware,
        layout: Layout,
        process: Process,
        after_step: int,
        store: Callable[[], KeyValueStore] = open_store,
    ):
        self._process = process
        self._changed, self._is_closing = threading.Event(), False
        self._lock = threading.Lock()  # of the two lists below
        self._outbox: dict[str, Any] = {}
        self._news: list[News] = []
        self._collector: ReadingsCollector | None = None
        if process.is_first:
            stages = [layout.coordinates(rank).pipeline for rank in range(layout.world)]
            self._collector = ReadingsCollector(stages, self._publish)
        # A rank that is alone has no peers to be compared with.
        own = None
        if wanted.own_times and process.world > 1:
            own = own_time(process.device, WINDOW_STEPS)
        is_cuda = process.device.type == "cuda"
        self.clock = (cuda_clock if is_cuda else StepClock)(own=own)  # of the loop's steps
        self._times = OwnTimeWindows(own, after_step + WARM_STEPS + 1)
        self._devices = self._watch_devices(wanted, is_cuda)
        place = {"host": socket.gethostname(), "gpu": gpu_of(process)}
        self._post("place", place | {"is_first_of_host": process.local_rank == 0})
        if own or self._devices:
            threading.Thread(target=self._run, args=[store], daemon=True, name="hardware").start()

    def step(self, step: int, span: TimeSpan) -> None:
        """Take the times of a step that was launched; they are read one step later."""
        windows = self._times.add(step, span)
        if windows:
            self._post("own", windows)

    def news(self) -> list[News]:
        """Everything that has come since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """End the reader and the thread. Posts that are under way are dropped."""
        self._is_closing = True
        self._changed.set()
        if self._devices is not None:
            self._devices.close()

    def _watch_devices(self, wanted: Hardware, is_cuda: bool) -> Devices | None:
        """The reader of this host's GPUs, on the first rank of a host that has GPUs to read."""
        every_s = wanted.every_s
        if every_s is None:
            every_s = DEFAULT_EVERY_S if is_cuda else 0.0
        if not every_s:
            why = "hardware.every_s=0" if wanted.every_s == 0 else "this run is on the CPU"
            if self._process.is_first:
                self._publish(HardwareEvent("notice", f"no GPU readings: {why}", {}, is_quiet=True))
        elif self._process.local_rank == 0:
            return Devices(every_s, wanted.timeout_s, self._changed.set)
        return None

    def _post(self, what: str, value: Any) -> None:
        with self._lock:
            self._outbox[f"{what}/{self._process.rank}"] = value
        self._changed.set()

    def _publish(self, *news: News) -> None:
        with self._lock:
            self._news += news

    def _run(self, open_it: Callable[[], KeyValueStore]) -> None:
        """Body of the thread: post what this rank has; on rank 0 also collect what all have."""
        try:
            store, posted = open_it(), 0
            while not self._is_closing:
                self._changed.wait(LOOK_EVERY_S if self._collector else None)
                self._changed.clear()
                with self._lock:
                    outbox, self._outbox = self._outbox, {}
                if self._devices is not None and (count := self._devices.count()) != posted:
                    posted = count
                    outbox[f"devices/{self._process.rank}"] = self._devices.news()
                    outbox[f"count/{self._process.rank}"] = count  # after the posts that it counts
                for name, value in outbox.items():
                    store.post(name, value)
                if self._collector is not None:
                    self._collector.collect(store)
        except (RuntimeError, OSError) as error:  # the store is gone, and soon the run
            if not self._is_closing:
                reason = str(error).partition("\n")[0]
                text = f"hardware is no longer watched: {reason}"
                self._publish(HardwareEvent("notice", text, {}))


class OwnTimeWindows:
    """The own times of one rank in windows of WINDOW_STEPS steps, from step `first_step` on."""

    def __init__(self, own: OwnTime | None, first_step: int):
        self._is_measured, self._first_step = own is not None, first_step
        self._late: TimeSpan | None = None
        self._window: list[float] = []
        self._windows: deque[tuple[int, float]] = deque(maxlen=KEPT_WINDOWS)

    def add(self, step: int, span: TimeSpan) -> list[tuple[int, float]]:
        """Read the step before `step`. Returns the last windows where one has just ended.

        A window is (its last step, lower quartile of its own times in seconds).
        """
        late, self._late = self._late, span
        if not self._is_measured or late is None or step - 1 < self._first_step:
            return []
        own_s = late.own_s()
        if own_s is not None:
            self._window.append(own_s)
        if (step - 1) % WINDOW_STEPS:
            return []
        window, self._window = self._window, []
        if not window:
            return []
        self._windows.append((step - 1, quartile(window)))
        return list(self._windows)


def gpu_of(process: Process) -> str | None:
    """The GPU of this rank as NVML and nvidia-smi count, None on a CPU.

    CUDA counts only those GPUs that CUDA_VISIBLE_DEVICES shows.
    """
    if process.device.type != "cuda":
        return None
    index = (
        process.device.index if process.device.index is not None else torch.cuda.current_device()
    )
    shown = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return shown[index] if index < len(shown) and shown[index] else str(index)
