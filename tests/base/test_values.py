"""base.values: numbers are read exactly, and shown as people read them."""

from __future__ import annotations

import numpy
import pytest

from base.values import as_float, as_int, as_written, counted, first_of, listed


@pytest.mark.parametrize("kind", [numpy.int8, numpy.int64, numpy.uint64, numpy.float32])
def test_a_number_of_numpy_is_one_of_python(kind):
    assert as_int(kind(100)) == 100
    assert type(as_int(kind(100))) is int
    assert as_float(kind(100)) == 100.0
    assert type(as_float(kind(100))) is float
    assert as_int(kind(100)) * 2**40 == 100 * 2**40


@pytest.mark.parametrize("value", [numpy.float64(1.5), numpy.float32("nan"), numpy.bool_(True)])
def test_what_is_no_whole_number_is_refused_from_numpy_too(value):
    with pytest.raises(ValueError, match="is not a"):
        as_int(value)


def test_a_value_beyond_every_count_is_refused():
    with pytest.raises(ValueError, match="too large"):
        as_int(numpy.uint64(2**64 - 1))
    assert as_written([None, True, "a"]) == "[null, true, a]"


def test_a_count_has_the_right_plural():
    assert [counted(n, "rank") for n in (0, 1, 2, 1000)] == [
        "0 ranks", "1 rank", "2 ranks", "1,000 ranks",
    ]  # fmt: skip
    assert counted(1, "loss", "losses") == "1 loss"
    assert counted(2, "loss", "losses") == "2 losses"


@pytest.mark.parametrize("number", range(1, 9))
def test_a_shortened_list_never_ends_in_and_1_more(number):
    names = list("abcdefgh")[:number]
    text, lines = listed(names, 3), first_of(names, 3, "problems")
    assert "and 1 more" not in f"{text} {lines}"
    if number <= 4:
        assert (text, lines) == (", ".join(names), names)
    else:
        assert text == f"a, b, c and {number - 3} more"
        assert lines == ["a", "b", "c", f"... and {number - 3} more problems"]
