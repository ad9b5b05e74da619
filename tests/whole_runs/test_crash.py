"""A sample of the cases of `make crash`: SIGKILL in a save; the resumed run ends unharmed."""

from __future__ import annotations

import random
import time

import pytest
import torch
from crash import cases, check_end, crash


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: the ranks are forked, and torch's threads do not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("mode", "step"), [("sync", 4), ("async", 4)])
def test_kills_at_moments_of_a_save_leave_a_run_that_ends_as_if_nothing_had_happened(
    mode, step, tmp_path, one_thread
):
    """CKP-01: one rank, all ranks, in the middle of a write; `make crash` has all cases."""
    found = list(cases(tmp_path, mode, step))
    check_end(tmp_path / f"probe-{mode}-{step}", None)
    names = {case.name for case in found}
    assert {"os.open", "os.write", "os.fsync", "os.rename", "os.mkdir", "os.unlink"} <= names
    phases = ("arguments", "prepare", "write", "verify", "commit", "prune")
    assert {f"exchange {phase}" for phase in phases} | {"commit", "rename old"} <= names
    assert {case.rank for case in found} == {0, 1, 2}
    assert len(found) > 150
    seed = time.time_ns()
    print("seed of the sample:", seed)  # shown when the test fails
    draw = random.Random(seed)
    groups = [[c for c in found if c.rank == rank and c.how == "one"] for rank in range(3)]
    groups += [[c for c in found if c.how == how] for how in ("all", "torn")]
    groups += [
        [c for c in found if c.how == "all" and c.name == name] for name in ("commit", "rename old")
    ]
    for case in map(draw.choice, groups):
        assert crash(tmp_path, case) in (step - 2, step)
