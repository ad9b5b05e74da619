"""Seconds of one step, term by term: matrix products, attention, memory-bound work, communication,
pipeline bubble, optimizer.

    one micro-batch on each pipeline stage  ->  the slowest stage  ->  a step of m micro-batches

Rule: every term is a closed formula of the job, the machine and `constants.Constants`; a published
run and a recipe of ours go through the same lines. Formulas: Narayanan et al. 2021 (pipeline,
FLOPs), Korthikanti et al. 2022 (sequence parallelism), Rajbhandari et al. 2020 (ZeRO), Qi et al.
2023 (zero bubble). Units: seconds, bytes, FLOPs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

from model.cost import blocks_recomputed
from plan.constants import Constants, value
from plan.machine import Machine
from plan.workload import WIDTH, Job, Shape

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
DEFAULT = Constants()
LIVE = 1e9  # parameters that DeepSpeed keeps gathered: stage3_max_live_parameters of ds_configs/
H100_MATMUL = 794.5  # TFLOP/s of a large matmul alone (published/gpus.csv)
# Five products instead of two, at 0.83 of the forward's rate (Dao 2023, Shah et al. 2024: 0.80-0.9).
ATTENTION_BACKWARD = 3.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the critical path, by kind."""

    matmul: float
    attention: float
    memory_bound: float
    launch: float  # the device waits for the host
    tensor: float
    context: float
    data: float
    pipeline: float  # messages between stages
    bubble: float
    optimizer: float
    drag: float  # the slowest of many hosts

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(dataclasses.astuple(self))


def step_time(job: Job, machine: Machine, constants: Constants = DEFAULT) -> StepTime:
    """Seconds of one step of `job` on `machine`, by kind."""
    stages = job.stage_blocks()
    ends = {0: (True, job.pipeline == 1)} | {job.pipeline - 1: (job.pipeline == 1, True)}
    kinds = {(blocks, *ends.get(index, (False, False))) for index, blocks in enumerate(stages)}
    passes = [_micro_batch(job, machine, constants, *kind) for kind in kinds]
    slowest = max(passes, key=lambda terms: sum(terms.values()))
    total = {name: seconds * job.micro_batches for name, seconds in slowest.items()}
    once = sum(slowest.values())

    message_s = _message_s(job, machine, constants)
    bubble = bubble_time(job, once, message_s)
    steady = 0.0
    if job.pipeline > 1:
        # A send and a receive each way; the interleaved schedule hides half of them. Megatron
        # hides the bytes behind the next pass, DeepSpeed's engine waits for them.
        messages = 4 if job.virtual == 1 else 2 * job.virtual
        each = message_s if job.engine.is_blocking else constants.message_s
        steady = messages * job.micro_batches * each
    data_s, optimizer_s = _end_of_step(job, machine, constants, once + bubble)
    seconds = sum(total.values()) + bubble + steady + data_s + optimizer_s
    hosts = max(1.0, job.world / machine.gpus_per_node)
    return StepTime(
        matmul=total["matmul"],
        attention=total["attention"],
        memory_bound=total["memory_bound"],
        launch=total["launch"],
        tensor=total["tensor"],
        context=total["context"],
        data=total["data"] + data_s,
        pipeline=steady,
        bubble=bubble,
        optimizer=optimizer_s,
        drag=seconds * constants.drag_per_doubling * math.log2(hosts),
    )


def bubble_time(job: Job, once: float, message_s: float) -> float:
    """Idle seconds of a pipeline rank: (p - 1) / v passes of `once` seconds, and their messages.

    Zero-bubble schedules split the backward into the part for inputs and the part for weights; the
    latter fills half of the gap (ZB-1p), or the schedule keeps enough micro-batches that no gap is
    left but messages (ZB-2p).
    """
    if job.pipeline == 1:
        return 0.0
    share = {"zb-1p": 1 / 2, "zb-2p": 0.02}.get(job.schedule, 1 / job.virtual)
    return (job.pipeline - 1) * (once * share + 2 * message_s)


def bubble_rate(job: Job, terms: StepTime) -> float:
    """Idle share of a step, without what data parallelism and the optimizer take at its end."""
    busy = terms.total - terms.data - terms.optimizer - terms.drag
    return (terms.bubble + terms.pipeline) / busy


# ---- one micro-batch ----------------------------------------------------------------------------


def _micro_batch(
    job: Job, machine: Machine, constants: Constants, blocks: int, has_table: bool, has_head: bool
) -> dict[str, float]:
    """Seconds of one forward and backward on a stage of `blocks` blocks."""
    shape = job.shape
    block = _block(job, machine, constants)
    again = repeated(job, blocks)
    parts = ("matmul", "attention", "memory_bound", "tensor", "context")
    terms = {
        name: blocks * block[name][1] + (blocks + again[name]) * block[name][0] for name in parts
    }
    if has_head:
        n, width = job.local_tokens, -(-shape.vocab_size // job.tensor)
        head = _products_s(n, shape.hidden_size, width, machine, constants)
        terms["matmul"] += sum(head)
        logits = n * width * 16 * _multiple(job, constants)
        terms["memory_bound"] += logits / (machine.memory_gb_s * 1e9 * constants.hbm_share)
    if has_table or has_head:
        hidden = n_hidden_bytes(job)
        terms["memory_bound"] += 6 * hidden / (machine.memory_gb_s * 1e9 * constants.hbm_share)
        terms["tensor"] += _tensor_s(job, machine, constants, hidden)
    # What each micro-batch reads and writes per parameter: sums of gradients, copies.
    held = stage_parameters(job, blocks, has_table, has_head)
    is_sharded = job.stage == 3 and job.data * job.context > 1
    each = value(constants, job.engine.copies)
    if not is_sharded and job.engine.copies == "shard_copies":
        each = constants.sum_bytes
    terms["memory_bound"] += held * each / (machine.memory_gb_s * 1e9 * constants.hbm_share)
    terms["data"] = _gather_s(job, machine, constants, held, sum(terms.values()))
    # The device waits where the host starts kernels more slowly than they run.
    floor = blocks * launch_s(job, machine, constants)
    terms["launch"] = max(0.0, floor - sum(terms.values()))
    return terms


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
    return found


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


def _block(job: Job, machine: Machine, constants: Constants) -> dict[str, tuple[float, float]]:
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
        one, two = _products_s(n, k, width, machine, constants)
        forward, backward = forward + one, backward + two

    attention = _attention_s(job, machine, constants)
    spread = t if job.sequence else 1
    bytes_ = WIDTH[job.precision] * n * _multiple(job, constants)
    per_s = machine.memory_gb_s * 1e9 * constants.hbm_share
    rotary = (shape.query / t + key) if not shape.positions else 0
    forward_elements = 10 * hidden / spread + (3 if shape.is_gated else 2) * ffn / t + 2 * rotary
    backward_elements = 8 * hidden / spread + (5 if shape.is_gated else 3) * ffn / t + 2 * rotary

    # Two halves of a block, each with one collective of the hidden states and one in backward;
    # sequence parallelism gathers once more in backward instead of keeping what it gathered.
    tensor = 2 * _tensor_s(job, machine, constants, n_hidden_bytes(job))
    more = 1.5 if job.sequence and job.engine.name.startswith("ours") else 1.25 if job.sequence else 1.0
    ring = _context_s(job, machine, constants, attention)
    return {
        "matmul": (forward, backward),
        "attention": attention,
        "memory_bound": (bytes_ * forward_elements / per_s, bytes_ * backward_elements / per_s),
        "tensor": (tensor, more * tensor),
        "context": ring,
    }


def n_hidden_bytes(job: Job) -> float:
    """Bytes of the hidden states of a micro-batch on one context rank."""
    return job.local_tokens * job.shape.hidden_size * WIDTH[job.precision]


def _multiple(job: Job, constants: Constants) -> float:
    return value(constants, job.engine.bytes_multiple)


def sustained_tflops(machine: Machine, constants: Constants) -> float:
    """What matrix products of a step reach on this GPU when they are large."""
    if machine.is_measured:
        return machine.matmul_tflops
    if machine.calibrated:
        return getattr(constants, f"matmul_{machine.calibrated}")
    # As on H100, what a step sustains of a matmul alone.
    return constants.matmul_h100 / H100_MATMUL * machine.matmul_tflops


def _products_s(
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
def _slowdown(
    rows: int, columns: int, k: int, multiprocessors: int, contraction: float
) -> float:
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


def _attention_s(job: Job, machine: Machine, constants: Constants) -> tuple[float, float]:
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
        _products_s(job.seq_len, shape.width, job.seq_len, machine, constants)
        if machine.multiprocessors > 1
        else (2.0 * job.seq_len**2 * shape.width / rate, 4.0 * job.seq_len**2 * shape.width / rate)
    )
    heads = n / job.seq_len * shape.num_attention_heads / job.tensor
    return 2 * heads * one + 13 * scores / per_s, 2 * heads * two + 19 * scores / per_s


def launch_s(job: Job, machine: Machine, constants: Constants) -> float:
    """Seconds the host takes to start the kernels of one block, forward and backward."""
    if machine.kernel_s:
        return 150 * machine.kernel_s
    # The share of separate kernels follows how much is fused.
    eager = constants.layer_launch_s
    return eager * _multiple(job, constants) / constants.bytes_eager


# ---- communication ------------------------------------------------------------------------------


def group_rate(size: int, stride: int, machine: Machine, constants: Constants) -> float:
    """Bytes per second and rank of a ring of `size` ranks that are `stride` apart.

    Inside the scale-up domain the link; else as many NICs of a host as the group has ranks on it.
    """
    link = machine.link_gb_s * 1e9 * constants.link_share
    if size * stride <= machine.domain:
        return link
    on_host = max(1, machine.domain // stride)
    return min(link, on_host * machine.nic_gb_s * 1e9 * constants.nic_share)


def gather_s(
    bytes_: float, size: int, stride: int, machine: Machine, constants: Constants
) -> float:
    """Seconds of an all-gather or reduce-scatter whose larger side has `bytes_`."""
    if size == 1:
        return 0.0
    rate = group_rate(size, stride, machine, constants)
    latency = constants.rank_latency_s * size
    return (size - 1) / size * bytes_ / rate + latency


def _tensor_s(job: Job, machine: Machine, constants: Constants, bytes_: float) -> float:
    """Exposed seconds of one all-reduce, or of a gather and a scatter, over the tensor group."""
    exposed = value(constants, job.engine.tensor_exposed)
    return 2 * exposed * gather_s(bytes_, job.tensor, 1, machine, constants)


def _context_s(
    job: Job, machine: Machine, constants: Constants, attention: tuple[float, float]
) -> tuple[float, float]:
    """Exposed seconds of context parallelism in one block, (forward, backward).

    Ours exchanges heads for tokens (all-to-all); Megatron passes keys and values around a ring,
    beside the attention of the part that a rank holds.
    """
    if job.context == 1:
        return 0.0, 0.0
    shape, width = job.shape, WIDTH[job.precision]
    rate = group_rate(job.context, job.tensor, machine, constants)
    key = max(shape.key / job.tensor, shape.width)
    if job.engine.name.startswith("ours"):
        bytes_ = job.local_tokens * width * (2 * shape.query / job.tensor + 2 * key)
        once = bytes_ * (job.context - 1) / job.context / rate + 4 * constants.rank_latency_s
        return once, once
    ring = job.local_tokens * width * 2 * key * (job.context - 1) / rate
    hidden = [max(0.0, ring * times - seconds) for times, seconds in zip((1, 2), attention)]
    latency = constants.message_s * (job.context - 1)
    return hidden[0] + 0.25 * ring + latency, hidden[1] + 0.5 * ring + latency


def _message_s(job: Job, machine: Machine, constants: Constants) -> float:
    """Seconds of one message of hidden states to the next pipeline stage."""
    if job.pipeline == 1:
        return 0.0
    # Megatron sends a part from each tensor rank (Narayanan et al. 2021, 4.1).
    is_spread = job.sequence or not job.engine.is_blocking
    bytes_ = n_hidden_bytes(job) / (job.tensor if is_spread else 1)
    stride = job.tensor * job.context * job.data
    is_near = stride * 2 <= machine.domain
    rate = (machine.link_gb_s if is_near else machine.nic_gb_s) * 1e9
    share = constants.link_share if is_near else constants.nic_share
    return bytes_ / (rate * share) + constants.message_s


def stage_parameters(job: Job, blocks: int, has_table: bool, has_head: bool) -> float:
    """Parameters of one rank before ZeRO, on a stage of `blocks` blocks."""
    shape = job.shape
    total = blocks * shape.block_matrices / job.tensor
    table = shape.embedding / job.tensor
    if has_table:
        total += table + shape.positions * shape.hidden_size
    if has_head and not (has_table and shape.tie_word_embeddings):
        total += table
    return total


def _gather_s(
    job: Job, machine: Machine, constants: Constants, held: float, compute_s: float
) -> float:
    """Exposed seconds of one micro-batch's gathers and scatters under stage 3: three times the
    weights, or twice where they stay gathered from forward to backward.
    """
    size = job.data * job.context
    if job.stage < 2 or size == 1:
        return 0.0
    stride = job.tensor
    group = job.shard_group or size
    bytes_ = held * WIDTH[job.precision]
    messages = 3 * (max(job.stage_blocks()) + 2)
    if job.stage == 2:
        if job.engine.shares_weights == "zero3":  # DeepSpeed: one reduction of each pass
            exposed = value(constants, job.engine.data_exposed)
            return exposed * gather_s(held * summed_bytes(job), size, stride, machine, constants)
        moved, messages = held * (WIDTH[job.precision] + job.engine.sum_bytes), messages * 2 / 3
    else:
        gathers = 2
        if job.engine.shares_weights == "zero3" and held <= LIVE:
            gathers = 1  # what a forward gathered is still there in backward (counted, 0.19.8)
        moved = held * (gathers * WIDTH[job.precision] + summed_bytes(job))
    rate = group_rate(group, stride, machine, constants)
    seconds = moved * (group - 1) / group / rate
    seconds += messages * constants.rank_latency_s * group
    if group < size:  # replicas of the shards sum their gradients
        seconds += 2 * bytes_ / group * (1 - group / size) / rate
    if job.engine.shares_weights == "zero3":
        return constants.zero3_exposed * seconds * constants.nic_share / 0.47
    exposed = value(constants, job.engine.data_exposed)
    return max(exposed * seconds, seconds - 0.8 * compute_s)


def summed_bytes(job: Job) -> int:
    """Bytes of a gradient that is reduced: our engine sums several micro-batches in fp32."""
    if job.engine.name.startswith("ours"):
        return 4 if job.grad_dtype == "fp32" or job.precision == "fp32" else 2
    return job.engine.sum_bytes


def _end_of_step(
    job: Job, machine: Machine, constants: Constants, free_s: float
) -> tuple[float, float]:
    """(exposed data-parallel communication, optimizer) after the last micro-batch."""
    size = job.data * job.context
    stages = job.stage_blocks()
    held = max(
        stage_parameters(job, blocks, index == 0, index == job.pipeline - 1)
        for index, blocks in enumerate(stages)
    )
    share = held / size if job.stage else held
    # Adam reads and writes weights in fp32, two moments and the gradient, and writes the weights.
    per_s = machine.memory_gb_s * 1e9 * constants.hbm_share
    optimizer = 34 * share / per_s
    if size == 1 or job.stage == 3:
        return 0.0, optimizer
    width, summed = WIDTH[job.precision], summed_bytes(job)
    stride = job.tensor
    reduce = gather_s(held * summed, size, stride, machine, constants)
    if job.stage == 0:
        seconds = 2 * reduce
    else:
        seconds = reduce + gather_s(held * width, size, stride, machine, constants)
    exposed = value(constants, job.engine.data_exposed)
    if job.engine.name == "deepspeed" or job.engine.name.startswith("ours"):
        if job.stage == 2:  # the passes have reduced already
            seconds = gather_s(held * width, size, stride, machine, constants)
        return exposed * seconds, optimizer
    # The last backward and the pipeline's end hide the reduction, the first forward the gather.
    return max(exposed * seconds, seconds - 0.5 * free_s), optimizer
