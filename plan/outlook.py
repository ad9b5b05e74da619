"""What a step time means for a whole run: tokens/s, MFU, days, GPU-hours, cost, goodput.

Rule: MFU counts model FLOPs (6 per matrix parameter and token, attention over the full square; see
`model.cost`), over the dense bf16 peak; recomputed forwards cost time, not MFU. The causal value
counts half of attention's square. Units: seconds, tokens; days of 24 h; GPU-hours of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from plan.machine import Machine
from plan.memory_use import stage_parameters
from plan.workload import Job
from recipes.schema import MASTER_BYTES, OPTIMIZERS
from record.forecast import Costs, best_interval, goodput

MTBF_GPU_HOURS = 46_000.0  # Llama 3 (Grattafiori et al. 2024, section 3.3.4): 2.8 h on 16,384
# A save: each rank writes its share to shared storage; a restart: processes, imports, compilation,
# and a load. Assumptions that a run replaces by what it measures (`make goodput`).
WRITE_GB_S_PER_HOST = 2.0
RESTART_S = 300.0


@dataclass(frozen=True)
class Outlook:
    """One run from its step time."""

    tokens_per_s: float  # over all ranks
    mfu: float
    mfu_causal: float
    tokens: float
    seconds: float  # without failures
    goodput: float  # useful share of the wall clock with failures and saves
    save_s: float
    interval: int  # steps between saves that lose least
    gpu_hours: float
    cost: float | None

    @property
    def days(self) -> float:
        """Wall clock with failures and saves, in days."""
        return self.seconds / self.goodput / 86400 if self.goodput else float("inf")


def outlook(job: Job, machine: Machine, step_s: float, tokens: float) -> Outlook:
    """The whole run of `tokens` tokens."""
    rate = job.tokens / step_s
    flops = job.shape.flops_per_token(job.seq_len)
    square = 12 * job.shape.num_hidden_layers * job.shape.query * job.seq_len
    peak = job.world * machine.peak_tflops * 1e12
    own = max(stage_parameters(job, index) for index in {0, job.pipeline - 1})
    # Master weights and optimizer states in fp32, once over the data ranks.
    per_parameter = float(MASTER_BYTES + OPTIMIZERS[job.optimizer])
    per_host = (
        per_parameter * own / (job.data * job.context) * min(job.world, machine.gpus_per_node)
    )
    save_s = per_host / (WRITE_GB_S_PER_HOST * 1e9) + 1.0
    hours = machine.mtbf_hours or MTBF_GPU_HOURS / job.world
    costs = Costs(step_s=step_s, stall_s=save_s, restart_s=RESTART_S + save_s)
    interval = best_interval(costs, hours * 3600)
    share = goodput(costs, hours * 3600, interval)
    seconds = tokens / rate
    gpu_hours = seconds / share / 3600 * job.world if share else float("inf")
    price = machine.price_per_hour
    return Outlook(
        tokens_per_s=rate,
        mfu=rate * flops / peak,
        mfu_causal=rate * (flops - square / 2) / peak,
        tokens=tokens,
        seconds=seconds,
        goodput=share,
        save_s=save_s,
        interval=interval,
        gpu_hours=gpu_hours,
        cost=None if price is None else price * gpu_hours,
    )
