"""launch/hosts/own_gpus.py: all GPUs by default, and idle ones are reported."""

from __future__ import annotations

import pytest

from base.errors import UserError
from launch.hosts import own_gpus
from launch.hosts.own_gpus import count_gpus, idle_gpus, num_visible, ranks_of_gpus, refused
from recipes.compose import compose


@pytest.mark.parametrize(
    ("cards", "shown", "count"),
    [
        (8, None, 8),
        (8, "0,1,2", 3),
        (8, " 3 , 1", 2),
        (8, "GPU-5fc1,GPU-5fc2", 2),
        (8, "MIG-5fc1", 1),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,-1,2", 1),
        (2, "0,5,1", 1),  # CUDA stops at the first that is not there
        (0, None, 0),
        (0, "0", 0),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(cards, shown, count):
    assert num_visible([{"index": n} for n in range(cards)], shown) == count


def test_gpus_that_cannot_be_counted_are_not_taken_for_none(monkeypatch):
    monkeypatch.setattr(own_gpus.facts, "gpus", lambda: {"problem": "NVML gave no answer"})
    with pytest.raises(UserError, match="GPUs: NVML gave no answer; give the number of ranks"):
        count_gpus({})
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_a_recipe_gets_all_gpus_or_as_many_as_it_can_use():
    tiny = compose("tiny", []).recipe
    assert ranks_of_gpus(tiny, lambda: 4) == 4
    assert ranks_of_gpus(tiny, lambda: 0) == 0
    assert "batch_tokens=2048" in refused(tiny, 8)
    assert ranks_of_gpus(tiny, lambda: 8) == 4
    on_cpu = compose("tiny", ["cluster.device=cpu"]).recipe
    assert ranks_of_gpus(on_cpu, lambda: 1 / 0) == 0
    wide = compose("tiny", ["parallel.tensor=2", "micro_batch=4"]).recipe
    assert ranks_of_gpus(wide, lambda: 1) == 1  # refused by the start, with the reason


def test_idle_gpus_are_reported():
    assert idle_gpus(8, 8) == []
    assert idle_gpus(0, 2) == []
    assert idle_gpus(8, 2) == ["2 of 8 GPUs are used, 6 idle (NPROC=8 uses all)"]
    assert idle_gpus(8, 4, "n1: ", "no") == ["n1: 4 of 8 GPUs are used, 4 idle: no"]
