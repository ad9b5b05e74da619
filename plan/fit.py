"""Fits the few constants marked as fitted to published runs, drawn to the values that stand in
`constants`.

Least squares of log(predicted / measured) by Gauss-Newton steps, errors beyond 10 % counted
linearly (Huber), every family of sources with the square root of its rows as weight, and every
constant held to its given value with a sixth of its range (in logarithms) as standard deviation.
Rule: the fit sees only the runs that it is handed, so a family that is left out is predicted blind.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from plan.constants import FITTED, Constants, bounds
from plan.published_rows import PublishedRun
from plan.step_time import step_time

STEPS = 3  # of Gauss-Newton; a fourth moves no constant by 1 %
ROBUST = 0.10  # log error beyond which a row pulls no harder
SPREAD = 0.05  # log error that one row is expected to have


def predicted(run: PublishedRun, constants: Constants) -> float:
    """Tokens per second and GPU."""
    seconds = step_time(run.job, run.machine, constants).total
    return run.job.tokens / seconds / run.job.world


def log_error(run: PublishedRun, constants: Constants) -> float:
    """log(predicted / measured) of the speed."""
    return math.log(predicted(run, constants) / run.tokens_per_s)


def fit(runs: Sequence[PublishedRun], names: Sequence[str] = FITTED) -> Constants:
    """The constants that suit `runs` best."""
    prior = Constants()
    # Only rows of an engine and a GPU that the constants are about.
    runs = [run for run in runs if run.is_calibrated]
    rows = Counter(run.family for run in runs)
    scale = {name: math.log(bounds(name)[1] / bounds(name)[0]) / 6 for name in names}
    now = prior
    for _ in range(STEPS):
        errors = [log_error(run, now) for run in runs]
        weights = [
            math.sqrt(rows[run.family]) / rows[run.family] / SPREAD**2
            * min(1.0, ROBUST / max(abs(error), 1e-9))
            for run, error in zip(runs, errors, strict=True)
        ]  # fmt: skip
        slopes = []
        for name in names:
            moved = dataclasses.replace(now, **{name: getattr(now, name) * 1.02})
            slopes.append(
                [
                    (log_error(run, moved) - error) / math.log(1.02)
                    for run, error in zip(runs, errors, strict=True)
                ]
            )
        size = len(names)
        matrix = [[0.0] * size for _ in names]
        side = [0.0] * size
        for i, name in enumerate(names):
            side[i] = -sum(w * s * e for w, s, e in zip(weights, slopes[i], errors, strict=True))
            side[i] -= math.log(getattr(now, name) / getattr(prior, name)) / scale[name] ** 2
            matrix[i][i] += 1 / scale[name] ** 2
            for j in range(size):
                matrix[i][j] += sum(
                    w * a * b for w, a, b in zip(weights, slopes[i], slopes[j], strict=True)
                )
        changes = {}
        for name, step in zip(names, solve_linear(matrix, side), strict=True):
            low, high = bounds(name)
            value = getattr(now, name) * math.exp(max(-0.5, min(0.5, step)))
            changes[name] = min(high, max(low, value))
        now = dataclasses.replace(now, **changes)
    return now


def solve_linear(matrix: list[list[float]], side: list[float]) -> list[float]:
    """x of matrix x = side, by elimination with pivots."""
    rows = [[*row, value] for row, value in zip(matrix, side, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                ratio = rows[row][column] / rows[column][column]
                rows[row] = [a - ratio * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
