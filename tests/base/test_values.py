"""base/values.py: counts and lists as people read them."""

from __future__ import annotations

import pytest

from base.values import counted, first_of, listed


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
