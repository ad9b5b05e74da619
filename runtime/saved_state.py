"""The state that a checkpoint holds besides weights and optimizer: step, data, recipe, health."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from checkpoint.format.state import RunState
from checkpoint.save.commit import SaveReport
from recipes.schema import Recipe
from record import run_folder
from runtime.resolve import Resolved


class SavedState:
    """Makes the RunState of each save, and keeps what the next save must still report."""

    def __init__(self, recipe: Recipe, resolved: Resolved, stream: Any):
        self.segment = 0  # of the history
        # Step and validation loss of the newest evaluation since the save before.
        self.evaluated: tuple[int, Any] | None = None
        self._recipe, self._resolved = recipe, resolved
        self._stream = stream  # data.stream.stream.Stream
        self._skipped_before = 0  # skipped steps that a checkpoint reports already
        self._newest_skipped = 0  # skipped steps at the newest save that was begun

    def go_on(self, state: RunState) -> None:
        """Continue from the checkpoint that was loaded."""
        self._skipped_before = state.health["skipped_steps"]

    def after(
        self, step: int, health: dict[str, Any], optimizer_step: int | None, saving: dict[str, Any]
    ) -> RunState:
        """The state after update `step`.

        `health` is completed by what tells a healthy checkpoint: the newest validation loss since
        the save before (null: none, or not finite), its step, and the number of skipped steps since
        then. `optimizer_step` None: the optimizer does not count its updates.
        """
        val_step, loss = self.evaluated or (None, math.nan)
        val_loss = float(loss)
        skipped = self._newest_skipped = health["skipped_steps"]
        health = health | {
            "val_loss": val_loss if math.isfinite(val_loss) else None,
            "val_step": val_step,
            "skipped_since_save": skipped - self._skipped_before,
        }
        return RunState(
            step=step,
            tokens=self._stream.tokens_after(step),
            optimizer_step=step - skipped if optimizer_step is None else optimizer_step,
            seed=self._recipe.seed,
            recipe=dataclasses.asdict(self._recipe),
            data=self._stream.state() | {"past": self._stream.past(step)},
            layout=self._resolved.layout.as_dict(),
            versions=run_folder.versions(),
            segment=self.segment,
            health=health,
            saving=saving,
        )

    def saved(self, report: SaveReport) -> None:
        """A save has ended: a later one need not repeat what a good checkpoint reports."""
        if not report.ok:
            return
        self._skipped_before = self._newest_skipped
        if self.evaluated and self.evaluated[0] <= report.step:
            self.evaluated = None
