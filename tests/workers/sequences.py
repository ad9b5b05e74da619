"""Losses and gradient norms of training, healthy and sick, as recorded runs show them; for tests.

Each is a list of (loss, grad_norm), a function of its seed alone.
"""

from __future__ import annotations

import math
import random

Sequence = list[tuple[float, float]]


def healthy(steps: int, seed: int, warmup: int = 500, noise: float = 0.03) -> Sequence:
    """A power law of losses with the batch's own noise and a slow one; norms that are lognormal,
    fall from a warm-up, creep upward while the rate decays, and jump to 2 to 4 times now and then.
    """
    draw = random.Random(seed)
    slow, found = 0.0, []
    for step in range(1, steps + 1):
        slow = 0.9 * slow + 0.1 * draw.gauss(0, 1)
        loss = 1.9 + 7.0 * math.exp(-step / (warmup / 8)) + 1.5 * (step + 50) ** -0.28
        loss += noise * draw.gauss(0, 1) + 0.02 * slow
        norm = 0.25 + 3.0 * math.exp(-step / (warmup / 5)) + 0.1 * step / steps
        norm *= math.exp(0.15 * draw.gauss(0, 1))
        if draw.random() < 0.005:
            norm *= draw.uniform(2, 4)
        found.append((loss, norm))
    return found


def mixed(steps: int, seed: int, share: float) -> Sequence:
    """Healthy, but a `share` of the batches is of another kind: 1.2 nats up, norms 1.5 times."""
    draw = random.Random(-seed)
    return [
        (loss + 1.2, norm * 1.5) if draw.random() < share else (loss, norm)
        for loss, norm in healthy(steps, seed)
    ]


def flat(steps: int, seed: int, loss: float = 2.2, norm: float = 0.24) -> Sequence:
    """A late phase: nothing moves but noise."""
    draw = random.Random(seed)
    return [
        (loss + 0.03 * draw.gauss(0, 1), norm * math.exp(0.12 * draw.gauss(0, 1)))
        for _ in range(steps)
    ]


def bloom_spike(seed: int) -> Sequence:
    """BLOOM's shape: norm 0.24 -> 960 within 5 steps, loss 2.2 -> 5.1, back in about 30 steps."""
    rise = [(2.2 + 2.9 * (k / 5) ** 2, 0.24 * (960 / 0.24) ** (k / 5)) for k in range(1, 6)]
    fall = [(5.1 - 2.9 * k / 25, 960 * (0.24 / 960) ** (k / 25)) for k in range(1, 26)]
    return flat(400, seed) + rise + fall + flat(200, seed + 1)


def opt_decline(seed: int) -> Sequence:
    """OPT's shape: no spike, the loss climbs by a nat within some hundred steps and stays up."""
    climb = [
        (loss + 0.9 * k / 500, norm * (1 + 2 * k / 500))
        for k, (loss, norm) in enumerate(flat(500, seed + 1))
    ]
    return flat(500, seed) + climb


def slow_drift(seed: int, rise: float, steps: int = 3000) -> Sequence:
    """The loss rises by `rise` nats on the whole, the norm to five times."""
    return [
        (loss + rise * k / steps, norm * (1 + 4 * k / steps))
        for k, (loss, norm) in enumerate(flat(steps, seed))
    ]


def with_spikes(sequence: Sequence, steps: list[int], loss: float, norm: float) -> Sequence:
    """`sequence` with single sick steps (counted from 1)."""
    return [(loss, norm) if k in steps else pair for k, pair in enumerate(sequence, start=1)]
