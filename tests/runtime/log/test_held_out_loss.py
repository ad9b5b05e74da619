"""runtime.log.held_out_loss: an evaluation in numbers, worked by hand."""

from __future__ import annotations

import math

import pytest

from runtime.log.held_out_loss import Validation


def test_bits_per_byte_and_the_losses_of_sources_by_hand():
    """8 targets cost 8 ln 2 nats and are 4 bytes: 2 bits per byte; the others 0.5 bits."""
    nats = math.log(2)
    loss, in_bits, scalars = Validation(["a", "b"], [4, 8]).numbers([[8 * nats, 8], [4 * nats, 2]])
    assert loss == pytest.approx(12 * nats / 10, rel=1e-7)
    assert in_bits == pytest.approx(1.0)
    assert scalars == pytest.approx({
        "validation/loss/a": nats, "validation/bits_per_byte/a": 2.0,
        "validation/loss/b": 2 * nats, "validation/bits_per_byte/b": 0.5,
    })  # fmt: skip


def test_one_source_has_no_numbers_of_its_own_and_bytes_may_be_unknown():
    assert Validation(["a"], None).numbers([[6.0, 4]]) == (1.5, None, {})
    assert Validation(["a"], [3]).numbers([[6.0, 4]])[1] == pytest.approx(2.0 / math.log(2))
    assert set(Validation(["a", "b"], None).numbers([[6.0, 4], [1.0, 2]])[2]) == {
        "validation/loss/a", "validation/loss/b",
    }  # fmt: skip


def test_a_loss_that_is_not_finite_stays_so():
    loss, in_bits, scalars = Validation(["a", "b"], [4, 4]).numbers([[math.nan, 8], [2.0, 2]])
    assert math.isnan(loss)
    assert math.isnan(in_bits)
    assert scalars["validation/loss/b"] == 1.0
