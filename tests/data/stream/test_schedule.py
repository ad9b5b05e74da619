"""The batch schedule: which samples step N trains on, constant or ramped, and what is refused."""

import pytest

from base.errors import UserError
from data.stream.schedule import read_schedule


def test_a_constant_batch_gives_consecutive_ranges_from_step_one():
    schedule = read_schedule(1024, seq_len=128)
    assert schedule.sequences_at(1) == 8
    assert [schedule.sample_range(n) for n in (1, 2, 1000)] == [(0, 8), (8, 16), (7992, 8000)]
    assert schedule.tokens_after(0) == 0
    assert schedule.tokens_after(1000) == 1024 * 1000


def test_a_ramp_has_the_same_batch_at_each_step_wherever_it_is_asked():
    """Prefix sums against a plain loop: a resumed run asks in the middle and gets the same."""
    ramp = [[0, 2 * 16], [5, 4 * 16], [12, 8 * 16]]
    schedule = read_schedule(ramp, seq_len=16)
    first = 0
    for step in range(1, 40):
        size = 2 if step - 1 < 5 else 4 if step - 1 < 12 else 8
        assert schedule.sequences_at(step) == size
        assert schedule.sample_range(step) == (first, first + size)
        first += size
        assert schedule.tokens_after(step) == first * 16


@pytest.mark.parametrize("batch", [48, [[0, 16], [3, 48], [7, 32]]])
def test_steps_for_a_token_budget_are_the_fewest_that_reach_it(batch):
    schedule = read_schedule(batch, seq_len=16)
    for tokens in range(1, 900, 7):
        steps = schedule.steps_for(tokens)
        assert schedule.tokens_after(steps) >= tokens
        assert schedule.tokens_after(steps - 1) < tokens


def test_tokens_of_a_warm_up_by_length_add_up():
    schedule = read_schedule([[0, 64], [10, 128]], 32, [(0, 8), (5, 16), (20, 32)])
    lengths = [schedule.length_at(step) for step in range(40)]
    assert lengths == [8] * 5 + [16] * 15 + [32] * 20
    for steps in range(1, 40):
        by_length = schedule.tokens_by_length(steps)
        sizes = [64 if step < 10 else 128 for step in range(steps)]
        for length in (8, 16, 32):
            pairs = zip(lengths, sizes, strict=False)
            assert by_length.get(length, 0) == sum(n for one, n in pairs if one == length)
    assert read_schedule(64, 16).tokens_by_length(10) == {16: 640}


def test_fingerprint_says_what_happens_not_how_it_was_written():
    plain = read_schedule(64, 16)
    assert read_schedule([[0, 64], [10, 64]], 16) == plain
    assert read_schedule([[0, 64], [10, 128]], 16).fingerprint() != plain.fingerprint()
    assert read_schedule(64, 32).fingerprint() != plain.fingerprint()
    assert read_schedule(64, 16, [(0, 16)]) == plain
    assert read_schedule(64, 16, [(0, 8), (9, 16)]).fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (1000, "nearest: 896 or 1024"),
        (100, "nearest: 128"),
        (0, "not a positive multiple"),
        (-128, "nearest: 128"),
        (True, "whole number"),
        (128.0, "whole number"),
        ("many", "whole number"),
        ([], "whole number"),
        ([128, 256], "whole number"),
        ([[0, 128, 1]], "whole number"),
        ([[1, 128]], "begins at step 0, not 1"),
        ([[0, 128], [5, 256], [5, 512]], "must increase"),
        ([[0, 128], [5, 200]], r"batch_tokens\[1\]\[1\]=200 .* nearest: 128 or 256"),
    ],
)
def test_a_wrong_batch_is_refused_with_the_way_out(batch, message):
    with pytest.raises(UserError, match=message):
        read_schedule(batch, seq_len=128)


def test_all_problems_of_a_ramp_are_reported_together():
    with pytest.raises(UserError) as caught:
        read_schedule([[2, 100], [1, 200]], seq_len=128)
    assert len(caught.value.problems) == 4
