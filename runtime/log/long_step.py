"""Shows where a step is that takes long, so that a run never stands silent.

    step 13/400: 20 s so far, in forward and backward, micro-batch 3 of 8

Rule: a thread of its own only reads what the training thread last noted (record.heartbeat), so a
step that waits in C is shown, too, and nothing is added to a step. The console is told after
FIRST_S, and then each time the wait has doubled; a terminal's live line is redrawn every second.
Units: seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from base.units import duration
from record.heartbeat import Doing, Heart
from runtime.log.console import Console

FIRST_S = 10.0  # a step that takes longer shows where it is
LOOK_S = 1.0
PARTS = {
    "data": "waiting for the batch",
    "compute": "in forward and backward",
    "optimizer": "in the optimizer step",
    "eval": "in the evaluation",
    "save": "in the save",
}
PHASES = ("step", "evaluate", "save", "end")


class LongStep:
    """Watches the steps of one attempt, on the rank that has the console."""

    def __init__(self, console: Console, heart: Heart, total_steps: int):
        self._console, self._heart, self._total = console, heart, total_steps
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="long step", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop to watch; harmless when called twice."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S)

    def _watch(self) -> None:
        look = looker(self._console, self._total)
        while not self._is_over.wait(LOOK_S):
            look(self._heart.doing())


def looker(console: Console, total_steps: int) -> Callable[[Doing], None]:
    """A function that is given what the rank does, again and again, and shows a long step."""
    step, next_s = -1, FIRST_S

    def look(doing: Doing) -> None:
        nonlocal step, next_s
        if doing.step != step:
            step, next_s = doing.step, FIRST_S
        if doing.phase not in PHASES or not doing.step or doing.step_s < FIRST_S:
            return
        is_due = doing.step_s >= next_s
        while doing.step_s >= next_s:
            next_s *= 2
        console.busy(text_of(doing, total_steps), is_due)

    return look


def text_of(doing: Doing, total_steps: int) -> str:
    """The phase of a step and its rank's position in it, as text for a person."""
    if doing.phase == "end":
        return f"after step {doing.step}/{total_steps}: {duration(doing.step_s)} so far, ending"
    where = PARTS.get(doing.part, "between two parts of the step")
    if doing.part == "compute" and doing.micro_batch:
        where += f", micro-batch {doing.micro_batch} of {doing.micro_batches}"
    return f"step {doing.step}/{total_steps}: {duration(doing.step_s)} so far, {where}"
