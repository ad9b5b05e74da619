"""runtime/starting.py: what has changed since the checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

from runtime.starting import change_of_ranks


def test_another_number_of_ranks_is_a_change_since_the_checkpoint():
    layout = SimpleNamespace(world=4)
    [change] = change_of_ranks({"world": 2}, layout)
    assert (change.key, change.stored, change.now, change.treatment) == ("ranks", 2, 4, "free")
    assert change_of_ranks({"world": 4}, layout) == []
    assert change_of_ranks({}, layout) == []  # a checkpoint of an older version
