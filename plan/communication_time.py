"""Seconds of communication in one step: tensor, context, data and pipeline groups.

    bytes of a group's collective  ->  ring over its slowest link  ->  share that nothing hides

Rule: a group that leaves the scale-up domain uses as many network cards of a host as it has ranks
there. Our own engine's volumes are those that `parallel.communication_volume` counts in runs (a
test compares them). Formulas: ring all-reduce 2 (n - 1) / n, gather or scatter (n - 1) / n of the
bytes of the larger side (Thakur et al. 2005). Units: seconds, bytes.
"""

from __future__ import annotations

from plan.constants import Constants, value
from plan.machine import Machine
from plan.workload import WIDTH, Job
from recipes.schema import OPTIMIZERS

LIVE = 1e9  # parameters that DeepSpeed keeps gathered: stage3_max_live_parameters of ds_configs/


def hidden_bytes(job: Job) -> float:
    """Bytes of the hidden states of a micro-batch on one context rank."""
    return job.local_tokens * job.shape.hidden_size * WIDTH[job.precision]


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


def tensor_s(job: Job, machine: Machine, constants: Constants, bytes_: float) -> float:
    """Exposed seconds of one all-reduce, or of a gather and a scatter, over the tensor group."""
    exposed = value(constants, job.engine.tensor_exposed)
    return 2 * exposed * gather_s(bytes_, job.tensor, 1, machine, constants)


def context_s(
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
        key = max(key, job.context * shape.width)  # a head that several ranks need goes to each
        bytes_ = job.local_tokens * width * (2 * shape.query / job.tensor + 2 * key)
        once = bytes_ * (job.context - 1) / job.context / rate + 4 * constants.rank_latency_s
        return once, once
    ring = job.local_tokens * width * 2 * key * (job.context - 1) / rate
    hidden = [
        max(0.0, ring * times - seconds) for times, seconds in zip((1, 2), attention, strict=True)
    ]
    latency = constants.message_s * (job.context - 1)
    return hidden[0] + 0.25 * ring + latency, hidden[1] + 0.5 * ring + latency


def message_s(job: Job, machine: Machine, constants: Constants) -> float:
    """Seconds of one message of hidden states to the next pipeline stage."""
    if job.pipeline == 1:
        return 0.0
    # Megatron sends a part from each tensor rank (Narayanan et al. 2021, 4.1).
    is_spread = job.sequence or not job.engine.is_blocking
    bytes_ = hidden_bytes(job) / (job.tensor if is_spread else 1)
    stride = job.tensor * job.context * job.data
    is_near = stride * 2 <= machine.domain
    rate = (machine.link_gb_s if is_near else machine.nic_gb_s) * 1e9
    share = constants.link_share if is_near else constants.nic_share
    return bytes_ / (rate * share) + constants.message_s


def held_parameters(job: Job, blocks: int, has_table: bool, has_head: bool) -> float:
    """Parameters of one rank before ZeRO, on a stage of `blocks` blocks."""
    shape = job.shape
    total = blocks * shape.block_matrices / job.tensor
    table = shape.embedding / job.tensor
    if has_table:
        total += table + shape.positions * shape.hidden_size
    if has_head and not (has_table and shape.tie_word_embeddings):
        total += table
    return total


def sharding_s(
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
        moved = held * (gathers_of_pass(job, held) * WIDTH[job.precision] + summed_bytes(job))
    rate = group_rate(group, stride, machine, constants)
    seconds = moved * (group - 1) / group / rate
    seconds += messages * constants.rank_latency_s * group
    if group < size:  # replicas of the shards sum their gradients
        seconds += 2 * bytes_ / group * (1 - group / size) / rate
    if job.engine.shares_weights == "zero3":
        return constants.zero3_exposed * seconds * constants.nic_share / 0.47
    exposed = value(constants, job.engine.data_exposed)
    return max(exposed * seconds, seconds - 0.8 * compute_s)


def gathers_of_pass(job: Job, held: float) -> int:
    """How often stage 3 gathers the weights of a micro-batch: once where what the forward gathered
    is still there in the backward (counted, DeepSpeed 0.19.8), else twice.
    """
    return 1 if job.engine.shares_weights == "zero3" and held <= LIVE else 2


def summed_bytes(job: Job) -> int:
    """Bytes of a gradient that is reduced: our engine sums several micro-batches in fp32."""
    if job.engine.name.startswith("ours"):
        return 4 if job.grad_dtype == "fp32" or job.precision == "fp32" else 2
    return job.engine.sum_bytes


def end_of_step(
    job: Job, machine: Machine, constants: Constants, free_s: float
) -> tuple[float, float]:
    """(exposed data-parallel communication, optimizer) after the last micro-batch."""
    size = job.data * job.context
    stages = job.stage_blocks()
    held = max(
        held_parameters(job, blocks, index == 0, index == job.pipeline - 1)
        for index, blocks in enumerate(stages)
    )
    share = held / size if job.stage else held
    # The optimizer reads and writes fp32 weights and its states (AdamW: two moments), reads the
    # gradient, and writes the weights: 34 bytes for AdamW.
    per_s = machine.memory_gb_s * 1e9 * constants.hbm_share
    optimizer = (18 + 2 * OPTIMIZERS[job.optimizer]) * share / per_s
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
