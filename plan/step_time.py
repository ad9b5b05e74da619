"""Seconds of one step, term by term.

    one micro-batch on each pipeline stage  ->  the slowest stage  ->  a step of m micro-batches
    compute_time: products, attention, memory-bound work      communication_time: collectives

Rule: every term is a closed formula of the job, the machine and `constants.Constants`; a published
run and a recipe of ours go through the same lines. Formulas: Narayanan et al. 2021 (pipelines),
Rajbhandari et al. 2020 (ZeRO), Qi et al. 2023 (zero bubble). Units: seconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from plan.communication_time import (
    end_of_step,
    held_parameters,
    hidden_bytes,
    message_s,
    sharding_s,
    tensor_s,
)
from plan.compute_time import block_s, bytes_multiple, launch_s, products_s, repeated
from plan.constants import Constants, value
from plan.machine import Machine
from plan.workload import Job

DEFAULT = Constants()


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

    each_message_s = message_s(job, machine, constants)
    bubble = bubble_time(job, once, each_message_s)
    steady = 0.0
    if job.pipeline > 1:
        # A send and a receive each way; the interleaved schedule hides half of them. Megatron
        # hides the bytes behind the next pass, DeepSpeed's engine waits for them.
        messages = 4 if job.virtual == 1 else 2 * job.virtual
        each = each_message_s if job.engine.is_blocking else constants.message_s
        steady = messages * job.micro_batches * each
    data_s, optimizer_s = end_of_step(job, machine, constants, once + bubble)
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


def _micro_batch(
    job: Job, machine: Machine, constants: Constants, blocks: int, has_table: bool, has_head: bool
) -> dict[str, float]:
    """Seconds of one forward and backward on a stage of `blocks` blocks."""
    shape = job.shape
    block = block_s(job, machine, constants)
    again = repeated(job, blocks)
    parts = ("matmul", "attention", "memory_bound", "tensor", "context")
    terms = {
        name: blocks * block[name][1] + (blocks + again[name]) * block[name][0] for name in parts
    }
    if has_head:
        n, width = job.local_tokens, -(-shape.vocab_size // job.tensor)
        head = products_s(n, shape.hidden_size, width, machine, constants)
        terms["matmul"] += sum(head)
        logits = n * width * 16 * bytes_multiple(job, constants)
        terms["memory_bound"] += logits / (machine.memory_gb_s * 1e9 * constants.hbm_share)
    if has_table or has_head:
        hidden = hidden_bytes(job)
        terms["memory_bound"] += 6 * hidden / (machine.memory_gb_s * 1e9 * constants.hbm_share)
        ends = has_table + has_head
        terms["tensor"] += ends * tensor_s(job, machine, constants, hidden)
    # What each micro-batch reads and writes per parameter: sums of gradients, copies.
    held = held_parameters(job, blocks, has_table, has_head)
    is_sharded = job.stage == 3 and job.data * job.context > 1
    each = value(constants, job.engine.copies)
    if not is_sharded and job.engine.copies == "shard_copies":
        each = constants.sum_bytes
    terms["memory_bound"] += held * each / (machine.memory_gb_s * 1e9 * constants.hbm_share)
    terms["data"] = sharding_s(job, machine, constants, held, sum(terms.values()))
    # The device waits where the host starts kernels more slowly than they run.
    floor = blocks * launch_s(job, machine, constants)
    terms["launch"] = max(0.0, floor - sum(terms.values()))
    return terms
