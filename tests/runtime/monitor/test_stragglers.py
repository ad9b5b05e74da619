"""runtime/monitor/stragglers.py: who is slow, from simulated own times."""

from __future__ import annotations

import random
import time

import pytest

from runtime.monitor import stragglers
from runtime.monitor.stragglers import WINDOW_STEPS, Judge, quartile


def simulate(steps, ranks, time_of, stages=None, start=0):
    """[(step at which it is known, verdict)] of a run whose rank r takes time_of(step, r) s."""
    judge, found = Judge(stages or [0] * ranks), []
    window: list[list[float]] = []
    for step in range(start + 1, start + steps + 1):
        window.append([time_of(step, rank) for rank in range(ranks)])
        if len(window) == WINDOW_STEPS:
            own = [quartile(one) for one in zip(*window, strict=True)]
            seconds = sum(max(one) for one in window)
            found += [(step, slow) for slow in judge.add(step, seconds, own)]
            window = []
    return judge, found


def healthy(random_, base=0.5):
    """A step of a rank that does its work: some noise, now and then a hiccup."""
    hiccup = random_.expovariate(4) if random_.random() < 0.05 else 0.0
    return base * random_.lognormvariate(0, 0.03) + hiccup


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("first", range(101, 101 + WINDOW_STEPS))
def test_a_rank_slowed_1_5_times_is_named_within_20_steps(ranks, first):
    source = random.Random(ranks * 10 + first)

    def time_of(step, rank):
        return healthy(source) * (1.5 if rank == ranks - 1 and step >= first else 1.0)

    _, found = simulate(160, ranks, time_of)
    [(step, slow)] = found
    assert slow.rank == ranks - 1
    assert slow.ratio == pytest.approx(1.5, rel=0.1)
    assert step - first < 20
    assert first - WINDOW_STEPS < slow.since_step <= first + WINDOW_STEPS


@pytest.mark.parametrize("ranks", [2, 8])
def test_ten_thousand_healthy_steps_raise_no_alarm(ranks):
    source = random.Random(ranks)
    _, found = simulate(10_000, ranks, lambda step, rank: healthy(source))
    assert found == []


def test_batches_of_unequal_cost_raise_no_alarm():
    """Documents make a step of one rank cost twice that of another, at random."""
    source = random.Random(7)
    _, found = simulate(2000, 64, lambda step, rank: source.uniform(0.4, 0.9))
    assert found == []


def test_quick_steps_and_small_differences_are_nobodys_fault():
    assert simulate(5000, 2, lambda step, rank: 0.005 * (1 + rank))[1] == []
    assert simulate(500, 4, lambda step, rank: 0.3 if rank else 0.34)[1] == []


def test_a_short_disturbance_raises_no_alarm_and_quick_steps_must_be_slow_for_seconds():
    assert simulate(200, 2, lambda step, rank: 2.0 if rank and 40 < step <= 49 else 0.3)[1] == []
    assert simulate(16, 2, lambda step, rank: 0.06 + 0.06 * rank)[1] == []
    [(step, slow)] = simulate(200, 2, lambda step, rank: 0.06 + 0.06 * rank)[1]
    assert step * 0.12 >= stragglers.SUDDEN_S
    assert slow.rank == 1


def test_a_whole_host_that_is_slow_is_named_where_it_is_half_of_the_ranks():
    source = random.Random(3)
    _, found = simulate(60, 16, lambda step, rank: healthy(source) * (1.5 if rank >= 8 else 1.0))
    assert sorted(slow.rank for _, slow in found) == list(range(8, 16))


def test_stages_of_unequal_cost_are_judged_by_themselves():
    stages = [0, 0, 0, 1, 1, 1, 2]

    def time_of(step, rank):
        return (0.2, 0.6, 3.0)[stages[rank]] * (1.6 if rank == 4 else 1.0)

    _, found = simulate(40, 7, time_of, stages)
    assert [slow.rank for _, slow in found] == [4]


@pytest.mark.parametrize("slow", range(4))
def test_a_rank_alone_in_its_stage_is_named_when_it_becomes_slow_and_nobody_else(slow):
    """Also where batches grow and shrink for all, and after it is well again."""
    for ranks in {4, max(2, slow + 1)}:
        source = random.Random(slow)

        def time_of(step, rank, source=source):
            own = (0.2, 0.5, 0.4, 1.1)[rank] * (1.5 if step // 50 % 2 else 1)
            is_slow = rank == slow and 81 <= step < 201
            return own * source.lognormvariate(0, 0.03) * (1.5 if is_slow else 1)

        judge, found = simulate(500, ranks, time_of, list(range(ranks)))
        [(step, named)] = found
        assert (named.rank, judge.alone) == (slow, set(range(ranks)))
        assert step - 81 < 20
        assert named.ratio == pytest.approx(1.5, rel=0.15)
        assert judge.recovered() == [slow]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_alone_in_their_stages_raise_no_alarm_in_ten_thousand_healthy_steps(ranks):
    source = random.Random(ranks)
    own = lambda step, rank: healthy(source, base=0.3 * (1 + rank))  # noqa: E731
    assert simulate(10_000, ranks, own, list(range(ranks)))[1] == []


def test_a_rank_five_percent_slow_is_named_within_a_quarter_of_an_hour_where_it_has_peers():
    source = random.Random(5)

    def time_of(step, rank):
        return 2.0 * source.lognormvariate(0, 0.02) * (1.08 if rank == 3 else 1.0)

    _, found = simulate(450, 8, time_of)
    [(step, slow)] = found
    assert (slow.rank, slow.is_lasting) == (3, True)
    assert step * 2.1 < 900
    source = random.Random(6)
    assert simulate(2000, 8, lambda step, rank: 2.0 * source.lognormvariate(0, 0.05))[1] == []


def test_a_rank_is_named_once_and_again_after_it_was_well():
    judge, found = simulate(100, 2, lambda step, rank: 1.0 if rank == 0 or step > 60 else 1.6)
    assert [slow.rank for _, slow in found] == [1]
    assert judge.recovered() == [1]
    assert judge.recovered() == []
    found = []
    for step in range(1000, 1000 + 4 * WINDOW_STEPS, WINDOW_STEPS):
        found += judge.add(step, 4.0, [1.0, 1.6])
        assert judge.recovered() == []
    assert [slow.rank for slow in found] == [1]


def test_a_rank_whose_time_is_not_known_is_left_out():
    judge = Judge([0, 0, 0])
    for step in range(4, 60, 4):
        assert judge.add(step, 4.0, [1.0, None, 1.0]) == []
    assert judge.add(60, 4.0, [None, None, 1.0]) == []


def test_a_thousand_ranks_cost_milliseconds():
    source = random.Random(1)
    judge = Judge([0] * 1024)
    began = time.process_time()
    for step in range(4, 1200, 4):
        judge.add(step, 4.0, [source.uniform(0.9, 1.1) for _ in range(1024)])
    assert judge.slow == set()
    assert (time.process_time() - began) / 300 < 0.05
