"""Expected goodput of a run with failures, and the interval between saves that makes it largest.

    formula      goodput = n s / (M exp(R / M) (exp((n s + d) / M) - 1))
    simulator    failures drawn one by one, the clock advanced from save to save

n steps of s seconds lie between two saves, d = stall of a save, R = time from a failure to training
again, M = mean time between failures. Failures come at any moment, also during a restart
(exponential distribution). The formula is exact under these assumptions (J. T. Daly, "A higher
order estimate of the optimum checkpoint interval", 2006, eq. 13). The simulator shares only the
assumptions with it. Units: seconds, steps.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# More steps than any run trains between two saves.
MOST_STEPS = 2**40


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of the stall of a save, and from a failure to training again."""

    step_s: float
    stall_s: float
    restart_s: float


def goodput(costs: Costs, mtbf_s: float, interval: int) -> float:
    """Useful share of the wall clock, 0..1, with a save every `interval` steps."""
    work_s = interval * costs.step_s
    exponent = (work_s + costs.stall_s) / mtbf_s
    if exponent + costs.restart_s / mtbf_s > 500:  # no save is ever reached
        return 0.0
    return work_s / (mtbf_s * math.exp(costs.restart_s / mtbf_s) * math.expm1(exponent))


def best_interval(costs: Costs, mtbf_s: float) -> int:
    """Steps between saves with the largest goodput.

    Goodput as a function of the interval has one maximum, so a ternary search finds it.
    """
    low, high = 1, max(2, min(MOST_STEPS, math.ceil(20 * mtbf_s / costs.step_s)))
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if goodput(costs, mtbf_s, left) < goodput(costs, mtbf_s, right):
            low = left + 1
        else:
            high = right
    return max(range(low, high + 1), key=lambda steps: goodput(costs, mtbf_s, steps))


def simulate(
    costs: Costs, mtbf_s: float, interval: int, failures: int = 4000, seed: int = 0
) -> float:
    """Useful share, 0..1, over `failures` injected failures; only saved work counts."""
    draw = random.Random(seed)
    work_s, stall_s = interval * costs.step_s, costs.stall_s
    wall_s = useful_s = 0.0
    for _ in range(failures):
        left_s = draw.expovariate(1 / mtbf_s)  # until this failure
        wall_s += left_s
        left_s -= costs.restart_s
        if left_s > 0:
            useful_s += (left_s // (work_s + stall_s)) * work_s
    return useful_s / wall_s
