"""plan/published_rows.py: a row of somebody's table becomes a job, or a reason."""

from __future__ import annotations

import pytest

from plan.machine import PUBLISHED
from plan.published_rows import flops_of_convention, nic_gb_s, published_run, read, usable

ROWS = read(PUBLISHED / "throughput.csv")


def row_of(source: str, **fields: str) -> dict[str, str]:
    found = next(
        row
        for row in ROWS
        if source in row["source"] and all(row[name] == value for name, value in fields.items())
    )
    return dict(found)


@pytest.mark.parametrize(
    ("text", "per_node", "rate"),
    [
        ("1600 Gb/s RoCE per node", 8, 25.0),
        ("200 Gb/s HDR InfiniBand per GPU", 8, 25.0),
        ("NVLink in node; 400 Gb/s RDMA per GPU", 8, 50.0),
        ("4x Omni-Path 100 Gb/s per node", 8, 6.25),
        ("2 Tb/s RoCE per node", 8, 31.25),
        ("DGX A100: NVLink3/NVSwitch, 8x HDR InfiniBand 200 Gb/s", 8, 25.0),
        ("400 Gb/s cross-node per node", 16, 3.125),
        ("DGX-H100 system", 8, None),
        ("", 8, None),
    ],
)
def test_network_rates_are_read_from_words(text, per_node, rate):
    assert nic_gb_s(text, per_node) == rate


def test_gate_ties_and_positions_follow_from_the_printed_parameters():
    mpt = published_run(row_of("llm-foundry", model="MPT-7b", complete="1")).job.shape
    assert (mpt.is_gated, mpt.tie_word_embeddings, mpt.positions > 0) == (False, True, True)
    llama = published_run(row_of("v25.02", model="Llama-3.1-8B", precision="bf16")).job.shape
    assert (llama.is_gated, llama.tie_word_embeddings, llama.positions) == (True, False, 0)
    small = published_run(row_of("nanotron bench", model="nanotron-1.34B")).job.shape
    assert (small.is_gated, small.tie_word_embeddings) == (True, True)


def test_speed_is_converted_by_the_sources_own_formula():
    row = row_of("nanotron bench", model="nanotron-8.86B", n_gpus="8")
    run = published_run(row)
    flops = flops_of_convention(row["flop_convention"], run.job)
    assert run.tokens_per_s == pytest.approx(float(row["mfu"]) * 989e12 / flops)
    megatron = row_of("Azure", complete="1")
    run = published_run(megatron)
    layers, hidden, length = (int(megatron[name]) for name in ("layers", "hidden", "seq"))
    flops = 96 * layers * hidden**2 * (1 + length / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert run.tokens_per_s == pytest.approx(float(megatron["tflops_per_gpu"]) * 1e12 / flops)


def test_every_row_is_a_job_or_a_reason_and_the_data_names_its_sources():
    runs, refused = usable(ROWS)
    assert len(runs) + sum(refused.values()) == len(ROWS) == 945
    sources = (PUBLISHED / "SOURCES.md").read_text()
    assert not [row["source"] for row in ROWS if row["source"] not in sources]
    assert {run.family for run in runs} >= {"NVIDIA recipes", "llm-foundry", "Zero Bubble"}


def test_where_the_chunks_of_a_pipeline_are_unknown_a_large_bubble_is_interleaved_away():
    row = next(row for row in read(PUBLISHED / "throughput.csv") if row["pp"] == "8")
    row |= {"source": "x", "framework": "Megatron-Core", "year": "2024", "layers": "96", "vpp": "",
            "n_gpus": "64", "tp": "8", "cp": "1", "dp": "1", "micro_batch": "1", "notes": "",
            "complete": "1", "kind": "benchmark", "precision": "bf16", "ep": "",
            "step_time_s": "10"}  # fmt: skip
    chunks = [
        published_run(row | {"global_batch": str(size)}).job.virtual for size in (8, 16, 35, 512)
    ]
    assert chunks == [9, 5, 2, 2]


def test_what_is_not_published_is_listed():
    run = published_run(row_of("v25.02", model="Llama-3.1-8B", precision="bf16"))
    assert run.unknown == ("recompute",)
    assert published_run(row_of("llm-foundry", model="MPT-7b", complete="1")).unknown == ()
