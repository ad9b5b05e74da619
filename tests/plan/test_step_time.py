"""plan/step_time.py: the same FLOPs and bytes as the formulas that a run is counted by."""

from __future__ import annotations

import dataclasses

import pytest

from model.cost import flops_per_token
from parallel.communication_volume import context_bytes, tensor_bytes
from plan.communication_time import group_rate
from plan.compute_time import products_s
from plan.constants import Constants
from plan.machine import machine_of
from plan.recipe_jobs import shape_of
from plan.search import option_of
from plan.step_time import bubble_time, step_time
from plan.workload import Job, Shape
from recipes.compose import compose

# Rates at which a second is a byte or a FLOP, and nothing else costs time.
PLAIN = dataclasses.replace(
    Constants(), contraction=0.0, rank_latency_s=0.0, link_share=1.0, nic_share=1.0
)


def test_flops_are_those_of_model_cost():
    for name in ("tiny", "125m", "1b", "7b", "70b"):
        model = compose(name, []).recipe.model
        assert shape_of(model).flops_per_token(2048) == flops_per_token(model, 2048)


def test_matrix_products_of_a_step_add_up_to_the_flops_at_the_sustained_rate():
    model = compose("7b", []).recipe.model
    job = Job(shape_of(model), 4096, 1, 1, recompute="none")
    machine = dataclasses.replace(machine_of("H100-SXM"), multiprocessors=1)
    seconds = step_time(job, machine, PLAIN).matmul
    square = 12 * model.num_hidden_layers * model.hidden_size * 4096
    flops = (flops_per_token(model, 4096) - square) * 4096
    assert seconds == pytest.approx(flops / (PLAIN.matmul_h100 * 1e12), rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_communication_is_the_volume_that_is_counted_in_runs(tensor, recompute):
    words = [f"parallel.tensor={tensor}", f"recompute={recompute}", "cluster=h100"]
    recipe = compose("7b", words).recipe
    option = option_of(recipe, 8, 3, machine_of("H100-SXM"))
    counted = tensor_bytes(recipe, option.layout, option.job.micro_batches)
    moved = (counted["gather"] + counted["scatter"]) * (tensor - 1) / tensor
    seconds = step_time(option.job, option.machine, PLAIN).tensor
    assert seconds == pytest.approx(moved / 450e9, rel=1e-9)


def test_context_communication_is_the_volume_that_is_counted_in_runs():
    recipe = compose("7b", ["parallel.context=4", "cluster=h100", "recompute=none"]).recipe
    option = option_of(recipe, 8, 3, machine_of("H100-SXM"))
    counted = context_bytes(recipe, option.layout, option.job.micro_batches)["exchange"]
    seconds = step_time(option.job, option.machine, PLAIN).context
    assert seconds == pytest.approx(counted * 3 / 4 / 450e9, rel=1e-9)


def test_the_bubble_is_that_of_narayanan_et_al():
    shape = Shape(32000, 1024, 4096, 32, 16, 16)
    job = Job(shape, 2048, 1, 16, pipeline=8)
    assert bubble_time(job, 1.0, 0.0) / 16 == pytest.approx(7 / 16)
    interleaved = dataclasses.replace(job, virtual=4)
    assert bubble_time(interleaved, 1.0, 0.0) / 16 == pytest.approx(7 / 4 / 16)


def test_groups_inside_the_domain_use_its_links_and_others_the_networks_of_their_ranks():
    h100, gb200 = machine_of("H100-SXM"), machine_of("GB200")
    assert group_rate(8, 1, h100, PLAIN) == 450e9
    assert group_rate(16, 1, h100, PLAIN) == 400e9  # eight NICs of a host
    assert group_rate(16, 8, h100, PLAIN) == 50e9
    assert group_rate(16, 1, gb200, PLAIN) == 900e9  # four hosts, one domain


def test_more_recomputation_never_makes_a_step_faster_and_a_slower_network_never_helps():
    recipe = compose("7b", ["cluster=h100", "zero=3"]).recipe
    machine = machine_of("H100-SXM")
    seconds = [
        option_of(dataclasses.replace(recipe, recompute=how), 32, 3, machine).time.total
        for how in ("none", "selective", "full")
    ]
    assert seconds == sorted(seconds)
    option = option_of(recipe, 32, 3, machine)
    slow = dataclasses.replace(machine, nic_gb_s=machine.nic_gb_s / 4)
    assert step_time(option.job, slow).total > option.time.total


def test_products_with_shards_that_fill_no_tile_are_slower_per_flop():
    whole = products_s(8192, 4096, 4096, machine_of("H100-SXM"), Constants())
    narrow = products_s(8192, 4096, 100, machine_of("H100-SXM"), Constants())
    assert sum(narrow) * 4096 / 100 > 1.2 * sum(whole)
