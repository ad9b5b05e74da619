"""The hardware under a run: GPUs of all hosts and own times of all ranks, gathered on rank 0.

    every rank     step(): own time -> window of 4 steps ---------\\
    first of host  Devices: GPUs, alarms ---------------------------+-> board -> rank 0: news()
                                                                         |
                              runtime.log.rank0_record <- DeviceReading, RankTimes, Said

The one rule: training never waits for it. The loop hands over numbers and takes what has come; all
traffic is in a thread, and where it fails, it ends with one notice and the run goes on. Units:
seconds.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel.layout import Layout
from recipes.schema import Hardware as Wanted
from runtime.monitor.clock import Span, StepClock, cuda_clock
from runtime.monitor.devices import Devices
from runtime.monitor.key_value_store import KeyValueStore, open_store
from runtime.monitor.own_time import own_time
from runtime.monitor.stragglers import WINDOW_STEPS, Judge, Slow, quartile
from runtime.process.process import Process

DEFAULT_EVERY_S = 10.0
LOOK_EVERY_S = 0.5
KEPT_WINDOWS = 4  # in a rank's post: rank 0 may look late
WARM_STEPS = 2  # of an attempt: compile, allocate, fill caches
MOST_LINES = 64  # GPUs, or ranks, on record every DEFAULT_EVERY_S; more of them come more rarely


@dataclass(frozen=True)
class DeviceReading:
    """The GPUs of one host, as runtime.monitor.device_reader gives them."""

    host: str
    gpus: list[dict[str, Any]]


@dataclass(frozen=True)
class RankTimes:
    """Own seconds of a step of every rank (lower quartile of a window that ended with `step`)."""

    step: int
    own_s: list[float | None]


@dataclass(frozen=True)
class Said:
    """Something to be told: `kind` is that of the event, `text` the line for a person."""

    kind: str
    text: str
    facts: dict[str, Any]
    is_quiet: bool = False  # for the record only


class Hardware:
    """One rank's part in it; `news` gives something on rank 0 only."""

    def __init__(
        self,
        wanted: Wanted,
        layout: Layout,
        process: Process,
        after_step: int,
        store: Callable[[], KeyValueStore] = open_store,
    ):
        self._process = process
        self._window: list[float] = []
        self._windows: deque[tuple[int, float]] = deque(maxlen=KEPT_WINDOWS)
        self._late: Span | None = None
        self._first = after_step + WARM_STEPS + 1
        self._outbox: dict[str, Any] = {}
        self._changed, self._stopping = threading.Event(), False
        self._health_monitor = threading.Lock()
        self._news: list[DeviceReading | RankTimes | Said] = []
        self._collector: Collector | None = None
        if process.is_first:
            stages = [layout.coordinates(rank).pipeline for rank in range(layout.world)]
            self._collector = Collector(stages, self._tell)
        # Alone there is nobody to be held against.
        self._own = None
        if wanted.own_times and process.world > 1:
            self._own = own_time(process.device, WINDOW_STEPS)
        is_cuda = process.device.type == "cuda"
        self.clock = (cuda_clock if is_cuda else StepClock)(own=self._own)  # of the loop's steps
        every_s = wanted.every_s
        if every_s is None:
            every_s = DEFAULT_EVERY_S if is_cuda else 0.0
        self._devices: Devices | None = None
        if process.local_rank == 0 and every_s:
            self._devices = Devices(every_s, wanted.timeout_s, self._changed.set)
        if process.is_first and not every_s:
            why = "hardware.every_s=0" if wanted.every_s == 0 else "this run is on the CPU"
            self._tell(Said("notice", f"no GPU readings: {why}", {}, is_quiet=True))
        place = {"host": socket.gethostname(), "gpu": gpu_of(process)}
        self._post("place", place | {"is_first_of_host": process.local_rank == 0})
        if self._own or self._devices:
            threading.Thread(target=self._run, args=[store], daemon=True, name="hardware").start()

    def step(self, step: int, span: Span) -> None:
        """After each step, with its times, which are read one step later."""
        late, self._late = self._late, span
        if self._own is None or late is None or step - 1 < self._first:
            return
        own_s = late.own_s()
        if own_s is not None:
            self._window.append(own_s)
        if (step - 1) % WINDOW_STEPS == 0:
            if self._window:
                self._windows.append((step - 1, quartile(self._window)))
                self._post("own", list(self._windows))
            self._window = []

    def news(self) -> list[DeviceReading | RankTimes | Said]:
        """What has come since the last call."""
        with self._health_monitor:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """End the reader and the thread; what is under way is dropped."""
        self._stopping = True
        self._changed.set()
        if self._devices is not None:
            self._devices.close()

    def _post(self, what: str, value: Any) -> None:
        with self._health_monitor:
            self._outbox[f"{what}/{self._process.rank}"] = value
        self._changed.set()

    def _tell(self, *news: DeviceReading | RankTimes | Said) -> None:
        with self._health_monitor:
            self._news += news

    def _run(self, open_it: Callable[[], KeyValueStore]) -> None:
        """The thread: posts what this rank has, and on rank 0 collects what is there."""
        try:
            store, posted = open_it(), 0
            while not self._stopping:
                self._changed.wait(LOOK_EVERY_S if self._collector else None)
                self._changed.clear()
                with self._health_monitor:
                    outbox, self._outbox = self._outbox, {}
                if self._devices is not None and (count := self._devices.count()) != posted:
                    posted = count
                    outbox[f"devices/{self._process.rank}"] = self._devices.news()
                    outbox[f"count/{self._process.rank}"] = count  # after what it counts
                for name, value in outbox.items():
                    store.post(name, value)
                if self._collector is not None:
                    self._collector.collect(store)
        except (RuntimeError, OSError) as error:  # the store is gone, and soon the run
            if not self._stopping:
                reason = str(error).partition("\n")[0]
                self._tell(Said("notice", f"hardware is no longer watched: {reason}", {}))


class Collector:
    """Rank 0: what stands on the board -> news. Only its thread calls it."""

    def __init__(self, stages: Sequence[int], tell: Callable[..., None]):
        self._stages, self._tell = stages, tell
        self._judge = Judge(stages)
        self._places: dict[int, dict[str, Any]] = {}
        self._windows: dict[int, dict[int, float]] = {}  # last step -> rank -> own seconds
        self._judged, self._judged_at = 0, math.inf
        self._seen: dict[int, int] = {}  # rank that posts for its host -> reading
        self._heard: dict[int, int] = {}  # ... -> what it said
        self._counts: dict[int, int] = {}
        self._gpus: dict[int, int] = {}  # ... -> how many it has
        self._shown_at: dict[int | str, float] = {}

    def collect(self, store: KeyValueStore) -> None:
        """Look once."""
        if len(self._places) < len(self._stages):
            self._places = by_rank(store.read(self._names("place")))
        if len(self._places) < len(self._stages):
            return  # some have not begun
        if len(self._stages) > 1:
            self._times(by_rank(store.read(self._names("own"))))
        counts = by_rank(store.read(self._names("count", self._hosts())))
        changed = [rank for rank, count in counts.items() if count != self._counts.get(rank)]
        self._counts |= counts
        if changed:
            self._devices(by_rank(store.read(self._names("devices", changed))))

    def _names(self, what: str, ranks: Sequence[int] | None = None) -> list[str]:
        return [f"{what}/{rank}" for rank in (range(len(self._stages)) if ranks is None else ranks)]

    def _hosts(self) -> dict[int, str]:
        """First rank of each host -> name of the host; of two with one name the second is told
        apart by its rank."""
        hosts: dict[int, str] = {}
        for rank, place in sorted(self._places.items()):
            if place["is_first_of_host"]:
                name = place["host"]
                hosts[rank] = name if name not in hosts.values() else f"{name}.{rank}"
        return hosts

    def _times(self, posts: dict[int, list[tuple[int, float]]]) -> None:
        for rank, windows in posts.items():
            for step, own_s in windows:
                if step > self._judged:
                    self._windows.setdefault(step, {})[rank] = own_s
        world = len(self._stages)
        for step in sorted(self._windows):
            is_whole = len(self._windows[step]) == world
            # A window that two later ones have overtaken will not be whole any more.
            if not is_whole and step > max(self._windows) - 2 * WINDOW_STEPS:
                break
            known = self._windows.pop(step)
            self._judge_window(step, [known.get(rank) for rank in range(world)])

    def _judge_window(self, step: int, own_s: list[float | None]) -> None:
        now = time.monotonic()
        seconds = max(0.0, now - self._judged_at)  # of the first one it is not known
        self._judged_at, self._judged = now, step
        if self._is_due("own", len(own_s)):
            self._tell(RankTimes(step, own_s))
        for slow in self._judge.add(step, seconds, own_s):
            self._tell(self._slow(step, slow))
        for rank in self._judge.recovered():
            facts = {"step": step, "rank": rank, **self._where(rank)}
            text = f"rank {rank} on {self._named(rank)} is as fast as it should be again"
            self._tell(Said("slow_rank_over", text, facts))

    def _slow(self, step: int, slow: Slow) -> Said:
        is_alone = slow.rank in self._judge.alone
        against = "as it was before it would be" if is_alone else "that of its peers"
        text = (
            f"rank {slow.rank} on {self._named(slow.rank)} is slow: its own work takes"
            f" {slow.own_s:.2f} s a step, {against} {slow.peers_s:.2f} s"
            f" ({slow.ratio:.2f}x), since step {slow.since_step}"
        )
        facts = {
            "step": step,
            "rank": slow.rank,
            **self._where(slow.rank),
            "own_s": slow.own_s,
            "peers_s": slow.peers_s,
            "ratio": slow.ratio,
            "since_step": slow.since_step,
            "is_lasting": slow.is_lasting,
        }
        return Said("slow_rank", text, facts)

    def _where(self, rank: int) -> dict[str, Any]:
        return {"host": self._places[rank]["host"], "gpu": self._places[rank]["gpu"]}

    def _named(self, rank: int) -> str:
        place = self._places[rank]
        return place["host"] + ("" if place["gpu"] is None else f", GPU {place['gpu']}")

    def _devices(self, posts: dict[int, dict[str, Any]]) -> None:
        hosts = self._hosts()
        self._gpus |= {rank: len(news["gpus"]) for rank, news in posts.items()}
        for rank, news in posts.items():
            host = hosts[rank]
            for number, said in news["said"]:
                if number > self._heard.get(rank, 0):
                    self._heard[rank] = number
                    self._tell(device_said(host, said))
            if news["number"] > self._seen.get(rank, 0):
                self._seen[rank] = news["number"]
                if self._is_due(rank, sum(self._gpus.values())):
                    self._tell(DeviceReading(host, news["gpus"]))

    def _is_due(self, key: int | str, lines: int) -> bool:
        """Whether what comes in `lines` parts is written again: large clusters more rarely."""
        pause_s = DEFAULT_EVERY_S * (lines // MOST_LINES)
        now = time.monotonic()
        if now - self._shown_at.get(key, -pause_s) < pause_s:
            return False
        self._shown_at[key] = now
        return True


def device_said(host: str, said: dict[str, Any]) -> Said:
    """An alarm or a notice of one host's GPUs."""
    if said["kind"] == "notice":
        return Said("notice", f"{host}: {said['text']}", {"host": host})
    where = host if said["index"] is None else f"{host}, GPU {said['index']}"
    facts = {"host": host, "gpu": said["index"], "what": said["what"], "action": said["action"]}
    text = f"{where}: {said['text']}; {said['action']}"
    return Said("gpu_alarm", text, facts, said["is_quiet"])


def by_rank(found: dict[str, Any]) -> dict[int, Any]:
    """{"own/3": x} -> {3: x}."""
    return {int(name.rpartition("/")[2]): value for name, value in found.items()}


def gpu_of(process: Process) -> str | None:
    """The GPU of this rank as NVML and nvidia-smi count, None on a CPU. CUDA counts only those that
    CUDA_VISIBLE_DEVICES shows."""
    if process.device.type != "cuda":
        return None
    index = (
        process.device.index if process.device.index is not None else torch.cuda.current_device()
    )
    shown = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return shown[index] if index < len(shown) and shown[index] else str(index)
