"""runtime/engine/learning_rate.py: the rate of each step, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from base.errors import UserError
from recipes.schema import Optim
from runtime.engine.learning_rate import learning_rate, warmup_steps


def rates(schedule: str, warmup: int, total: int = 5, steps: int = 8, **knobs) -> list[float]:
    optim = Optim(lr=1.0, final_lr_ratio=0.0, schedule=schedule, **knobs)
    return [learning_rate(step, optim, warmup, total) for step in range(1, steps + 1)]


def test_linear_schedule_by_hand():
    assert rates("linear", warmup=1) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_warmup_climbs_to_the_peak_and_never_starts_at_zero(schedule, warmup):
    values = rates(schedule, warmup)
    assert values[0] == 1.0 / max(warmup, 1)
    assert values[max(warmup, 1) - 1] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(values[warmup:]))


def test_cosine_is_half_way_down_in_the_middle_and_ends_at_the_final_ratio():
    optim = Optim(lr=2.0, final_lr_ratio=0.1, schedule="cosine")
    assert learning_rate(6, optim, 1, 11) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert learning_rate(11, optim, 1, 11) == pytest.approx(0.2)


def test_wsd_stays_at_the_peak_until_the_decay_share_begins():
    values = rates("wsd", warmup=2, total=10, steps=10, decay=0.5)
    assert values[1:5] == [1.0] * 4
    assert values[5:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_warmup_longer_than_the_run_is_refused_but_a_fraction_never_is():
    assert warmup_steps(5, 5) == 5
    assert warmup_steps(0.5, 5) == 2
    assert warmup_steps(0.01, 20) == 0
    with pytest.raises(UserError, match="warmup=10 steps is longer than the run of 5"):
        warmup_steps(10, 5)
