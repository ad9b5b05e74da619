"""The DeepSpeed engine behind the small interface that the loop uses for every layout.

    engine.set_lr(lr)   engine.train_step(batches) -> StepResult   engine.evaluate(...) -> losses

Rule: the loss and its gradient are means over the target tokens of the *global* batch, so neither
masks nor the division of the batch over ranks and micro-batches changes them. DeepSpeed divides
gradients by the data-parallel size; the loss is multiplied by it beforehand. DeepSpeed's division
by the accumulation count is switched off, and the boundary is set by hand, so a batch ramp may
change the count at any step.

Nothing here reads a device value on the host: losses stay tensors until the loop asks for them, one
step later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from checkpoint.format.index import Fragment
from checkpoint.save.replicas import Replica
from model.config import DecoderConfig
from parallel.mesh import Mesh
from recipes.schema import Recipe
from record.heartbeat import HEART
from runtime.engine.update_gate import MayUpdate, UpdateGate
from runtime.process.process import Process

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NO_CONTEXT = contextlib.nullcontext()


@dataclass(frozen=True)
class StepResult:
    """The result of one update; `loss` and `grad_norm` may still be computed on the device."""

    loss: torch.Tensor  # () fp32, mean over the targets of the global batch, equal on all ranks
    grad_norm: torch.Tensor | float  # global, before clipping
    tokens: int  # positions in the global batch
    targets: int  # positions that have a target
    skipped: bool  # not finite, an outlier, or nothing to be trained: weights did not move
    # More numbers of the step, by name; rank 0's are recorded. A name with a slash is the tag in
    # TensorBoard (`router/z_loss`). The record, TensorBoard and comparisons take any of them.
    scalars: Mapping[str, torch.Tensor | float] = field(default_factory=dict)


def untrained(tokens: int, device: torch.device) -> StepResult:
    """The result of a step that counts without moving the weights; its loss is NaN."""
    nothing = torch.full((), float("nan"), device=device)
    return StepResult(loss=nothing, grad_norm=nothing, tokens=tokens, targets=0, skipped=True)


class Engine:
    """Weights, gradients and optimizer of this rank, trained by DeepSpeed."""

    def __init__(self, ds: Any, mesh: Mesh, process: Process):
        self.ds = ds
        self.mesh = mesh
        self.layout = mesh.layout
        self.process = process
        self.update_gate = UpdateGate(ds, mesh.is_plain, process.device)

    @property
    def model(self) -> nn.Module:
        """The decoder; under ZeRO-3 its parameters are empty outside their own forward."""
        return self.ds.module

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next update, on every parameter group."""
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr

    def train_step(
        self,
        micro_batches: Sequence[dict[str, Any]],
        targets: int,
        tokens: int,
        phase: Callable[[str], contextlib.AbstractContextManager] = lambda name: NO_CONTEXT,
        may_update: MayUpdate | None = None,
    ) -> StepResult:
        """One update from this rank's micro-batches of a global batch with `targets` targets.

        Each micro-batch holds the keyword arguments of the decoder, on the device. `phase(name)` is
        a context manager that times a part of the step. `may_update(loss, grad_norm)` is asked once
        before the weights move, with the same numbers on all ranks.
        """
        loss = torch.zeros((), dtype=torch.float32, device=self.process.device)
        data = self.mesh.data
        with phase("compute"):
            for index, batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                HEART.at_micro_batch(index + 1)
                self.ds.set_gradient_accumulation_boundary(is_last)
                part = self.ds(**batch, num_items_in_batch=targets).loss
                self.ds.backward(part * data.size, scale_wrt_gas=False)
                loss += part.detach()
                if not is_last:
                    self.ds.step()
        with phase("optimizer"):
            dist.all_reduce(loss, group=data.group)
            self.update_gate.ask(loss, may_update)
            self.ds.step()
        return StepResult(
            loss=loss,
            grad_norm=self.ds.get_global_grad_norm(),
            tokens=tokens,
            targets=targets,
            skipped=self.update_gate.closed(),
        )

    def fragments(self) -> list[Fragment]:
        """Parts of weights and optimizer states that this rank owns, by name: live fp32 memory.

        Creates the optimizer's states where no step has created them yet.
        """
        from checkpoint import fragments as owned

        owned.create_states(self.ds)
        return owned.fragments(self.ds, self.mesh.tensor.index)

    def replicas(self) -> list[Replica]:
        """Working weights of this rank that other ranks must hold too, equal to the bit."""
        from checkpoint import fragments as owned

        return owned.replicas(self.ds, self.mesh)

    def optimizer_step(self) -> int | None:
        """Number of updates that moved the weights; None where the optimizer does not count."""
        from checkpoint import fragments as owned

        return owned.optimizer_step(self.ds)

    def after_load(self, optimizer_step: int) -> None:
        """Copy loaded fragments into working weights and set step counts; a collective."""
        from checkpoint import fragments as owned

        owned.after_load(self.ds, optimizer_step)

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Iterable[dict[str, Any]], sources: Sequence[int]
    ) -> torch.Tensor:
        """(number of sources, 2) fp64: summed loss and number of targets; a collective.

        `sources` is the number of each micro-batch's source, ascending from 0. Every rank must
        bring the same number of micro-batches of each, because ZeRO-3 gathers weights.
        """
        self.ds.eval()
        totals = torch.zeros(sources[-1] + 1, 2, dtype=torch.float64, device=self.process.device)
        for batch, source in zip(micro_batches, sources, strict=True):
            totals[source, 0] += self.ds(**batch, num_items_in_batch=1).loss
            totals[source, 1] += (batch["labels"] >= 0).sum() / self.mesh.context.size
        self.ds.train()
        dist.all_reduce(totals, group=self.mesh.data.group)
        return totals


def mean_loss(totals: torch.Tensor) -> torch.Tensor:
    """Mean loss over the targets of all sources, () fp32; `totals` comes from `evaluate`."""
    loss, targets = totals.sum(dim=0)
    return (loss / targets).float()


def decoder_config(recipe: Recipe) -> DecoderConfig:
    """The decoder's configuration."""
    return DecoderConfig(**vars(recipe.model), max_position_embeddings=recipe.seq_len)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters get `dtype` inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
