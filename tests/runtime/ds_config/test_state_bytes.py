"""State bytes per parameter: the closed formulas against tensors that DeepSpeed allocated."""

from __future__ import annotations

import json

import pytest
from ranks import ROOT, run_ranks

from runtime.ds_config.state_bytes import state_bytes

WORKER = ROOT / "tests" / "workers" / "state_worker.py"
NOT_IMMEDIATE = ["ds.bf16.immediate_grad_update=false"]
CASES = [
    (1, "fp32", 1, []),
    (1, "fp32", 2, []),
    (1, "bf16", 1, []),
    (1, "bf16", 2, []),
    (1, "bf16", 2, NOT_IMMEDIATE),
    (2, "fp32", 2, []),
    (2, "bf16", 2, []),
    (3, "fp32", 2, []),
    (3, "bf16", 2, []),
    ("zero3_offload", "bf16", 1, []),
    ("zero3_offload", "fp32", 2, []),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One launch on two ranks builds every engine."""
    out = tmp_path_factory.mktemp("state") / "out.json"
    return run_ranks(WORKER, 2, 150, str(out), json.dumps(CASES))


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n][:3]))
)
def test_formula_equals_what_is_allocated_and_the_class_is_the_one_foretold(number, measured):
    result = measured[number]
    assert result["case"] == list(CASES[number][:3])
    assert result["class"] == result["expected_class"]
    over = result["measured"] - result["computed"]
    # Above the formula only the buckets, which are constant, and single numbers.
    assert -1e-9 <= over <= 2 * result["bucket"] + 0.01, result


def test_the_textbook_sixteen_bytes_are_the_bf16_case_on_one_rank():
    parts = state_bytes(2, "bf16", "bf16", False, False, 1, False)
    assert list(parts.values()) == [2, 2, 4, 8]
    assert sum(state_bytes(3, "bf16", "fp32", True, False, 8, False).values()) == 18 / 8
    assert state_bytes(1, "fp32", "fp32", False, True, 4, False, "sgd")["moments"] == 0
