"""Counts how often the host waits for a CUDA device, and whose code asked for it.

Two sources are needed, because neither sees all waits: torch's sync debug mode warns at operators
that wait (a copy to the host, `.item()`, `nonzero`); explicit waits (torch.cuda.synchronize, of a
stream, of an event) are counted where they are called. Rule: a wait belongs to the innermost frame
of DeepSpeed or of this project on the stack, and to "torch" where there is none. On a machine
without CUDA nothing is counted.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.paths import ROOT

BENCHMARKS = Path(__file__).resolve().parent
WARNING = "called a synchronizing CUDA operation"


@dataclass
class WaitCounts:
    """Number of waits by (owner, place)."""

    places: Counter = field(default_factory=Counter)

    def add(self, stack: Sequence[traceback.FrameSummary]) -> None:
        """Count one wait."""
        self.places[owner_of(stack)] += 1

    def per_step(self, steps: int, owner: str) -> float:
        """Waits for each step that "ours", "deepspeed" or "torch" caused."""
        return sum(n for (whose, _), n in self.places.items() if whose == owner) / steps

    def describe(self, steps: int) -> str:
        """Places with their counts, most frequent first."""
        common = self.places.most_common(6)
        return "; ".join(f"{n / steps:g} x {whose} {place}" for (whose, place), n in common)


def owner_of(stack: Sequence[traceback.FrameSummary]) -> tuple[str, str]:
    """Owner and file:line of a wait; `stack` ends with the innermost frame."""
    for frame in reversed(stack):
        path = Path(frame.filename)
        place = f"{path.name}:{frame.lineno}"
        if "deepspeed" in path.parts:
            return "deepspeed", place
        is_inside = path.is_relative_to(ROOT) and "site-packages" not in path.parts  # not .venv
        if is_inside and not path.is_relative_to(BENCHMARKS):
            return "ours", place
    return "torch", ""


@contextlib.contextmanager
def counted() -> Iterator[WaitCounts]:
    """Count the waits inside the block."""
    import torch

    seen = WaitCounts()

    def show(message: Any, *_: Any, **__: Any) -> None:
        if WARNING in str(message):
            seen.add(traceback.extract_stack()[:-1])

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = show
        if torch.cuda.is_available():
            for owner, name in (
                (torch.cuda, "synchronize"),
                (torch.cuda.Stream, "synchronize"),
                (torch.cuda.Event, "synchronize"),
            ):
                stack.enter_context(counted_calls(owner, name, seen))
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield seen


@contextlib.contextmanager
def counted_calls(owner: Any, name: str, seen: WaitCounts) -> Iterator[None]:
    """Count calls of `owner.name` inside the block."""
    function: Callable = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        seen.add(traceback.extract_stack()[:-1])
        return function(*arguments, **named)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)
