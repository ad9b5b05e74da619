"""Lets an update move the weights, or not: a gate between DeepSpeed and its optimizer.

    gradients reduced -> DeepSpeed takes the norm -> optimizer.step() -> open:   weights move
                                                                      -> closed: nothing changes

Rule: one answer per step, the same on all ranks. DeepSpeed calls the optimizer once per parameter
group or, under ZeRO-3, per sub-group; the first call asks the health monitor. DeepSpeed has read
the norm by then, so asking adds no wait for the device. Where the norm is not finite, DeepSpeed
leaves the update out without a call; the question is then asked afterwards, so that every step is
judged.
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
    """The gate of one engine's optimizer; open unless `ask` gave a question for the step."""

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
        """Set the question of the next update, and its mean loss, which all ranks have alike."""
        self._loss, self._question, self._answer = loss, question, None

    def closed(self) -> bool:
        """True where the weights did not move in this step; call it after DeepSpeed's step."""
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
                # Sums that groups make in different orders may differ in the last bit, so all ranks
                # use the numbers of rank 0.
                seen = seen.to(self._device)
                dist.broadcast(seen, src=0)
            loss, norm = seen.tolist()
            self._answer = self._question(loss, norm)
            if not self._answer and not getattr(self._ds.optimizer, LINKED, True):
                from checkpoint.fragments import create_states  # imports deepspeed

                create_states(self._ds)
        return self._answer
