"""Detects that a rank of this host is silent, and finds which rank hangs, and where.

    beats (record.heartbeat) -> look() -> silent for longer than the limit of its phase
      -> stacks of all ranks (SIGUSR2) -> Hung: the rank of this host to blame
      -> launch.ranks.inquiry: the one of all hosts -> the owner kills all at once

Rule: silence is counted on this process's own clock, and only while this process itself runs. So
neither a suspended laptop, nor a stopped process group, nor another clock is a hang.

A step may take `step_s`, or `step_factor` times the median of this rank's steps where that is
longer, both for the number of its micro-batches. The first steps of an attempt compile and fill
caches, so they have the limit of a start. Imports no torch. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.run_variables import BEATS
from recipes.schema import Watch
from record.failure import Failure, read_failure
from record.heartbeat import FAILURE, Beat, read_beat

LOOK_S = 0.5
# Between two looks more than this did not pass for a watch that was running.
MOST_GAP_S = 5.0
FIRST_STEPS = 3
MEMORY = 65  # durations that the median is taken of
DUMP_S = 3.0  # what a rank has to write its stacks
# Waits written in C leave as their innermost frame the one that runtime.monitor.own_time puts
# around them.
WAITS_IN = re.compile(
    r"torch/distributed/|deepspeed/comm/|checkpoint/comm\.py"
    r"|runtime/process/rendezvous\.py|runtime/monitor/own_time\.py"
)
FRAME = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')
SHOWN_FRAMES = 8  # of the innermost ones; a collective is called from at most so deep


@dataclass(frozen=True)
class Hung:
    """A rank that hangs. `why` describes what it does, `stack` has its innermost frames.

    `only_waits` = all ranks of this host wait for one on another host. Of several ranks the one
    with the least `order` is to blame.
    """

    rank: int
    beat: Beat
    silent_s: float
    limit_s: float
    why: str = ""
    stack: tuple[str, ...] = ()
    only_waits: bool = False
    order: tuple = ()

    def __str__(self) -> str:
        step = f" of step {self.beat.step}" if self.beat.step else ""
        why = f"; {self.why}" if self.why else ""
        is_late = 0 < self.limit_s < self.silent_s
        limit = f"limit {self.limit_s:.0f} s" if is_late else "others waited beyond their limit"
        what = f"hung in phase {self.beat.phase}{step}: silent for {self.silent_s:.0f} s"
        return f"{what} ({limit}){why}"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Hung:
        """A Hung from its fields, as `dataclasses.asdict` made them."""
        tuples = {name: tuple(fields[name]) for name in ("stack", "order")}
        return cls(**{**fields, **tuples, "beat": Beat(**fields["beat"])})


@dataclass
class BeatHistory:
    """The signs of life of one rank."""

    beat: Beat = Beat()
    silent_s: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def hear(self, beat: Beat) -> None:
        """Take another beat; of several steps between two looks only the last is timed."""
        if beat.steps > self.beat.steps and beat.part_s:
            self.durations.append(beat.part_s)
        self.beat, self.silent_s = beat, 0.0

    def limit_s(self, limits: Watch) -> float:
        """The time for which this rank may be silent now; 0 = for ever."""
        if self.beat.phase != "step":
            return {
                "start": limits.start_s,
                "load": limits.load_s,
                "evaluate": limits.evaluate_s,
                "save": limits.save_s,
                "end": limits.end_s,
            }[self.beat.phase]
        if limits.step_s == 0:
            return 0
        if self.beat.steps <= FIRST_STEPS or not self.durations:
            return max(limits.start_s, limits.step_s) if limits.start_s else 0
        usual = statistics.median(self.durations) * self.beat.parts
        return max(limits.step_s, limits.step_factor * usual)


class Watchdog:
    """Watches ranks that write their beats into a private folder of this process."""

    def __init__(
        self, ranks: Sequence[int], limits: Watch, now: Callable[[], float] = time.monotonic
    ):
        self.limits, self._now, self._looked_at = limits, now, now()
        self.folder = Path(tempfile.mkdtemp(prefix="pretrain-beats-"))  # mode 0700
        self.heard = {rank: BeatHistory() for rank in ranks}
        for rank in ranks:  # whole from the start: a beat later needs no space on a full disk
            self._path(rank, "beat").write_text(Beat().line(rank))

    def environment(self) -> dict[str, str]:
        """The variables that the ranks need."""
        return {BEATS: str(self.folder)}

    def look(self, living: Sequence[int]) -> Hung | None:
        """The rank that is silent beyond its limit by most, of those that live; else None."""
        now = self._now()
        passed, self._looked_at = min(now - self._looked_at, MOST_GAP_S), now
        late = []
        for rank in living:
            heard = self.heard[rank]
            heard.silent_s += passed
            beat = read_beat(self._path(rank, "beat"))
            if beat is not None and beat != heard.beat:
                heard.hear(beat)
            limit_s = heard.limit_s(self.limits)
            if limit_s and heard.silent_s > limit_s:
                late.append(Hung(rank, heard.beat, heard.silent_s, limit_s))
        return max(late, key=lambda hung: hung.silent_s - hung.limit_s, default=None)

    def failure(self, rank: int) -> Failure | None:
        """The exception that a rank reported before it ended."""
        return read_failure(self._path(rank, FAILURE.removeprefix(".")))

    def last(self, rank: int) -> Beat:
        """The last beat of a rank, also after its end."""
        return read_beat(self._path(rank, "beat")) or self.heard[rank].beat

    def blame(self, processes: Mapping[int, int]) -> tuple[Hung, dict[int, str]]:
        """The rank that hangs, and the stacks of all ranks. `processes` is rank -> process number.

        A rank that waits for others is not blamed: when one hangs all fall silent.
        """
        stacks = self._dump(processes)
        states = {rank: state_of(pid) for rank, pid in processes.items()}
        orders = {rank: self._order(rank, stacks[rank], states[rank]) for rank in processes}
        first = min(processes, key=orders.__getitem__)
        heard = self.heard[first]
        chosen = Hung(
            first,
            heard.beat,
            heard.silent_s,
            heard.limit_s(self.limits),
            why_of(stacks[first], states[first]),
            frames_of(stacks[first])[:SHOWN_FRAMES],
            waits(stacks[first]),
            orders[first],
        )
        for rank, pid in processes.items():
            stacks[rank] = stacks[rank] or f"{no_stack(states[rank])}\n{spied(pid)}"
        return chosen, stacks

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _order(self, rank: int, stacks: str, state: str) -> tuple:
        """A sort key: the less, the more likely this rank hangs."""
        beat = self.heard[rank].beat
        order = (beat.phase != "start", beat.step, -self.heard[rank].silent_s)
        return (state != "T", bool(stacks), waits(stacks), *order)

    def _dump(self, processes: Mapping[int, int]) -> dict[int, str]:
        """The stacks that each rank writes when it is asked; an empty text where it does not."""
        stacks = dict.fromkeys(processes, "")
        sizes = dict.fromkeys(processes, 0)
        waiting = set()
        for rank, pid in processes.items():
            with contextlib.suppress(ProcessLookupError):
                if state_of(pid) != "T" and self._path(rank, "stacks").exists():
                    os.kill(pid, signal.SIGUSR2)
                    waiting.add(rank)
        deadline = time.monotonic() + DUMP_S
        while waiting and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in sorted(waiting):
                text = self._path(rank, "stacks").read_text(errors="replace")
                if text and len(text) == sizes[rank]:  # it grows no more
                    waiting.discard(rank)
                stacks[rank], sizes[rank] = text, len(text)
        return stacks

    def _path(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank-{rank:05d}.{kind}"


def frames_of(stacks: str) -> tuple[str, ...]:
    """The frames of the main thread, innermost first; faulthandler writes that thread last."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) )", stacks, flags=re.M)
    return tuple(line.strip() for line in blocks[-1].splitlines() if FRAME.match(line))


def waits(stacks: str) -> bool:
    """Whether the main thread is in a collective: it waits for other ranks."""
    return any(WAITS_IN.search(frame) for frame in frames_of(stacks)[:SHOWN_FRAMES])


def why_of(stacks: str, state: str) -> str:
    """A phrase for where a rank is."""
    if not stacks:
        return no_stack(state)
    found = FRAME.match("  " + (frames_of(stacks) or ("",))[0])
    if not found:
        return "its stacks are in its log"
    return f"it is in {found[3]} ({found[1]}, line {found[2]})"


def no_stack(state: str) -> str:
    """The reason why a rank gave no stack."""
    return {
        "T": "it is stopped (SIGSTOP) and cannot write its stack",
        "D": "it waits for a device or a disk and cannot write its stack",
        "Z": "it has ended already",
    }.get(state, "it wrote no stack")


def state_of(pid: int) -> str:
    """The state letter that Linux shows of a process; empty where it shows none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def spied(pid: int) -> str:
    """The stacks that py-spy reads from a process, where it is installed and permitted."""
    tool = shutil.which("py-spy")
    if tool is None:
        return ""
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
