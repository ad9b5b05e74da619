"""The health policy as a pure function: recorded-like sequences get the right verdicts."""

from __future__ import annotations

import json
import math

import pytest
from sequences import (
    bloom_spike,
    flat,
    healthy,
    mixed,
    opt_decline,
    slow_drift,
    with_spikes,
)

from base.errors import UserError
from recipes.faults import Health as Knobs
from runtime.health.verdict import HealthState, Limits, Seen, Verdict, judge

NAN, INF = math.nan, math.inf


def verdicts(sequence, knobs=None, warmup=0, regime=lambda step: "", rewound_at=(), health=None):
    """[(step, judgement)] that are not a plain go-on, up to the end of the attempt; and the
    health.
    """
    limits = Limits(knobs or Knobs(), warmup)
    health, found = health or HealthState(), []
    for step, (loss, norm) in enumerate(sequence, start=1):
        seen = Seen(step, step - 1, loss, norm, regime(step))
        judged = judge(health, seen, limits, rewound_at)
        health = judged.health
        if judged.verdict != Verdict.GO_ON or judged.reason:
            found.append((step, judged))
        if judged.verdict in (Verdict.ROLL_BACK, Verdict.STOP):
            break
    return found, health


def kinds(found) -> list[tuple[int, str]]:
    return [(step, str(judged.verdict)) for step, judged in found]


def test_ten_thousand_healthy_steps_raise_no_alarm():
    assert verdicts(healthy(10_000, seed=1), warmup=500)[0] == []


def test_harder_batches_are_not_taken_for_sickness():
    """One in 33 is 1.2 nats harder: left out only where its norm jumps by chance as well."""
    found, health = verdicts(mixed(2000, seed=2, share=0.03), warmup=200)
    assert len(found) <= 1
    assert health.best_loss is not None  # it ran to the end


def test_small_noisy_batches_raise_no_alarm():
    assert verdicts(healthy(1000, seed=3, noise=0.2), warmup=200)[0] == []


def test_a_spike_like_blooms_never_reaches_the_weights_and_is_rolled_back():
    found, _ = verdicts(bloom_spike(4))
    spike = range(401, 431)
    assert found[0][0] in (401, 402)  # the first step of the rise is 5 times the usual norm
    assert {step for step, _ in found} <= set(spike)
    last, judged = found[-1]
    assert judged.verdict == Verdict.ROLL_BACK
    assert judged.onset == found[0][0]
    assert last <= 401 + Knobs().patience  # long before the loss is at its worst for long
    assert all(judged.is_bad for _, judged in found)
    assert "gradient norm" in found[0][1].reason
    assert "limit" in found[0][1].reason


def test_a_decline_like_opts_is_rolled_back_to_before_it_began():
    found, _ = verdicts(opt_decline(5))
    ((step, judged),) = found
    assert judged.verdict == Verdict.ROLL_BACK
    assert 500 < step < 1000
    assert judged.onset <= 520
    assert "the loss has risen" in judged.reason


def test_a_slow_drift_of_the_norm_is_healthy_and_one_of_the_loss_stops_the_run():
    """Going back behind thousands of steps would throw them away: a person must look."""
    assert verdicts(slow_drift(6, rise=-0.1))[0] == []
    ((step, judged),) = verdicts(slow_drift(6, rise=0.7))[0]
    assert judged.verdict == Verdict.STOP
    assert "would lose over 1000 steps" in judged.reason
    assert step > 1500


def test_twin_spikes_are_both_left_out_and_nothing_else_is():
    """The first one must not widen the limits for the second."""
    twins = [200, 201, 230, 231]
    found, health = verdicts(with_spikes(flat(400, 7), twins, loss=4.0, norm=4.0))
    assert kinds(found) == [(step, "skip") for step in twins]
    assert max(health.norms) < 1


def test_the_first_steps_may_be_wild():
    wild = [(11.0 - 0.05 * k + 2 * (k % 5 == 0), 40.0 / k * (9 if k % 7 == 0 else 1))
            for k in range(1, 65)]  # fmt: skip
    assert verdicts(wild + flat(100, 8, loss=7.5, norm=0.6), warmup=100)[0] == []


@pytest.mark.parametrize("sick", [(NAN, 0.2), (2.2, INF), (2.2, NAN), (2.2, -1.0), (INF, INF)])
def test_one_step_that_is_not_finite_leaves_no_trace_in_the_statistics(sick):
    plain = flat(300, 9)
    found, health = verdicts([*plain[:200], sick, *plain[200:]])
    assert kinds(found) == [(201, "skip")]
    assert found[0][1].is_bad
    without = verdicts(plain)[1]
    assert (health.losses, health.norms) == (without.losses, without.norms)
    assert health.skipped_steps == 1
    assert health.skips_in_a_row == 0
    assert all(map(math.isfinite, health.losses + health.norms))


def test_storms_of_nan_are_rolled_back_in_a_row_or_scattered():
    plain = flat(200, 10)
    found, _ = verdicts(with_spikes(plain, [100, 101, 102, 103], NAN, INF))
    assert kinds(found) == [(100, "skip"), (101, "skip"), (102, "roll_back")]
    assert found[-1][1].onset == 100
    scattered = list(range(100, 130, 3))
    found, _ = verdicts(with_spikes(plain, scattered, NAN, INF))
    assert kinds(found)[-1] == (scattered[Knobs().patience - 1], "roll_back")
    # In the very first steps too: nothing excuses them.
    assert kinds(verdicts([(NAN, INF)] * 9)[0])[-1] == (3, "roll_back")


def test_rewinds_that_follow_one_another_end_in_a_stop():
    storm = with_spikes(flat(200, 11), [100, 101, 102], NAN, INF)
    assert verdicts(storm, rewound_at=(1, 2))[0][-1][1].verdict == Verdict.ROLL_BACK
    judged = verdicts(storm, rewound_at=(1, 2, 3))[0][-1][1]
    assert judged.verdict == Verdict.STOP
    assert "3 rewinds within 1000 steps" in judged.reason
    late = [(2.2, 0.2)] * 3000 + storm
    assert verdicts(late, rewound_at=(1, 2, 3))[0][-1][1].verdict == Verdict.ROLL_BACK


def test_the_policy_can_be_turned_off_piece_by_piece():
    spike = with_spikes(flat(300, 12), [200], loss=5.0, norm=50.0)
    ((_, kept),) = verdicts(spike, Knobs(outliers="keep"))[0]
    assert (kept.verdict, kept.is_bad) == (Verdict.GO_ON, False)
    assert "norm" in kept.reason
    assert verdicts(spike, Knobs(outliers="off"))[0] == []
    long_spike = with_spikes(flat(300, 12), list(range(200, 240)), loss=5.0, norm=50.0)
    found, _ = verdicts(long_spike, Knobs(patience=0))
    assert len(found) == 40
    assert {judged.verdict for _, judged in found} == {Verdict.SKIP}
    assert verdicts(long_spike, Knobs(rewind=0))[0][-1][1].verdict == Verdict.STOP
    assert verdicts(opt_decline(5), Knobs(drift=0))[0] == []
    # What is not finite is skipped whatever the knobs say.
    storm = with_spikes(flat(200, 13), [100], NAN, INF)
    assert verdicts(storm, Knobs(outliers="off", patience=0))[0][0][1].is_bad


def test_another_mixture_or_batch_size_begins_anew():
    """The loss may jump by a nat for good where the recipe changes the data."""
    sequence = flat(300, 14) + flat(300, 15, loss=3.4, norm=2.0)
    assert kinds(verdicts(sequence)[0])[-1][1] == "roll_back"
    assert verdicts(sequence, regime=lambda step: "b" if step > 300 else "a")[0] == []


def test_the_statistics_survive_a_checkpoint_to_the_bit():
    sequence = bloom_spike(16)
    whole, _ = verdicts(sequence)
    _, half = verdicts(sequence[:403])
    again = HealthState.from_dict(json.loads(json.dumps(half.as_dict() | {"val_loss": 3.1})))
    assert again == half
    limits = Limits(Knobs())
    judged = judge(again, Seen(404, 403, *sequence[403]), limits)
    assert judged == judge(half, Seen(404, 403, *sequence[403]), limits)
    assert judged == dict(whole)[404]
    with pytest.raises(UserError, match=r"health is without bad, .*another version"):
        HealthState.from_dict({"skips_in_a_row": 0, "skipped_steps": 0})
