"""When a run saves, and what: the step's state beside the tensors.

The one rule: whether a save follows a step is a function of the step alone, so that all ranks save
together. Units: steps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from checkpoint.choose import Keep
from checkpoint.comm import Comm
from checkpoint.commit import SaveReport, due, save
from checkpoint.state import RunState, random_states
from recipes.schema import Recipe
from runtime import run_folder
from runtime.engine import Engine
from runtime.process import Process
from runtime.settle import Settled


class Saver:
    """Saves one run, on every rank."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        settled: Settled,
        stream: Any,  # data.stream.Stream
        engine: Engine,
        ranks: Comm,
        process: Process,
    ):
        self.folder, self.recipe, self.settled = folder, recipe, settled
        self.stream, self.engine, self.ranks, self.process = stream, engine, ranks, process
        self.wanted = recipe.checkpoint
        self.last_step = settled.last_step if self.wanted.at_end else 0

    def is_due(self, step: int) -> bool:
        """Whether a save follows update `step`."""
        return due(step, self.wanted.interval, self.last_step)

    def save(self, step: int, health: dict[str, int]) -> SaveReport:
        """Save the state after update `step`; a collective."""
        counted = self.engine.optimizer_step()
        state = RunState(
            step=step,
            tokens=self.stream.tokens_after(step),
            optimizer_step=step - health["skipped_steps"] if counted is None else counted,
            seed=self.recipe.seed,
            recipe=dataclasses.asdict(self.recipe),
            data=self.stream.state() | {"past": self.stream.past(step)},
            layout=self.settled.layout.as_dict(),
            versions=run_folder.versions(),
            health=health,
        )
        return save(
            self.folder,
            step,
            self.engine.fragments(),
            state.as_dict(),
            self.ranks,
            local={"random": random_states(self.process.device)},
            keep=Keep(newest=self.wanted.keep, every=self.wanted.keep_every),
            verify=self.wanted.verify,
        )
