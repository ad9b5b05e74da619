"""Readings that all ranks have posted, turned into news for the record; rank 0 only.

    key-value store --read--> ReadingsCollector.collect() -> DeviceReading, RankTimes, HardwareEvent

Rule: only one thread calls the collector, and it never waits for a rank: what a rank has not posted
yet is looked for again at the next call. Units: seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.monitor.key_value_store import KeyValueStore
from runtime.monitor.stragglers import WINDOW_STEPS, Judge, Slow

# Every host posts a reading this often (seconds), unless the recipe gives another time.
DEFAULT_EVERY_S = 10.0
# GPUs, or ranks, that are recorded every DEFAULT_EVERY_S; larger clusters are recorded more rarely.
MOST_LINES = 64


@dataclass(frozen=True)
class DeviceReading:
    """The GPUs of one host, in the form that runtime.monitor.device_reader gives."""

    host: str
    gpus: list[dict[str, Any]]


@dataclass(frozen=True)
class RankTimes:
    """Own seconds of a step of every rank: the lower quartile of a window that ended with `step`.

    None stands for a rank whose time is not known.
    """

    step: int
    own_s: list[float | None]


@dataclass(frozen=True)
class HardwareEvent:
    """An event to be recorded: `kind` is its name, `text` the line for a person."""

    kind: str
    text: str
    facts: dict[str, Any]
    is_quiet: bool = False  # recorded, but not shown


News = DeviceReading | RankTimes | HardwareEvent


@dataclass(frozen=True)
class RankPlace:
    """The host and the GPU of one rank, posted once by the rank itself."""

    host: str
    gpu: str | None  # as nvidia-smi counts; None on a CPU
    is_first_of_host: bool  # this rank posts the readings of its host

    def __str__(self) -> str:
        return self.host if self.gpu is None else f"{self.host}, GPU {self.gpu}"

    def facts(self) -> dict[str, Any]:
        """Host and GPU as fields of an event."""
        return {"host": self.host, "gpu": self.gpu}


class HostReadings:
    """The readings of one host: which of them have been recorded already."""

    def __init__(self, name: str):
        self.name = name
        self.num_gpus = 0
        self._count = 0  # of everything that the host has posted
        self._reading = 0  # number of the newest reading that was seen
        self._event = 0  # number of the newest alarm or notice that was seen

    def has_more(self, count: int) -> bool:
        """True where the host's counter of posts has moved since the last call."""
        before, self._count = self._count, count
        return count != before

    def new_events(self, post: Mapping[str, Any]) -> list[HardwareEvent]:
        """Alarms and notices that were not seen before."""
        found = [(number, fact) for number, fact in post["said"] if number > self._event]
        self._event = max([self._event, *(number for number, _ in found)])
        return [device_event(self.name, fact) for _, fact in found]

    def new_reading(self, post: Mapping[str, Any]) -> DeviceReading | None:
        """The reading, unless it was seen before."""
        if post["number"] <= self._reading:
            return None
        self._reading = post["number"]
        return DeviceReading(self.name, post["gpus"])


class ReadingsCollector:
    """Reads the key-value store on rank 0 and hands everything new to `publish`.

    `stages` is the pipeline stage of each rank.
    """

    def __init__(self, stages: Sequence[int], publish: Callable[..., None]):
        self._world, self._publish = len(stages), publish
        self._judge = Judge(stages)
        self._places: list[RankPlace] = []  # of all ranks, as soon as all have posted
        self._hosts: dict[int, HostReadings] = {}  # first rank of the host -> its readings
        self._windows: dict[int, list[float | None]] = {}  # last step -> own seconds by rank
        self._judged_step, self._judged_at = 0, math.inf
        self._shown_at: dict[int | str, float] = {}

    def collect(self, store: KeyValueStore) -> None:
        """Look once at everything that is in the store."""
        if not self._places and not self._find_places(store):
            return  # some ranks have not begun
        if self._world > 1:
            self._collect_times(by_rank(store.read(names("own", range(self._world)))))
        counts = by_rank(store.read(names("count", self._hosts)))
        changed = [rank for rank, count in counts.items() if self._hosts[rank].has_more(count)]
        if changed:
            self._collect_devices(by_rank(store.read(names("devices", changed))))

    def _find_places(self, store: KeyValueStore) -> bool:
        """Read where every rank runs; True when all ranks have said so."""
        found = by_rank(store.read(names("place", range(self._world))))
        if len(found) < self._world:
            return False
        self._places = [RankPlace(**found[rank]) for rank in range(self._world)]
        taken: set[str] = set()
        for rank, place in enumerate(self._places):
            if place.is_first_of_host:
                # The second of two hosts with the same name is shown with its rank.
                name = f"{place.host}.{rank}" if place.host in taken else place.host
                taken.add(name)
                self._hosts[rank] = HostReadings(name)
        return True

    def _collect_times(self, posts: Mapping[int, Sequence[tuple[int, float]]]) -> None:
        """Add the windows of all ranks and judge those that are complete."""
        for rank, windows in posts.items():
            for step, own_s in windows:
                if step > self._judged_step:
                    window = self._windows.setdefault(step, [None] * self._world)
                    window[rank] = own_s
        for step in sorted(self._windows):
            # A window that two later ones have overtaken will not be completed any more.
            is_overtaken = step <= max(self._windows) - 2 * WINDOW_STEPS
            if None in self._windows[step] and not is_overtaken:
                break
            self._judge_window(step, self._windows.pop(step))

    def _judge_window(self, step: int, own_s: list[float | None]) -> None:
        now = time.monotonic()
        seconds = max(0.0, now - self._judged_at)  # not known of the first window
        self._judged_at, self._judged_step = now, step
        if self._is_due("own", self._world):
            self._publish(RankTimes(step, own_s))
        for slow in self._judge.add(step, seconds, own_s):
            self._publish(self._slow_event(step, slow))
        for rank in self._judge.recovered():
            place = self._places[rank]
            facts = {"step": step, "rank": rank, **place.facts()}
            text = f"rank {rank} on {place} is as fast as its peers again"
            self._publish(HardwareEvent("slow_rank_over", text, facts))

    def _slow_event(self, step: int, slow: Slow) -> HardwareEvent:
        place = self._places[slow.rank]
        is_alone = slow.rank in self._judge.alone
        against = "as it was before it would be" if is_alone else "that of its peers"
        text = (
            f"rank {slow.rank} on {place} is slow: its own work takes"
            f" {slow.own_s:.2f} s a step, {against} {slow.peers_s:.2f} s"
            f" ({slow.ratio:.2f}x), since step {slow.since_step}"
        )
        facts = {
            "step": step,
            "rank": slow.rank,
            **place.facts(),
            "own_s": slow.own_s,
            "peers_s": slow.peers_s,
            "ratio": slow.ratio,
            "since_step": slow.since_step,
            "is_lasting": slow.is_lasting,
        }
        return HardwareEvent("slow_rank", text, facts)

    def _collect_devices(self, posts: Mapping[int, Mapping[str, Any]]) -> None:
        """Publish events at once, and readings as often as the size of the cluster allows."""
        for rank, post in posts.items():
            self._hosts[rank].num_gpus = len(post["gpus"])
        num_gpus = sum(host.num_gpus for host in self._hosts.values())
        for rank, post in posts.items():
            host = self._hosts[rank]
            for event in host.new_events(post):
                self._publish(event)
            reading = host.new_reading(post)
            if reading and self._is_due(rank, num_gpus):
                self._publish(reading)

    def _is_due(self, key: int | str, lines: int) -> bool:
        """True where a record of `lines` lines is written now: rarely on a large cluster."""
        pause_s = DEFAULT_EVERY_S * (lines // MOST_LINES)
        now = time.monotonic()
        if now - self._shown_at.get(key, -pause_s) < pause_s:
            return False
        self._shown_at[key] = now
        return True


def device_event(host: str, fact: Mapping[str, Any]) -> HardwareEvent:
    """The event for an alarm or a notice of one host's GPUs."""
    if fact["kind"] == "notice":
        return HardwareEvent("notice", f"{host}: {fact['text']}", {"host": host})
    where = host if fact["index"] is None else f"{host}, GPU {fact['index']}"
    facts = {"host": host, "gpu": fact["index"], "what": fact["what"], "action": fact["action"]}
    text = f"{where}: {fact['text']}; {fact['action']}"
    return HardwareEvent("gpu_alarm", text, facts, fact["is_quiet"])


def names(what: str, ranks: Sequence[int] | Mapping[int, Any]) -> list[str]:
    """Keys of the store, one for each rank: ["own/0", "own/1"]."""
    return [f"{what}/{rank}" for rank in ranks]


def by_rank(found: Mapping[str, Any]) -> dict[int, Any]:
    """{"own/3": value} -> {3: value}."""
    return {int(name.rpartition("/")[2]): value for name, value in found.items()}
