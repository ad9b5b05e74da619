"""Makes losses and gradient norms like those of recorded runs, healthy and sick, for tests.

Each is a list of (loss, grad_norm), a function of its seed alone.
"""

from __future__ import annotations

import math
import random

Sequence = list[tuple[float, float]]


def healthy(steps: int, seed: int, warmup: int = 500, noise: float = 0.03) -> Sequence:
    """A healthy run.

    Losses follow a power law with fast and slow noise. Norms are lognormal, fall after the warm-up,
    rise slowly while the learning rate decays, and sometimes jump to 2 to 4 times.
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
    """A healthy run in which a `share` of the batches has 1.2 nats more loss, 1.5 x the norm."""
    draw = random.Random(-seed)
    return [
        (loss + 1.2, norm * 1.5) if draw.random() < share else (loss, norm)
        for loss, norm in healthy(steps, seed)
    ]


def flat(steps: int, seed: int, loss: float = 2.2, norm: float = 0.24) -> Sequence:
    """A late phase of a run: constant with noise."""
    draw = random.Random(seed)
    return [
        (loss + 0.03 * draw.gauss(0, 1), norm * math.exp(0.12 * draw.gauss(0, 1)))
        for _ in range(steps)
    ]


def bloom_spike(seed: int) -> Sequence:
    """A spike like BLOOM's: norm 0.24 to 960 in 5 steps, loss 2.2 to 5.1, back after 30 steps."""
    rise = [(2.2 + 2.9 * (k / 5) ** 2, 0.24 * (960 / 0.24) ** (k / 5)) for k in range(1, 6)]
    fall = [(5.1 - 2.9 * k / 25, 960 * (0.24 / 960) ** (k / 25)) for k in range(1, 26)]
    return flat(400, seed) + rise + fall + flat(200, seed + 1)


def opt_decline(seed: int) -> Sequence:
    """A decline like OPT's: no spike, the loss rises by 1 nat in some hundred steps and stays."""
    climb = [
        (loss + 0.9 * k / 500, norm * (1 + 2 * k / 500))
        for k, (loss, norm) in enumerate(flat(500, seed + 1))
    ]
    return flat(500, seed) + climb


def slow_drift(seed: int, rise: float, steps: int = 3000) -> Sequence:
    """A slow drift: the loss rises by `rise` nats in total, the norm to five times."""
    return [
        (loss + rise * k / steps, norm * (1 + 4 * k / steps))
        for k, (loss, norm) in enumerate(flat(steps, seed))
    ]


def with_spikes(sequence: Sequence, steps: list[int], loss: float, norm: float) -> Sequence:
    """`sequence` with single sick steps (counted from 1)."""
    return [(loss, norm) if k in steps else pair for k, pair in enumerate(sequence, start=1)]
