"""The health monitor of one rank: it judges each step before its update.

    begin(data) -> the engine asks may_update(loss, norm) -> the judgement of the step

Rule: the same numbers give the same judgement on every rank, so ranks exchange nothing here except
the rewinds of the past, once at the beginning of an attempt. Units: steps, nats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.comm import Comm, broadcast
from checkpoint.lineage import read, segments
from data.stream.stream import StepData
from recipes.schema import Recipe
from runtime.health.verdict import (
    HealthState,
    Judgement,
    Limits,
    Seen,
    Verdict,
    judge,
    passed_over,
)


class HealthMonitor:
    """Judges each step of an attempt.

    `sequences_at(d + 1)` = number of sequences in the global batch of data step d.
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
        """`saved` = the health in the checkpoint from which this attempt goes on.

        `is_changed` = the recipe has changed since in a way that moves the loss curve. Raises
        UserError where another version wrote `saved`.
        """
        self.limits = Limits(recipe.health, warmup_steps)
        health = HealthState() if saved is None else HealthState.from_dict(saved)
        if is_changed:
            health = dataclasses.replace(health, regime="")
        self.judgement = Judgement(Verdict.GO_ON, health)
        self._sources, self._sequences_at = recipe.data.sources, sequences_at
        self._rewound_to = rewound_to
        self._data: StepData | None = None

    @property
    def health(self) -> HealthState:
        """The health after the last step that was judged."""
        return self.judgement.health

    @property
    def is_sick(self) -> bool:
        """True where this attempt ends after the step: the run is rewound, or it stops."""
        return self.judgement.verdict in (Verdict.ROLL_BACK, Verdict.STOP)

    def begin(self, data: StepData) -> None:
        """Begin the step of `data`; a step that the recipe skips is counted and not judged."""
        self._data = data
        if not data.is_update:
            self.judgement = Judgement(Verdict.GO_ON, passed_over(self.health))

    def may_update(self, loss: float, grad_norm: float) -> bool:
        """Judge the step; returns whether the weights may move. Once per step, on every rank."""
        data = self._data
        seen = Seen(data.step, data.data_step, loss, grad_norm, self.regime(data))
        self.judgement = judge(self.health, seen, self.limits, self._rewound_to)
        return not self.judgement.is_bad

    def regime(self, data: StepData) -> str:
        """The composition of a step's batch: its size, mixture and sequence length.

        Losses and norms are compared only between steps of one regime.
        """
        weights = (f"{uid}={s.weight_at(data.data_step):g}" for uid, s in self._sources.items())
        cut = f" cut to {data.length}" if data.is_shortened else ""
        return f"{self._sequences_at(data.data_step + 1)} x {' '.join(weights)}{cut}"


def rewinds_by_policy(folder: Path, comm: Comm) -> tuple[int, ...]:
    """Steps to which the policy rewound the run since a person last rewound it. A collective."""
    targets: list[int] = []
    if comm.rank == 0:
        for line in segments(read(folder)):
            if line.get("who") == "operator":
                targets = []
            elif line.get("who") == "policy":
                targets.append(line["parent"]["step"])
    return tuple(broadcast(comm, targets, "rewinds of the past"))
