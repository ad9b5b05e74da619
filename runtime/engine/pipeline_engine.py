"""The pipeline engine of DeepSpeed behind the interface of `runtime.engine.engine`.

    train_step:  F0 F1 F2 B0 F3 B1 ...   one forward, one backward, then reduce, norm, optimizer

Rule, as for the plain engine: the loss is a mean over the target tokens of the global batch.
DeepSpeed's pipeline divides the loss by the number of micro-batches, and no setting prevents that.
So the engine is configured with one micro-batch, which is what it divides by, and gets the real
number before each step, for its schedule; the loss is scaled inside the model, as in the plain
engine. Every rank gets all micro-batches of its data rank and all stages make the same calls, so no
stage can run out of data before another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.pipe.schedule import OptimizerStep

from base.errors import Shared
from model.decoder import compile_blocks
from parallel.mesh import Mesh
from parallel.pipeline import Stage
from recipes.schema import Recipe
from runtime.engine import engine as plain
from runtime.engine.initial_weights import Draw, fill_owned
from runtime.engine.optimizer import build_optimizer
from runtime.engine.update_gate import MayUpdate
from runtime.process.process import Process


class PipelineEngine(plain.Engine):
    """The layers of this rank's stage, trained in step with the other stages."""

    def __init__(self, ds: Any, mesh: Mesh, process: Process):
        super().__init__(ds, mesh, process)
        # One micro-batch per step is what DeepSpeed divides by; see the rule above.
        ds.set_train_batch_size(mesh.layout.micro_batch * mesh.layout.data)
        self._before_optimizer: Callable[[], Any] = lambda: None
        self._shape: torch.Size | None = None  # of the micro-batches of the last step
        step = ds._INSTRUCTION_MAP[OptimizerStep]

        def timed_step(ds: Any, **keywords: Any) -> None:
            self._before_optimizer()
            step(ds, **keywords)

        ds._INSTRUCTION_MAP = ds._INSTRUCTION_MAP | {OptimizerStep: timed_step}

    def train_step(
        self,
        micro_batches: Sequence[dict[str, Any]],
        targets: int,
        tokens: int,
        phase: Callable[[str], contextlib.AbstractContextManager] = lambda name: plain.NO_CONTEXT,
        may_update: MayUpdate | None = None,
    ) -> plain.StepResult:
        """Like `Engine.train_step`; the phase `compute` contains the waits for other stages."""
        self.ds.micro_batches = len(micro_batches)
        shape = micro_batches[0]["input_ids"].shape
        if shape != self._shape:  # the sequence length grew: stages exchange shapes anew
            self.ds.reset_activation_shape()
            self._shape = shape
        items = self.model.begin(micro_batches, targets, self.layout.data)
        with contextlib.ExitStack() as open_phase:

            def before_optimizer() -> None:
                open_phase.close()
                open_phase.enter_context(phase("optimizer"))
                if may_update is not None:
                    self.update_gate.ask(self._loss_so_far(), may_update)

            self._before_optimizer = before_optimizer
            open_phase.enter_context(phase("compute"))
            loss = self.ds.train_batch(items)
        # DeepSpeed keeps the times of all steps until they are printed; nothing prints them.
        self.ds.timers(TRAIN_BATCH_TIMER).reset()
        return plain.StepResult(
            loss=loss,
            grad_norm=self.ds.get_global_grad_norm(),
            tokens=tokens,
            targets=targets,
            skipped=self.update_gate.closed(),
        )

    def _loss_so_far(self) -> torch.Tensor:
        """Mean loss of the global batch before the update; DeepSpeed returns it only afterwards."""
        loss = torch.zeros((), dtype=torch.float32, device=self.process.device)
        if self.ds.is_last_stage():
            loss += self.ds.total_loss / (self.layout.data * self.layout.tensor)
        dist.all_reduce(loss)
        return loss

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Iterable[dict[str, Any]], sources: Sequence[int]
    ) -> torch.Tensor:
        """Like `Engine.evaluate`; all ranks of one data coordinate must bring the same batches."""
        batches = list(micro_batches)
        items = self.model.begin(batches, targets=1, scale=1)
        # The shape of training unless the caller evaluates with another micro-batch size.
        self.ds.reset_activation_shape()
        losses = self.ds.eval_batch(
            items, num_micro_batches=len(batches), reduce_output=None, bcast_loss=False
        )
        self.ds.reset_activation_shape()
        self.ds.train()
        totals = torch.zeros(sources[-1] + 1, 2, dtype=torch.float64, device=self.process.device)
        if self.ds.is_last_stage():
            for batch, source, loss in zip(batches, sources, losses, strict=True):
                totals[source, 0] += loss.double().sum()
                totals[source, 1] += (batch["labels"] >= 0).sum()
        dist.all_reduce(totals)
        return totals


def build_pipeline(
    recipe: Recipe,
    config: dict[str, Any],
    process: Process,
    mesh: Mesh,
    draw: Draw | None,
) -> PipelineEngine:
    """The engine of `recipe` on this rank's stage. Raises Shared where DeepSpeed refuses."""
    import deepspeed

    stage = build_stage(recipe, mesh, process.device)
    if draw is not None:
        zero, named = mesh.layout.stage, stage.named_parameters()
        fill_owned(named, stage.config, recipe.seed, zero, mesh.data, draw)
    if recipe.compile:
        compile_blocks(stage.blocks)
    optimizer = build_optimizer(stage.named_parameters(), recipe.optim)
    refuse_unequal_groups(optimizer, mesh)
    try:
        ds, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise Shared(f"DeepSpeed refuses the JSON: {' '.join(str(error).split())}") from error
    ds.train()
    return PipelineEngine(ds, mesh, process)


def build_stage(recipe: Recipe, mesh: Mesh, device: torch.device) -> Stage:
    """The layers of one stage in the training dtype on `device`, weights undefined."""
    with plain.default_dtype(plain.DTYPES[recipe.precision]), device:
        return Stage(
            plain.decoder_config(recipe),
            mesh,
            recipe.recompute,
            recipe.parallel.sequence,
        )


def refuse_unequal_groups(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Raise Shared unless all stages have the same parameter groups in the same order.

    ZeRO-1 makes one collective per group for the norm: a stage with fewer groups would leave the
    others waiting in it until they time out (DeepSpeed issue 1522).
    """
    own = [group["weight_decay"] for group in optimizer.param_groups]
    everyone: list[Any] = [None] * mesh.pipeline.size
    dist.all_gather_object(everyone, own, group=mesh.pipeline.group)
    if any(groups != own for groups in everyone):
        raise Shared(
            f"pipeline stages have different parameter groups (weight decays {everyone}), which"
            " ends in a wait without end; give every stage matrices and vectors (a decoder block)"
        )
