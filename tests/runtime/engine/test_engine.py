"""What each DeepSpeed JSON builds, reads and sends, and that a poisoned step is the same in all.

`pipeline` stands here for its JSON in the plain engine, without the pipeline block.

One launch on two ranks (engine_worker.py); the table of numbers is printed with `pytest -s`.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from ranks import ROOT, run_ranks

from runtime.ds_config.keys import BF16, KEYS, ZERO_3, ZERO_12

WORKER = ROOT / "tests" / "workers" / "engine_worker.py"
WIDTH = {"fp32": 4, "bf16": 2}
RANKS = 2
STAGE = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "pipeline": 1}
# Every engine looks at these, and only the readers in our list do something with them.
LOOKED_AT = {
    "zero_optimization.stage",
    "zero_optimization.overlap_comm",
    "zero_optimization.leaf_module.classes",
    "zero_optimization.zero_quantized_gradients",
}


@pytest.fixture(scope="module")
def cases(short_documents, tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("engine") / "out.json"
    found = run_ranks(WORKER, RANKS, 280, str(out), str(short_documents))
    for name, case in found.items():
        print(f"\n{name}: {case['class']}")
        for collective, calls in by_name(case).items():
            total = sum(size for size, _ in calls)
            early = sum(in_backward for _, in_backward in calls)
            print(f"  {len(calls):3d} {collective:24s} {total:8d} bytes, {early} in backward")
    return found


def by_name(case: dict) -> dict[str, list[tuple[int, bool]]]:
    """Collectives that carry weights or gradients; a few bytes are flags and norms."""
    calls = defaultdict(list)
    for name, size, in_backward in case["collectives"]:
        if size > 16 and name != "broadcast":
            calls[name].append((size, in_backward))
    return calls


def sent(case: dict, name: str) -> int:
    return sum(size for size, _ in by_name(case)[name])


def test_the_optimizer_class_is_the_one_foretold(cases):
    for name, case in cases.items():
        assert case["class"] == case["expected_class"], name
    for name in ("zero1", "pipeline"):
        assert cases[f"bf16 {name} acc2"]["class"] == BF16
        assert cases[f"bf16 {name} acc1"]["class"] == ZERO_12
    assert cases["bf16 zero3_offload acc2"]["class"] == ZERO_3


@pytest.mark.parametrize("optimizer", [ZERO_12, BF16, ZERO_3])
def test_every_key_is_read_where_our_list_says_so_and_nowhere_else(cases, optimizer):
    read = {key for case in cases.values() if case["class"] == optimizer for key in case["read"]}
    watched = {key for key in KEYS if key.startswith(("zero_optimization.", "bf16."))}
    listed = {key for key in watched if optimizer in KEYS[key].readers}
    assert listed <= read
    assert read & watched - listed <= LOOKED_AT


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", STAGE)
def test_gradients_are_sent_once_per_step_in_stage_1_and_per_micro_batch_above(
    cases, precision, accumulation, name
):
    case = cases[f"{precision} {name} acc{accumulation}"]
    # 16-bit gradients travel as they are; sums over micro-batches are kept and sent in fp32.
    width = 4 if precision == "fp32" or accumulation > 1 else 2
    times = 1 if STAGE[name] == 1 else accumulation
    collective = "reduce_scatter_tensor" if STAGE[name] == 3 else "all_reduce"
    assert sent(case, collective) == times * width * case["parameters"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STAGE)
def test_weights_are_gathered_once_per_step_where_they_are_small(cases, precision, name):
    """Stage 3 keeps parameters below stage3_param_persistence_threshold, here all, gathered."""
    for accumulation in (1, 2):
        case = cases[f"{precision} {name} acc{accumulation}"]
        collectives = {"all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"}
        assert by_name(case).keys() <= collectives
        gathered = sent(case, "all_gather_into_tensor")
        assert gathered == WIDTH[precision] * case["parameters"]


def test_what_starts_before_backward_ends(cases):
    """Whole buckets leave from hooks while autograd runs: in stages 2 and 3 always, in stage 1 with
    overlap_comm. BF16_Optimizer sends everything after the last backward."""
    for precision in ("fp32", "bf16"):
        for stage, settings in ((1, "overlap"), (2, "plain"), (2, "overlap"), (3, "plain")):
            case = cases[f"{precision} zero{stage} buckets {settings}"]
            name = "reduce_scatter_tensor" if stage == 3 else "all_reduce"
            assert sum(early for _, early in by_name(case)[name]) >= 2, (stage, settings)
    nothing = ["fp32 zero1 buckets plain", "bf16 zero1 buckets plain", "bf16 zero1 acc2"]
    # A bucket that holds the whole model, as in each JSON here, leaves when backward has ended.
    nothing += [f"{p} {name} acc2" for p in ("fp32", "bf16") for name in STAGE]
    for name in nothing:
        assert not any(early for _, _, early in cases[name]["collectives"]), name


def test_a_step_that_is_not_finite_is_skipped_alike_in_every_case(cases):
    for name, case in cases.items():
        assert case["poisoned"] == {"skipped": True, "finite_norm": False, "finite_loss": False}
        assert case["unchanged"], name
        assert case["healed"] == {"skipped": False, "finite_norm": True, "finite_loss": True}
        assert case["moved"], name


def test_a_refused_step_changes_no_bit_of_weights_and_moments_in_any_case(cases):
    for name, case in cases.items():
        for skipped, is_same, counted, asked in case["gate"]["refused"]:
            assert (skipped, is_same, counted) == (True, True, 0), name
            assert len(asked) == 1, name  # once, however many groups there are
        assert all(facts[:3] == [False, False, 1] for facts in case["gate"]["let"]), name


def test_a_step_that_is_sick_on_one_rank_is_judged_and_skipped_alike_on_all(cases):
    for name, case in cases.items():
        sick = case["gate"]["sick"]
        assert [facts[:3] for facts in sick] == [[True, True, 0]] * RANKS, name
        assert {tuple(facts[3]) for facts in sick} == {("(nan, inf)",)}, name
        for kind in ("refused", "let"):  # all ranks are asked the same
            assert len({tuple(facts[3]) for facts in case["gate"][kind]}) == 1, name
