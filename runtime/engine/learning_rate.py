"""The learning rate of every step.

Rule: it is a pure function of the step, set on the parameter groups before each update. There is no
scheduler object whose state would have to be saved, so a resumed run, another layout or another
accumulation cannot shift it. No torch.

Units: steps are optimizer updates, counted from 1.
"""

from __future__ import annotations

import math

from base.errors import UserError
from recipes.schema import Optim


def warmup_steps(warmup: float | int, total_steps: int) -> int:
    """Steps of linear warm-up: a whole number is steps, a fraction below 1 is a share of the run.

    Raises UserError when a number of steps is longer than the run (a fraction never is).
    """
    if isinstance(warmup, float) and warmup < 1:
        return round(warmup * total_steps)
    if warmup > total_steps:
        raise UserError(
            f"warmup={warmup} steps is longer than the run of {total_steps} steps: the peak"
            f" learning rate would never be reached; give at most {total_steps}, or a fraction such"
            " as 0.01"
        )
    return int(warmup)


def learning_rate(step: int, optim: Optim, warmup: int, total_steps: int) -> float:
    """Learning rate of update `step` (1-based), for `warmup` warm-up steps of `total_steps`.

    The warm-up is linear and reaches the peak exactly at step `warmup`; step 1 has peak / warmup,
    never 0. After it, the shape runs from the peak to `final_lr_ratio` x peak at the last step.
    Shapes: cosine (Loshchilov and Hutter 2017, one half period), linear, wsd = warm-up, stable,
    decay (linear over the last `decay` share of the run, Hu et al. 2024), constant. A step past
    the end keeps the last value.
    """
    if step < warmup:
        return optim.lr * step / warmup
    start = max(warmup, 1)
    if optim.schedule == "wsd":
        start = max(start, total_steps - round(optim.decay * total_steps))
    length = total_steps - start
    progress = min(max(step - start, 0) / length, 1.0) if length > 0 else 0.0
    if optim.schedule == "constant":
        return optim.lr
    share = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.lr * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * share)
