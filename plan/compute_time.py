"""Seconds of arithmetic in one block: matrix products, attention, memory-bound work.

Rule: a product takes its FLOPs over the sustained rate of the GPU, times what short sums and partly
filled waves of tiles cost; attention has rates of its own, by kernel; everything else is bytes over
the memory bandwidth. Formulas: Narayanan et al. 2021 (FLOPs), Korthikanti et al. 2022 (what
sequence parallelism divides), Dao 2022 and 2023 (attention). Units: seconds, FLOPs, bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache

from model.cost import blocks_recomputed
from plan.communication_time import context_s, hidden_bytes, tensor_s
from plan.constants import Constants, value
from plan.machine import Machine
from plan.workload import WIDTH, Job

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
H100_MATMUL = 794.5  # TFLOP/s of a large matmul alone (published/gpus.csv)
# Five products instead of two, at 0.83 of the forward's rate (Dao 2023, Shah et al. 2024).
ATTENTION_BACKWARD = 3.0
# What "selective" runs again, by engine: Megatron the core of attention, FSDP (torchtitan) every
# second matrix product, ours everything but products and attention.
SELECTIVE = {
    "megatron": {"matmul": 0, "attention": 1, "memory_bound": 0, "tensor": 0, "context": 0},
    "nanotron": {"matmul": 0, "attention": 1, "memory_bound": 0, "tensor": 0, "context": 0},
    "xla": {"matmul": 0.6, "attention": 0, "memory_bound": 1, "tensor": 1, "context": 0},
    "fsdp": {"matmul": 0.5, "attention": 0, "memory_bound": 1, "tensor": 0.5, "context": 0},
    "ours": {"matmul": 0, "attention": 0, "memory_bound": 1, "tensor": 0, "context": 0},
    "deepspeed": {"matmul": 0, "attention": 0, "memory_bound": 1, "tensor": 0, "context": 0},
}


def repeated(job: Job, blocks: int) -> dict[str, float]:
    """How many blocks run each kind of forward work again in backward."""
    if job.recompute == "none":
        return dict.fromkeys(("matmul", "attention", "memory_bound", "tensor", "context"), 0.0)
    if job.recompute == "selective":
        share = SELECTIVE[job.engine.name.split("-")[0]]
        return {name: blocks * part for name, part in share.items()}
    again = float(blocks_recomputed(job.recompute, blocks))
    found = dict.fromkeys(("matmul", "attention", "memory_bound", "tensor", "context"), again)
    if job.engine.name.split("-")[0] in ("ours", "fsdp", "xla"):
        # torch stops a recomputed forward where nothing later is needed: before the last product.
        down = job.shape.hidden_size * job.shape.intermediate_size
        found["matmul"] *= 1 - down / job.shape.block_matrices
        found["tensor"] *= 0.75  # nor the collective that ends it
    return found


def block_s(job: Job, machine: Machine, constants: Constants) -> dict[str, tuple[float, float]]:
    """(forward, backward) seconds of one block, by kind."""
    shape, t, n = job.shape, job.tensor, job.local_tokens
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    # Key and value heads fewer than tensor ranks are held several times.
    key = max(shape.key / t, shape.width)
    products = (
        (hidden, shape.query / t + 2 * key),
        (shape.query / t, hidden),
        (hidden, (2 if shape.is_gated else 1) * ffn / t),
        (ffn / t, hidden),
    )
    forward = backward = 0.0
    for k, width in products:
        one, two = products_s(n, k, width, machine, constants)
        forward, backward = forward + one, backward + two

    attention = attention_s(job, machine, constants)
    spread = t if job.sequence else 1
    bytes_ = WIDTH[job.precision] * n * bytes_multiple(job, constants)
    per_s = machine.memory_gb_s * 1e9 * constants.hbm_share
    rotary = (shape.query / t + key) if not shape.positions else 0
    forward_elements = 10 * hidden / spread + (3 if shape.is_gated else 2) * ffn / t + 2 * rotary
    backward_elements = 8 * hidden / spread + (5 if shape.is_gated else 3) * ffn / t + 2 * rotary

    # Two halves of a block, each with one collective of the hidden states and one in backward;
    # sequence parallelism gathers once more in backward instead of keeping what it gathered.
    tensor = 2 * tensor_s(job, machine, constants, hidden_bytes(job))
    more = (
        1.5
        if job.sequence and job.engine.name.startswith("ours")
        else 1.25
        if job.sequence
        else 1.0
    )
    ring = context_s(job, machine, constants, attention)
    return {
        "matmul": (forward, backward),
        "attention": attention,
        "memory_bound": (bytes_ * forward_elements / per_s, bytes_ * backward_elements / per_s),
        "tensor": (tensor, more * tensor),
        "context": ring,
    }


def sustained_tflops(machine: Machine, constants: Constants) -> float:
    """What matrix products of a step reach on this GPU when they are large."""
    if machine.calibrated:
        return getattr(constants, f"matmul_{machine.calibrated}")
    # As on H100, what a step sustains of a matmul alone.
    return constants.matmul_h100 / H100_MATMUL * machine.matmul_tflops


def products_s(
    tokens: float, k: float, width: float, machine: Machine, constants: Constants
) -> tuple[float, float]:
    """(forward, backward) seconds of `tokens` x k times k x width; backward has two products."""
    rate = sustained_tflops(machine, constants) * 1e12
    sizes = round(tokens), round(k), round(width)
    args = (machine.multiprocessors, constants.contraction)
    one, two, three = (
        _slowdown(sizes[a], sizes[b], sizes[c], *args)
        for a, b, c in ((0, 2, 1), (0, 1, 2), (1, 2, 0))
    )
    ideal = 2.0 * tokens * k * width / rate
    if sizes[1] % 8 or sizes[2] % 8:
        ideal *= constants.misaligned
    return ideal * one, ideal * (two + three)


@lru_cache(maxsize=65536)
def _slowdown(rows: int, columns: int, k: int, multiprocessors: int, contraction: float) -> float:
    """Time of a product over its time at the sustained rate: short sums, partly filled waves."""
    slow = 1 + contraction / max(k, 1)
    if multiprocessors < 2:
        return slow
    best = 0.0
    for tall, wide in TILES:
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        waves = math.ceil(tiles / multiprocessors)
        best = max(best, rows * columns / (waves * multiprocessors * tall * wide))
    # Between the waves of the best tile size and none at all: libraries split and overlap tiles.
    return slow * (1 + 1 / best) / 2


def attention_s(job: Job, machine: Machine, constants: Constants) -> tuple[float, float]:
    """(forward, backward) seconds of the core of attention in one block, causal half counted."""
    shape, n = job.shape, job.local_tokens
    forward = 2.0 * n * job.seq_len * shape.query / job.tensor  # FLOPs: two products, half a square
    rate = sustained_tflops(machine, constants) * 1e12
    if job.engine.attention:
        kernel = rate * value(constants, job.engine.attention)
        if job.engine.attention != "attention_new" and machine.is_newer_than_ampere:
            kernel *= constants.ampere
        seconds = forward / kernel
        if shape.width < 128:  # fewer products per exponential: Dao 2023, figures 4 to 6
            seconds *= 1 + 0.15 * (128 - shape.width) / 64
        if shape.width % 8:
            seconds *= constants.misaligned
        return seconds, ATTENTION_BACKWARD * seconds
    # Unfused: full squares, and every score goes through memory several times.
    scores = n * job.seq_len * shape.num_attention_heads / job.tensor
    per_s = machine.memory_gb_s * 1e9 * constants.hbm_share
    one, two = (
        products_s(job.seq_len, shape.width, job.seq_len, machine, constants)
        if machine.multiprocessors > 1
        else (2.0 * job.seq_len**2 * shape.width / rate, 4.0 * job.seq_len**2 * shape.width / rate)
    )
    heads = n / job.seq_len * shape.num_attention_heads / job.tensor
    return 2 * heads * one + 13 * scores / per_s, 2 * heads * two + 19 * scores / per_s


def launch_s(job: Job, machine: Machine, constants: Constants) -> float:
    """Seconds the host takes to start the kernels of one block, forward and backward."""
    # The share of separate kernels follows how much is fused.
    eager = constants.layer_launch_s
    return eager * bytes_multiple(job, constants) / constants.bytes_eager


def bytes_multiple(job: Job, constants: Constants) -> float:
    return value(constants, job.engine.bytes_multiple)
