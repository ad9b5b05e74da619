"""One run as one rank holds it from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoint.comm import RankComm
from checkpoint.load.allowed_changes import RecipeChange
from checkpoint.load.restoring import Loaded
from checkpoint.save.lease import Lease
from data.stream.evaluation import HeldOut
from data.stream.stream import Stream
from recipes.schema import Recipe
from runtime.engine.communication import Counter
from runtime.engine.engine import Engine
from runtime.process.process import Process
from runtime.resolve import Resolved
from runtime.saving import Saver


@dataclass
class Run:
    """Everything that the loop needs on one rank."""

    recipe: Recipe
    resolved: Resolved
    stream: Stream
    data_rank: int
    held_out: HeldOut | None  # this rank's micro-batches of the evaluation; None: eval_tokens=0
    folder: Path
    process: Process
    engine: Engine
    ranks: RankComm  # the process group of checkpoints, separate from training's own
    lease: Lease | None  # rank 0: the right to write the run
    saver: Saver
    loaded: Loaded | None  # the checkpoint that this attempt goes on from
    origin: str | None  # where the weights of step 0 came from; None: they were drawn at random
    changes: list[RecipeChange]  # of the recipe, since that checkpoint
    warnings: list[str]
    counter: Counter | None  # of communication, where the recipe asks for it

    @property
    def after_step(self) -> int:
        """The update that this process goes on from; 0 = from the start."""
        return self.loaded.step if self.loaded else 0
