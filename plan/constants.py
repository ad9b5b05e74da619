"""The constants of the planner's time model: value, unit, range, reason, rows that inform each.

Rule: at most 25 constants, none for a single source or a single row. Those marked as fitted are the
only ones that `plan.fit` moves, each within its range and drawn to the value that stands here; all
others come from data sheets, papers or counts. `make plan-check` prints this table.

Rates are shares of something that a cluster file or a data sheet names, so that a GPU without rows
of its own gets a prediction too (marked as not calibrated).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

MOST = 25


def constant(
    value: float,
    unit: str,
    low: float,
    high: float,
    reason: str,
    rows: str,
    is_fitted: bool = False,
) -> Any:
    """A field of `Constants` with what a reader must know of it."""
    notes = {"unit": unit, "low": low, "high": high, "reason": reason, "rows": rows}
    return dataclasses.field(default=value, metadata=notes | {"is_fitted": is_fitted})


@dataclass(frozen=True)
class Constants:
    """Every number of the time model that no data sheet gives."""

    matmul_a100: float = constant(
        254.0,
        "TFLOP/s",
        220,
        290,
        "what a step sustains of 312; a matmul alone reaches 271",
        "A100 rows",
        is_fitted=True,
    )
    matmul_h100: float = constant(
        666.0,
        "TFLOP/s",
        560,
        780,
        "what a step sustains of 989; a matmul alone reaches 795: 700 W limit the clock",
        "H100 SXM rows",
        is_fitted=True,
    )
    matmul_h100_500w: float = constant(
        532.0,
        "TFLOP/s",
        430,
        640,
        "the same with a limit of 500 W and slower memory",
        "torchtitan rows",
        is_fitted=True,
    )
    contraction: float = constant(
        119.0,
        "elements",
        40,
        250,
        "start and end of a tile's sum: a product over K elements takes 1 + this / K of its time",
        "rows with narrow shards",
        is_fitted=True,
    )
    attention_old: float = constant(
        0.47,
        "share of the rate of Ampere's instructions",
        0.3,
        0.6,
        "FlashAttention-1 (Dao 2022) and Triton kernels, forward, causal half",
        "A100 rows of 2022 and 2023",
        is_fitted=True,
    )
    attention_two: float = constant(
        0.78,
        "share of the rate of Ampere's instructions",
        0.5,
        0.9,
        "FlashAttention-2 (Dao 2023): 190 TFLOP/s forward on A100, 335 on H100",
        "rows of 2023 and 2024",
    )
    attention_new: float = constant(
        0.85,
        "share of the sustained matmul rate",
        0.6,
        1.0,
        "cuDNN and FlashAttention-3: about 600 TFLOP/s forward on H100",
        "NVIDIA recipes from 2024",
    )
    ampere: float = constant(
        0.665,
        "share of the sustained matmul rate",
        0.55,
        0.75,
        "kernels written for Ampere do not use the wider matrix instructions of later GPUs: both"
        " FlashAttention-1 and -2 are 1.8 times as fast on H100 as on A100, products 2.6 times",
        "H100 rows",
    )
    bytes_eager: float = constant(
        2.7,
        "multiple of the least bytes",
        1.5,
        3.5,
        "each elementwise operation is a kernel of its own that reads and writes memory",
        "Composer, torchtitan without compile",
        is_fitted=True,
    )
    bytes_compiled: float = constant(
        1.5,
        "multiple of the least bytes",
        1.0,
        2.0,
        "torch.compile and XLA fuse most elementwise operations",
        "torchtitan, MaxText",
    )
    bytes_fused: float = constant(
        1.2,
        "multiple of the least bytes",
        1.0,
        1.6,
        "hand-written fused kernels",
        "Megatron, NeMo",
        is_fitted=True,
    )
    hbm_share: float = constant(
        0.79,
        "share of the data sheet",
        0.7,
        0.92,
        "what copies and norms reach",
        "hardware benchmarks",
    )
    link_share: float = constant(
        0.72,
        "share of the data sheet",
        0.5,
        0.85,
        "nccl-tests reach 0.78 inside a scale-up domain, a real step 0.92 of that",
        "collectives.csv; tensor-parallel rows",
    )
    nic_share: float = constant(
        0.65,
        "share of the data sheet",
        0.4,
        0.85,
        "network goodput is 0.80; in a step, with many groups at once, it is less",
        "rows across hosts",
        is_fitted=True,
    )
    rank_latency_s: float = constant(
        3.4e-6,
        "seconds per rank of a ring",
        1e-6,
        1e-5,
        "small messages of collectives.csv",
        "collectives.csv",
    )
    message_s: float = constant(
        45e-6,
        "seconds per point-to-point message",
        1e-5,
        1e-4,
        "send and receive between pipeline stages",
        "bubble.csv, interleaved",
    )
    drag_per_doubling: float = constant(
        0.0035,
        "share of a step per doubling of hosts",
        0.0,
        0.01,
        "the slowest of many hosts sets the pace",
        "NVIDIA recipes, weak scaling",
    )
    tensor_exposed: float = constant(
        0.43,
        "share of the communication",
        0.2,
        0.8,
        "split collectives run beside matrix products (userbuffers, async tensor parallelism)",
        "NVIDIA recipes; torchtitan, async",
        is_fitted=True,
    )
    data_exposed: float = constant(
        0.10,
        "share of the communication",
        0.0,
        0.3,
        "gradient buckets are reduced while the backward runs",
        "Megatron rows",
    )
    shard_exposed: float = constant(
        0.40,
        "share of the communication",
        0.2,
        0.6,
        "FSDP gathers ahead, but copies and contention stay",
        "FSDP rows",
        is_fitted=True,
    )
    zero3_exposed: float = constant(
        0.76,
        "share of the communication",
        0.4,
        1.0,
        "DeepSpeed ZeRO-3 gathers module by module, at about half of the network's rate",
        "DeepSpeed on Azure; not calibrated",
    )
    shard_copies: float = constant(
        13.0,
        "bytes per parameter and micro-batch",
        8,
        20,
        "FSDP copies in and out of gathered buffers besides summing gradients",
        "FSDP rows",
    )
    sum_bytes: float = constant(
        6.0,
        "bytes per parameter and micro-batch",
        4,
        8,
        "reads and writes of the gradient sum, fused or not",
        "rows with accumulation",
    )
    layer_launch_s: float = constant(
        700e-6,
        "seconds per block, forward and backward, eager",
        3e-4,
        2e-3,
        "the host issues about 150 kernels per block",
        "small models",
    )
    misaligned: float = constant(
        1.4,
        "multiple of the time",
        1.3,
        1.5,
        "head widths and shards that are no multiples of 8 miss the tensor cores",
        "data sheets; two rows of Megatron",
    )


FITTED = tuple(field.name for field in dataclasses.fields(Constants) if field.metadata["is_fitted"])
assert len(dataclasses.fields(Constants)) <= MOST


def value(constants: Constants, name: str) -> float:
    """A constant by name; "all" is the whole of something, which needs no constant."""
    return 1.0 if name == "all" else getattr(constants, name)


def bounds(name: str) -> tuple[float, float]:
    """Lowest and highest value that a constant may have."""
    notes = {field.name: field.metadata for field in dataclasses.fields(Constants)}[name]
    return notes["low"], notes["high"]
