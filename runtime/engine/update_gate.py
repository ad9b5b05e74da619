"""The gate between DeepSpeed and the optimizer that it wraps: closed, an update changes nothing.

    gradients reduced -> DeepSpeed takes the norm -> optimizer.step() -> open? -> weights move
                                                                      '> closed: nothing is touched

The one rule: one answer per step, the same on all ranks. DeepSpeed calls the optimizer once per
parameter group or, under ZeRO-3, per sub-group; the first call asks. It has read the norm by then,
so asking adds no wait for the device. What it finds not finite it leaves out by itself, without
a call; the question is then put afterwards, so that every step is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# BF16_Optimizer links its states after its first update, which may be one that is refused.
LINKED = "_hp_optimizer_states_linked"

# (loss, gradient norm before clipping) of the global batch -> whether the weights may move.
MayUpdate = Callable[[float, float], bool]


class UpdateGate:
    """Stands before the optimizer of one engine; open unless a step brings a question."""

    def __init__(self, ds: Any, is_plain: bool, device: torch.device):
        self._ds, self._is_plain, self._device = ds, is_plain, device
        self._question: MayUpdate | None = None
        self._loss: torch.Tensor | None = None
        self._answer: bool | None = None
        step = ds.basic_optimizer.step

        def gated(*arguments: Any, **keywords: Any) -> Any:
            if self._question is not None and not self._is_open():
                return None
            return step(*arguments, **keywords)

        # On the object: DeepSpeed knows the optimizer by its class.
        ds.basic_optimizer.step = gated

    def ask(self, loss: torch.Tensor, question: MayUpdate | None) -> None:
        """The next update is one with this mean loss of the global batch, equal on all ranks."""
        self._loss, self._question, self._answer = loss, question, None

    def closed(self) -> bool:
        """After DeepSpeed's step: whether the weights stayed as they were."""
        applied = self._ds.was_step_applied()
        if self._question is not None:
            applied = self._is_open() and applied
        self._question = self._loss = None
        return not applied

    def _is_open(self) -> bool:
        if self._answer is None:
            seen = torch.tensor(
                [float(self._loss), float(self._ds.optimizer._global_grad_norm)],
                dtype=torch.float64,
            )
            if not self._is_plain:
                # Sums that other groups made in another order may differ in the last bit; all
                # ranks judge what rank 0 has seen.
                seen = seen.to(self._device)
                dist.broadcast(seen, src=0)
            loss, norm = seen.tolist()
            self._answer = self._question(loss, norm)
            if not self._answer and not getattr(self._ds.optimizer, LINKED, True):
                from checkpoint.fragments import create_states  # imports deepspeed

                create_states(self._ds)
        return self._answer
