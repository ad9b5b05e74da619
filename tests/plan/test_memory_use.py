"""plan/memory_use.py: parameters, states and activations equal what is built and allocated."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from ranks import ROOT, run_ranks

from base.units import GIB
from model.cost import num_parameters
from parallel.layout import parameters_per_stage
from plan.machine import machine_of
from plan.memory_use import (
    AT_EDGE,
    FITS,
    RESERVE,
    TOO_LARGE,
    host_parts,
    in_flight,
    memory_of_stages,
    stage_parameters,
    step_bytes,
    verdict,
    worst,
)
from plan.recipe_jobs import machine_for
from plan.search import option_of, search, why_slower
from plan.workload import Job, Shape
from recipes.compose import compose
from recipes.schema import Model
from runtime.ds_config.state_bytes import state_bytes

WORKER = ROOT / "tests" / "workers" / "step_state_worker.py"
CASES = [
    (stage, precision, accumulation, [])
    for stage in (1, 2, 3)
    for precision, accumulation in (("fp32", 2), ("bf16", 1), ("bf16", 2))
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("step") / "out.json"
    return run_ranks(WORKER, 2, 150, str(out), json.dumps(CASES))


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n][:3]))
)
def test_bytes_in_the_optimizers_step_are_those_that_deepspeed_holds(number, measured):
    """Counted inside the step, where stages 1 and 2 have freed what they reduced."""
    result = measured[number]
    stage, precision, accumulation = result["case"]
    kinds = state_bytes(stage, precision, result["grad_dtype"], accumulation > 1,
                        result["is_immediate"], 2, False)  # fmt: skip
    base = kinds["weights"] + kinds["master"] + kinds["moments"]
    gradients = step_bytes(stage, precision, result["grad_dtype"], kinds["gradients"], 2)
    width = {"fp32": 4, "bf16": 2}[result["grad_dtype"]]
    freed = width / 2 if stage < 3 and result["class"] != "BF16_Optimizer" else 0
    # One layer of eight may still be in a bucket of stage 2 or in stage 3's gathers.
    assert base + gradients - freed - 1e-9 <= result["measured"] <= base + gradients + 0.63


def test_parameters_of_odd_shapes_are_those_of_the_layout_for_every_stage():
    draw = random.Random(1)
    for _ in range(40):
        heads = draw.choice([4, 6, 12])
        model = Model(
            vocab_size=draw.choice([101, 32000, 50257]),
            hidden_size=heads * 16,
            intermediate_size=48 * draw.randint(1, 9),
            num_hidden_layers=draw.randint(4, 13),
            num_attention_heads=heads,
            num_key_value_heads=draw.choice([2, heads]),
            tie_word_embeddings=draw.random() < 0.5,
            qkv_bias=draw.random() < 0.5,
            qk_norm=draw.random() < 0.5,
        )
        recipe = compose("tiny", ["zero=1", "batch_tokens=4096"]).recipe
        axes = dataclasses.replace(
            recipe.parallel, tensor=draw.choice([1, 2]), pipeline=draw.choice([1, 2, 4])
        )
        recipe = dataclasses.replace(recipe, model=model, parallel=axes)
        option = option_of(recipe, 8, 1, machine_of("A100"))
        built = parameters_per_stage(model, option.layout)
        assert [stage_parameters(option.job, i) for i in range(axes.pipeline)] == built


def test_a_large_vocabulary_on_four_stages_is_reported_for_each_and_the_worst_is_named():
    shape = Shape(256_000, 1024, 4096, 4, 16, 16)
    job = Job(shape, 2048, 1, 8, pipeline=4, data=1)
    stages = memory_of_stages(job)
    assert len(stages) == 4
    assert stages[0].weights > 3 * stages[1].weights < stages[3].weights
    assert worst(job) == max(stages, key=lambda stage: stage.peak)


def test_states_of_a_billion_parameters_are_the_sums_by_hand():
    """bf16 with fp32 sums, 8 data ranks: 2 + 4 + 12/8, 2 + 4/8 + 12/8, (2 + 4 + 12) / 8."""
    shape = Shape(32000, 2048, 8192, 16, 16, 16)
    for stage, per_parameter in ((1, 7.5), (2, 4.0), (3, 2.25)):
        job = Job(shape, 128, 1, 2, data=8, stage=stage)
        own = stage_parameters(job, 0)
        assert memory_of_stages(job)[0].states == pytest.approx(per_parameter * own, rel=1e-12)


def test_activations_are_linear_in_the_micro_batch_and_recomputation_keeps_less():
    shape = Shape(32000, 1024, 4096, 8, 16, 16)
    job = Job(shape, 1024, 1, 4)
    one, two, three = (
        memory_of_stages(dataclasses.replace(job, micro_batch=size))[0].activations
        for size in (1, 2, 3)
    )
    assert two - one == three - two == one
    kept = [
        memory_of_stages(dataclasses.replace(job, recompute=how))[0].activations
        for how in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


def test_early_stages_hold_more_micro_batches():
    job = Job(Shape(32000, 1024, 4096, 8, 16, 16), 1024, 1, 16, pipeline=4)
    assert [in_flight(job, index) for index in range(4)] == [4, 3, 2, 1]
    few = dataclasses.replace(job, micro_batches=2)
    assert [in_flight(few, index) for index in range(4)] == [2, 2, 2, 1]


def test_offloaded_states_are_counted_in_host_memory():
    words = ["cluster=a100", "zero=zero3_offload"]
    recipe = compose("7b", words).recipe
    found = search(recipe, 8, machine_of("A100-80GB"), ["micro_batch", "recompute"])
    memory = found.best[0].memory
    own = stage_parameters(found.best[0].job, 0)
    assert memory.optimizer == 0
    assert memory.gradients == 0
    assert memory.host == pytest.approx(own * (4 + 4 + 12) / 8)


def test_a_layout_whose_hosts_run_out_of_memory_is_not_proposed():
    """PLN-11: eight ranks of a host with 64 GiB, states offloaded."""
    recipe = compose(
        "7b", ["cluster=a100", "zero=zero3_offload", "cluster.host_memory_gib=64"]
    ).recipe
    machine, assumed = machine_for(recipe)
    assert not [line for line in assumed if "host_memory" in line]
    free = ["micro_batch", "recompute"]
    found = search(recipe, 8, machine, free)
    assert found.winner is None
    least = found.large[0]
    parts = host_parts(least.job)
    assert least.host_bytes == pytest.approx(8 * sum(parts.values()))
    assert parts["offloaded states"] == pytest.approx(
        20 * num_parameters(recipe.model) / 8, rel=1e-3
    )
    assert "GiB of host memory" in why_slower(least, least)
    large = dataclasses.replace(machine, host_memory_gib=1024.0)
    winner = search(recipe, 8, large, free).winner
    assert winner is not None
    assert winner.host_bytes <= large.usable_host_bytes
    # A save in the background copies fp32 weights and both moments; a save in the step does not.
    is_sync = dataclasses.replace(winner.job, saves_in_background=False)
    copied = host_parts(winner.job)["snapshot of a save"]
    assert copied == pytest.approx(12 * num_parameters(recipe.model) / 8, rel=1e-3)
    assert host_parts(is_sync)["snapshot of a save"] == 0


def test_the_verdict_compares_bytes_and_gb_are_not_gib():
    card = machine_of("A100-80GB")
    assert verdict(card.usable_bytes - RESERVE + 1, card) == TOO_LARGE
    assert verdict(0.95 * card.usable_bytes - RESERVE, card) == AT_EDGE
    assert verdict(70 * 10**9, card) == FITS
    # 80 GB, powers of ten, are 74.5 GiB.
    smaller = dataclasses.replace(card, memory_gib=80e9 / GIB)
    assert verdict(74 * GIB, smaller) == TOO_LARGE != verdict(74 * GIB, card)


def test_a_trillion_parameters_are_exact():
    shape = Shape(51200, 25600, 102400, 128, 160, 160, is_gated=False)
    assert shape.parameters == 128 * 12 * 25600**2 + 2 * 51200 * 25600
    assert shape.flops_per_token(2048) % 6 == 0
    job = Job(shape, 2048, 1, 512, tensor=8, pipeline=64, data=6)
    assert stage_parameters(job, 1) == 2 * (12 * 25600**2 // 8 + 4 * 25600)
