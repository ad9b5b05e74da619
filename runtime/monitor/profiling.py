"""Records some steps of a run with torch's profiler (`log.profile=A:B`).

    runs/<run>/profile/  rank-0.trace.json.gz ...   for https://ui.perfetto.dev or chrome://tracing
                         operators.json             rank 0: what each operator took over the steps

Rule: outside of the chosen steps it costs nothing, and it changes no number of the run. Inside them
every operator is slower, small ones most: compare shares, not absolute times.

Units: seconds, summed over the steps and the threads of one rank. `self` leaves out the time of
operators that were called from inside.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from base.values import read_steps

FOLDER, OPERATORS = "profile", "operators.json"
Phase = Callable[[str], AbstractContextManager]
MOST_TRACES = 8  # ranks do the same work; one host shows which rank waits for which


class Profiler:
    """Records the steps [steps.start, steps.stop) of this rank; `phase` is the clock's."""

    def __init__(self, steps: range, folder: Path, rank: int, phase: Phase):
        self.steps, self.folder, self.rank, self._clock_phase = steps, folder, rank, phase
        self._step: Any = None
        self._profile: Any = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step, timed by the clock and marked in the trace."""
        with self._clock_phase(name), torch.profiler.record_function(f"phase {name}"):
            yield

    def begin(self, step: int) -> None:
        """Call this before everything else of `step`."""
        if step == self.steps.start:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
        if self._profile is not None and step in self.steps:
            self._step = torch.profiler.record_function(f"step {step}")
            self._step.__enter__()

    def end(self, step: int) -> None:
        """Call this after everything else of `step`. Writes the files after the last step."""
        if step not in self.steps or self._profile is None:
            return
        self._step.__exit__(None, None, None)
        if step == self.steps[-1]:
            with self._clock_phase("save"):  # left out of every speed
                self._profile.stop()
                self._write(self._profile)
            self._profile = None

    def _write(self, seen: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        if self.rank < MOST_TRACES:
            seen.export_chrome_trace(str(self.folder / f"rank-{self.rank}.trace.json.gz"))
        if self.rank == 0:
            content = {
                "steps": [self.steps.start, self.steps.stop],
                "operators": operators(seen.key_averages()),
            }
            (self.folder / OPERATORS).write_text(json.dumps(content, indent=1) + "\n")


class NoProfiler:
    """Stands in for the profiler where no step is recorded."""

    def __init__(self, phase: Phase):
        self.phase = phase

    def begin(self, step: int) -> None:
        pass

    def end(self, step: int) -> None:
        pass


def profiler_of(
    asked: str | None, run_folder: Path, rank: int, phase: Phase
) -> Profiler | NoProfiler:
    """The profiler that `log.profile` asks for; `phase` times parts of a step."""
    if asked is None:
        return NoProfiler(phase)
    return Profiler(read_steps(asked), run_folder / FOLDER, rank, phase)


def operators(averages: Any) -> list[dict[str, Any]]:
    """Name, calls and seconds of every operator, from torch's `key_averages()`."""
    return [
        {
            "name": event.key,
            "calls": event.count,
            "self_cpu_s": event.self_cpu_time_total / 1e6,
            "cpu_s": event.cpu_time_total / 1e6,
            "self_device_s": event.self_device_time_total / 1e6,
        }
        for event in averages
    ]
