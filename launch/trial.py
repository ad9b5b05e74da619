"""A micro-batch that the plan chose is confirmed by the first step of the run: where memory runs
out in it, the next attempt has a smaller one.

    micro_batch=auto -> 8 -> out of memory before the first step was done -> 4 -> ... -> 1

Rule: only a run that has no step yet is changed, and only a micro-batch that the plan chose. The
next one divides the one before, so that the batch of an update stays the same. The launcher
decides, so all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipes.composed_file import Composed, composed_text

KNOB = "micro_batch"


class Trial:
    """The composed recipe of the next attempt, as text.

    `choice` is what the plan chose (None: nothing), `arguments` are those of the command line
    without `auto`, `compose` makes a recipe of arguments, `record` keeps a new choice for the run.
    """

    def __init__(
        self,
        composed: Composed,
        choice: Mapping[str, Any] | None,
        arguments: Sequence[str],
        compose: Callable[[Sequence[str]], Composed],
        record: Callable[[Mapping[str, Any]], None],
    ):
        self.composed, self._choice = composed, choice or {}
        self._arguments, self._compose, self._record = arguments, compose, record

    @property
    def text(self) -> str:
        """The recipe for the ranks of the next attempt."""
        return composed_text(self.composed)

    def shrink(self) -> str:
        """Take a smaller micro-batch for the next attempt; returns why, as text, or "" where the
        plan did not choose it or none is smaller.
        """
        chosen = list(self._choice.get("chosen", ()))
        now = self.composed.recipe.micro_batch
        if f"{KNOB}={now}" not in chosen or now == 1:
            return ""
        smaller = max(size for size in range(1, now // 2 + 1) if now % size == 0)
        chosen[chosen.index(f"{KNOB}={now}")] = f"{KNOB}={smaller}"
        failed = [*self._choice.get("out_of_memory", ()), now]
        self._choice = {**self._choice, "chosen": chosen, "out_of_memory": failed}
        self.composed = self._compose([*self._arguments, *chosen])
        self._record(self._choice)
        return f"out of memory in the first step at {KNOB}={now}, which the plan chose: {smaller}"
