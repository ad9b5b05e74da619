"""What a rank owns under DeepSpeed, proven by resuming: same layout to the bit, others to 1e-6."""

from __future__ import annotations

import pytest
from ranks import ROOT, run_ranks

FP32 = ["fp32-1", "fp32-2", "fp32-3"]
BF16 = ["bf16-1", "bf16-2", "bf16-3", "bf16-1-accum32", "bf16-2-accum32", "bf16-3-accum32"]
SGD = ["sgd-1", "sgd-3"]
SETUPS = {1: [*FP32, "bf16-1-accum32"], 2: FP32 + BF16 + SGD, 3: [*FP32, "bf16-1-accum32"]}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """{ranks: what the worker saw}; each launch also loads what the earlier ones saved."""
    folder = tmp_path_factory.mktemp("runs")
    script = ROOT / "tests" / "workers" / "fragments_worker.py"
    return {
        world: run_ranks(
            script, world, 240, str(folder / f"out{world}.json"), str(folder), ",".join(setups)
        )
        for world, setups in SETUPS.items()
    }


@pytest.mark.parametrize("world", SETUPS)
def test_resume_in_the_same_layout_is_bit_identical(seen, world):
    """Losses and norms of the next updates, then every weight, moment and working weight."""
    same = seen[world]["same"]
    assert same == {name: [True, True] for name in SETUPS[world]}


@pytest.mark.parametrize("world", SETUPS)
def test_any_stage_and_number_of_ranks_goes_on_from_any_other(seen, world):
    """CKP-11, CKP-12: no conversion step, fp32 losses and norms as in a run never stopped."""
    cross = seen[world]["cross"]
    assert len(cross) == {1: 3, 2: 12, 3: 9}[world]
    assert max(cross.values()) < 1e-6, cross


def test_all_pairs_of_stages_are_tried(seen):
    pairs = {
        (key.split("-")[1], key.split(" -> ")[1].split("-")[1])
        for world in SETUPS
        for key in seen[world]["cross"]
    }
    assert len(pairs) == 9


@pytest.mark.parametrize("world", SETUPS)
def test_each_element_is_owned_by_exactly_one_rank(seen, world):
    """Weights and both moments of Adam, padding left out; SGD has no states."""
    counts, parameters = seen[world]["counts"], seen[world]["parameters"]
    assert counts == {
        name: number * (1 if name.startswith("sgd") else 3) for name, number in parameters.items()
    }


def test_the_optimizer_wrappers_are_those_that_the_fragments_know(seen):
    classes = seen[2]["classes"]
    assert classes["bf16-1-accum32"] == "BF16_Optimizer"
    assert classes["fp32-1"] == classes["bf16-2-accum32"] == "DeepSpeedZeroOptimizer"
    assert classes["fp32-3"] == classes["bf16-3"] == "DeepSpeedZeroOptimizer_Stage3"


def test_creating_optimizer_states_before_training_changes_no_bit(seen):
    assert seen[2]["states"] == dict.fromkeys(FP32, True)
