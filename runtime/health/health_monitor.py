"""The health of a run on one rank, from step to step: what the loop asks and the engine obeys.

    begin(data) -> engine asks may_update(loss, norm) -> the judgement of the step

The one rule: the same numbers on every rank give the same judgement, so nothing here is exchanged
but the history that an attempt begins with. Units: steps, nats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from checkpoint.comm import Comm, broadcast
from checkpoint.lineage import read, segments
from recipes.schema import Recipe
from runtime.health.verdict import Health, Judgement, Limits, Seen, Verdict, judge, passed_over


class Batch(Protocol):
    """What is needed of `data.stream.stream.StepData`."""

    step: int
    data_step: int
    is_update: bool
    length: int
    is_sharded: bool


class HealthMonitor:
    """Judges each step of an attempt. `sequences_at(d + 1)` is the size of the global batch of
    data step d.
    """

    def __init__(
        self,
        recipe: Recipe,
        warmup_steps: int,
        sequences_at: Callable[[int], int],
        saved: dict[str, Any] | None,
        rewound_to: tuple[int, ...] = (),
        is_changed: bool = False,
    ):
        """`saved` is the health of the checkpoint that this attempt goes on from; `is_changed` says
        that the recipe has changed since in a way that moves the curve. Raises UserError."""
        self.limits = Limits(recipe.health, warmup_steps)
        health = Health() if saved is None else Health.from_dict(saved)
        if is_changed:
            health = dataclasses.replace(health, regime="")
        self.judgement = Judgement(Verdict.GO_ON, health)
        self._sources, self._sequences_at = recipe.data.sources, sequences_at
        self._rewound_to = rewound_to
        self._data: Batch | None = None

    @property
    def health(self) -> Health:
        """After the last step that was judged."""
        return self.judgement.health

    @property
    def is_sick(self) -> bool:
        """Whether this attempt ends here: the run goes back, or stops."""
        return self.judgement.verdict in (Verdict.ROLL_BACK, Verdict.STOP)

    def begin(self, data: Batch) -> None:
        """The step that comes next; one that the recipe leaves out is counted and no more."""
        self._data = data
        if not data.is_update:
            self.judgement = Judgement(Verdict.GO_ON, passed_over(self.health))

    def may_update(self, loss: float, grad_norm: float) -> bool:
        """Judge the step; whether the weights may move. Asked once per step, on every rank."""
        data = self._data
        seen = Seen(data.step, data.data_step, loss, grad_norm, self.regime(data))
        self.judgement = judge(self.health, seen, self.limits, self._rewound_to)
        return not self.judgement.is_bad

    def regime(self, data: Batch) -> str:
        """What a step's batch is made of; numbers of another regime say nothing about this one."""
        weights = (f"{uid}={s.weight_at(data.data_step):g}" for uid, s in self._sources.items())
        cut = f" cut to {data.length}" if data.is_sharded else ""
        return f"{self._sequences_at(data.data_step + 1)} x {' '.join(weights)}{cut}"


def rewinds_by_policy(folder: Path, comm: Comm) -> tuple[int, ...]:
    """Steps that the policy took this run back to since a person last did; a collective."""
    targets: list[int] = []
    if comm.rank == 0:
        for line in segments(read(folder)):
            if line.get("who") == "operator":
                targets = []
            elif line.get("who") == "policy":
                targets.append(line["parent"]["step"])
    return tuple(broadcast(comm, targets, "rewinds of the past"))
