"""plan/machine.py and recipe_jobs.py: what a cluster file says, and what stands for the rest."""

from __future__ import annotations

import pytest

from base.errors import UserError
from plan.constants import FITTED, MOST, Constants, bounds
from plan.machine import known_gpus, machine_of
from plan.recipe_jobs import machine_for
from recipes.compose import compose


def test_an_unknown_gpu_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"gpu=H100-SMX is not in .*H100-SXM"):
        machine_of("H100-SMX")
    with pytest.raises(UserError, match=r"cluster.gpu is not set"):
        machine_for(compose("tiny", []).recipe)


@pytest.mark.parametrize(
    "word",
    ["cluster.nic_gb_s=-1", "cluster.memory_gib=x", "cluster.domain=0", "cluster.link_gbs=3",
     "cluster.price_per_hour=-2", "cluster.memory_gb_s=nan"],
)  # fmt: skip
def test_a_wrong_field_of_a_cluster_is_refused_with_the_field(word):
    with pytest.raises(UserError, match=word.partition("=")[0]):
        compose("7b", [word])


def test_fields_of_a_cluster_replace_the_data_sheet_and_the_rest_is_listed():
    words = ["cluster.nic_gb_s=12.5", "cluster.gpus_per_node=4", "cluster.price_per_hour=2"]
    machine, assumed = machine_for(compose("7b", words).recipe)
    assert (machine.nic_gb_s, machine.domain, machine.price_per_hour) == (12.5, 4, 2)
    text = "\n".join(assumed)
    assert "link_gb_s = 450" in text
    assert "nic_gb_s" not in text


def test_every_cluster_of_gpus_names_one_of_the_list():
    for name in ("a100", "h100", "h200", "b200"):
        machine, _ = machine_for(compose("7b", [f"cluster={name}"]).recipe)
        assert machine == machine_of(machine.gpu)


def test_there_are_at_most_25_constants_each_with_unit_range_reason_and_rows():
    fields = Constants.__dataclass_fields__
    assert len(fields) <= MOST == 25
    for name, field in fields.items():
        low, high = bounds(name)
        assert low <= field.default <= high
        assert all(len(field.metadata[note]) > 2 for note in ("unit", "reason", "rows"))
    assert set(FITTED) <= set(fields)
    assert len(FITTED) <= 10


def test_data_sheets_are_complete_and_gb_are_not_gib():
    for machine in known_gpus().values():
        assert machine.matmul_tflops < machine.peak_tflops
        assert machine.domain >= 1
    assert machine_of("A100").usable_bytes == pytest.approx(79.2 * 2**30)
