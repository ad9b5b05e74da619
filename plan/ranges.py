"""The range around a prediction that should hold the measured speed four times in five.

Every term of a step has an error of its own (`ERRORS`, relative); they add in quadrature. Fields
that a row leaves blank add theirs, and so does an engine or a GPU that no constant was fitted on.
Rule: the widths are tested, not chosen: `make plan-check` prints how often a range holds the
measured value, for runs of families that were left out of the fit.
"""

from __future__ import annotations

import math

from plan.step_time import StepTime

# Relative error of each term, one in five beyond it (tested by leaving families out).
ERRORS = {
    "matmul": 0.06,
    "attention": 0.092,
    "memory_bound": 0.184,
    "launch": 0.5,
    "tensor": 0.276,
    "context": 0.5,
    "data": 0.46,
    "pipeline": 0.5,
    "bubble": 0.184,
    "optimizer": 0.3,
    "drag": 1.0,
}
# Of the whole, for what is not known.
UNKNOWN = {"recompute": 0.04, "flash_attention": 0.06, "framework": 0.10}
UNKNOWN_BUBBLE = 0.8  # of the bubble, where the number of chunks is not published
RECOMPUTED = 0.10
# An engine or GPU without rows: as often slower than predicted as engines that were measured late.
SLOWER, FASTER = 0.45, 0.18


def relative_range(
    terms: StepTime, unknown: tuple[str, ...] = (), is_calibrated: bool = True
) -> tuple[float, float]:
    """(low, high) of the speed, as multiples of the predicted one."""
    errors = ERRORS | ({"bubble": UNKNOWN_BUBBLE} if "vpp" in unknown else {})
    square = sum(
        (error * getattr(terms, name) / terms.total) ** 2 for name, error in errors.items()
    )
    square += sum(UNKNOWN.get(name, 0.0) ** 2 for name in unknown)
    width = math.sqrt(square)
    # What is not known to be recomputed may be.
    below = math.hypot(width, RECOMPUTED if "recompute" in unknown else 0.0)
    if is_calibrated:
        return math.exp(-below), math.exp(width)
    return math.exp(-math.hypot(below, SLOWER)), math.exp(math.hypot(width, FASTER))
