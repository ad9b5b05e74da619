"""Bytes that one rank allocates, by kind, for every pipeline stage, and whether they fit a card.

    weights, gradients, optimizer     runtime.ds_config.state_bytes (ours), what others document
    activations, logits               model.cost (ours); Korthikanti et al. 2022 (others)
    buffers                           buckets, and what stage 3 gathers ahead
    step                              gradients and their fp32 copy while the optimizer steps (ours)

Rule: the numbers are what torch's allocator counts (`max_memory_allocated`); nvidia-smi shows more:
context, communicators, the allocator's own gaps. `RESERVE` stands for context and communicators; it
is taken off the card, not added to the prediction. Everything is in bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from base.units import GIB, MIB
from model.cost import activation_bytes, blocks_recomputed, chunk_tokens, parameters
from plan.machine import Machine
from plan.workload import WIDTH, Job
from recipes.schema import MASTER_BYTES, OPTIMIZERS
from runtime.ds_config.state_bytes import state_bytes

RESERVE = 1.5 * GIB  # CUDA context and communicators
EDGE = 0.92  # share of a card from which fragmentation may end a run
BUCKET = 50_000_000  # elements, the reduction bucket of ds_configs/
# Host memory of one rank besides what is counted: Python, torch and CUDA libraries, the pinned
# buffers of NCCL and of copies. Assumed; a run's record has the measured peak (host_memory_gib).
PROCESS_BYTES = 6 * GIB
# A prepared token: ids and labels of 8 bytes, segment and lengths of 4 (data.stream.windows), once
# as it was prepared and once in page-locked memory.
PREPARED_TOKEN_BYTES = 2 * (8 + 8 + 4 + 4)
# A pass that is interleaved keeps p (1 + (p - 1) / (p v)) micro-batches on the first stage.

FITS, AT_EDGE, TOO_LARGE = "fits", "at the edge", "does not fit"


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the fullest rank of one pipeline stage.

    `gradients`, `activations` and `logits` are alive at the end of a pass; `step` takes their place
    in the optimizer's step: reduced gradients, and the copy that is stepped.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    step: float = 0.0
    host: float = 0.0  # offloaded states in host memory, per rank

    @property
    def states(self) -> float:
        """Bytes that live from step to step, and the sum of gradients."""
        return self.weights + self.gradients + self.optimizer

    @property
    def at_pass(self) -> float:
        """Bytes at the end of a forward, which is the most of a pass."""
        return self.states + self.buffers + self.activations + self.logits

    @property
    def at_step(self) -> float:
        """Bytes in the optimizer's step."""
        return self.weights + self.optimizer + self.buffers + self.step

    @property
    def peak(self) -> float:
        """The most at one time, in whichever phase."""
        return max(self.at_pass, self.at_step)


def memory_of_stages(job: Job) -> list[StageMemory]:
    """Every pipeline stage, the first first."""
    return [stage_memory(job, index) for index in range(job.pipeline)]


def worst(job: Job) -> StageMemory:
    """The fullest stage. The first ones hold most micro-batches, the last one the logits."""
    # Of stages with as many blocks, the earliest holds most micro-batches.
    blocks = job.stage_blocks()
    indices = {0, job.pipeline - 1} | {blocks.index(count, 1) for count in set(blocks[1:])}
    stages = [stage_memory(job, index) for index in indices]
    return max(stages, key=lambda stage: stage.peak)


def verdict(peak: float, machine: Machine) -> str:
    """fits, at the edge, or does not fit."""
    share = (peak + RESERVE) / machine.usable_bytes
    return FITS if share <= EDGE else AT_EDGE if share <= 1.0 else TOO_LARGE


def host_parts(job: Job) -> dict[str, float]:
    """Bytes of host memory of one rank of the fullest stage, by kind; our own engine.

    The dataset's files are mapped: their pages can be dropped, so they are no need of memory.
    """
    return {
        "processes": PROCESS_BYTES,
        "offloaded states": max(stage_memory(job, i).host for i in {0, job.pipeline - 1}),
        "snapshot of a save": _snapshot_bytes(job),
        "prepared batches": float(
            PREPARED_TOKEN_BYTES * job.prefetch * job.seq_len * job.micro_batch
        ),
    }


def _snapshot_bytes(job: Job) -> float:
    """A save in the background copies fp32 weights and optimizer states of what a rank writes."""
    if not job.saves_in_background:
        return 0.0
    own = max(stage_parameters(job, index) for index in {0, job.pipeline - 1})
    return (MASTER_BYTES + OPTIMIZERS[job.optimizer]) * own / (job.data * job.context)


def host_bytes(job: Job, machine: Machine) -> float:
    """Bytes of host memory that all ranks of the fullest host need together."""
    return sum(host_parts(job).values()) * min(job.world, machine.gpus_per_node)


def fits_host(job: Job, machine: Machine) -> bool:
    """Whether the ranks of one host find room in its memory."""
    return host_bytes(job, machine) <= machine.usable_host_bytes


def in_flight(job: Job, index: int) -> float:
    """Micro-batches whose activations stage `index` holds at a time, in micro-batches."""
    p, v, m = job.pipeline, job.virtual, job.micro_batches
    if job.schedule == "zb-2p":
        return min(2 * p - 1, m)
    if job.schedule == "zb-1p":
        return min(p, m)
    if v > 1:
        chunks = 2 * (p - index - 1) + (v - 1) * p + 1  # warm-up passes of one chunk each
        return min(chunks / v, m)
    return min(p - index, m)


def stage_memory(job: Job, index: int) -> StageMemory:
    """Bytes of the fullest rank of pipeline stage `index`."""
    return _ours(job, index) if job.engine.name.startswith("ours") else _others(job, index)


def stage_parameters(job: Job, index: int) -> int:
    """Parameters of the fullest tensor rank of a stage, norms and biases included."""
    shape, t = job.shape, job.tensor
    blocks = job.stage_blocks()[index]
    words = -(-shape.vocab_size // t) * shape.hidden_size
    if shape.is_gated:
        counted = parameters(shape)
        norms = (counted.norms - shape.hidden_size) // shape.num_hidden_layers
        total = blocks * ((counted.block - norms) // t + norms)
    else:
        total = blocks * (shape.block_matrices // t + 4 * shape.hidden_size)
    is_last = index == job.pipeline - 1
    if index == 0:
        total += words + shape.positions * shape.hidden_size
    if is_last:
        total += shape.hidden_size + (
            words if job.pipeline > 1 or not shape.tie_word_embeddings else 0
        )
    return total


# ---- our engine


def _ours(job: Job, index: int) -> StageMemory:
    """State bytes as DeepSpeed holds them, activations as `model.cost` counts them."""
    own, ranks = stage_parameters(job, index), job.data * job.context
    is_wide = job.precision == "fp32"
    # bf16 sums in fp32 where there is more than one micro-batch (runtime.ds_config.merge).
    accumulates = job.micro_batches > 1 or job.pipeline > 1
    summed = job.grad_dtype or ("fp32" if is_wide or accumulates else "bf16")
    kinds = state_bytes(
        job.stage, job.precision, summed, accumulates, job.is_immediate and not is_wide,
        ranks, job.is_offloaded, job.optimizer,
    )  # fmt: skip
    saved, workspace = _our_activations(job, index)
    # One bucket in the type that is communicated; stage 3 prefetches as much again and holds the
    # weights of the block that runs.
    buffers = min(BUCKET, own) * (4 if is_wide else 2)
    if job.stage == 3 and ranks > 1:
        block = own / max(1, job.stage_blocks()[index])
        buffers += (min(BUCKET, own) + 2 * block) * WIDTH[job.precision]
    device = {name: kinds[name] * own for name in kinds}
    host = 0.0
    if job.is_offloaded:
        host = sum(device[name] for name in ("gradients", "master", "moments"))
        device |= dict.fromkeys(("gradients", "master", "moments"), 0.0)
    return StageMemory(
        weights=device["weights"],
        gradients=device["gradients"],
        optimizer=device["master"] + device["moments"],
        activations=saved * in_flight(job, index),
        logits=workspace,
        buffers=buffers,
        step=0.0
        if job.is_offloaded
        else own * step_bytes(job.stage, job.precision, summed, kinds["gradients"], ranks),
        host=host,
    )


def step_bytes(stage: int, precision: str, summed: str, at_pass: float, ranks: int) -> float:
    """Bytes of gradients per parameter while DeepSpeed 0.19.8 makes ready to step (counted).

    BF16_Optimizer (stage 1, bf16 weights, fp32 sums) steps the sum that it has. The others make a
    fp32 copy of what this rank steps, 4 / d, beside the reduced gradients; stages 1 and 2 then free
    the latter, stage 3 keeps them.
    """
    if stage == 1 and precision == "bf16" and summed == "fp32":
        return at_pass
    return (WIDTH[summed] + 4) / ranks


def _our_activations(job: Job, index: int) -> tuple[float, float]:
    """(bytes kept of one micro-batch, working space of the loss) on one rank of a stage."""
    whole, parts = job.shape, job.tensor
    blocks = job.stage_blocks()[index]
    shape = dataclasses.replace(
        whole,
        num_hidden_layers=blocks,
        head_dim=whole.width,
        num_attention_heads=whole.num_attention_heads // parts,
        num_key_value_heads=max(1, whole.num_key_value_heads // parts),
        intermediate_size=whole.intermediate_size // parts,
        vocab_size=-(-whole.vocab_size // parts),
        # With sequence parallelism every element that is kept belongs to a part of the tokens.
        hidden_size=whole.hidden_size // (parts if job.sequence else 1),
    )
    length = job.seq_len // job.context
    device = "cpu" if job.is_on_cpu else "cuda"
    counted = activation_bytes(shape, job.micro_batch, length, job.precision, job.recompute, device)
    is_last = index == job.pipeline - 1
    tokens, width = job.micro_batch * length, WIDTH[job.precision]
    more = 0
    if job.sequence and is_last:  # the head takes all tokens: so does the loss's gradient there
        more += tokens * width * (whole.hidden_size - shape.hidden_size)
    if job.context > 1:
        # Attention's output before and after its way back, keys and values that several ranks
        # have; tables and ids of all tokens.
        plain = blocks - blocks_recomputed(job.recompute, blocks)
        copied = 2 * max(0, job.context - shape.num_key_value_heads)
        heads = min(plain + 1, blocks) * (shape.num_attention_heads + copied)
        others = job.context - 1
        more += tokens * (width * whole.width * (heads + 2 * others) + 8 * others)
    return counted.saved + more, counted.workspace if is_last else 0


# ---- other engines, for published runs


def _others(job: Job, index: int) -> StageMemory:
    """Megatron, FSDP, nanotron: what their documentation says they hold."""
    own, ranks = stage_parameters(job, index), job.data * job.context
    shards = job.shard_group or ranks
    width = WIDTH[job.precision]
    buffers = 0.0
    if job.engine.name.startswith(("fsdp", "xla")) and job.stage == 3:
        # fp32 weights, gradients and moments in shards; two blocks and the ends gathered.
        weights, gradients, optimizer = 4 * own / shards, 4 * own / shards, 8 * own / shards
        blocks = max(1, job.stage_blocks()[index])
        body = job.shape.block_matrices / job.tensor
        ends = own - blocks * body
        if shards > 1:
            buffers = (2 * body + max(0.0, ends)) * (width + 4)
    else:
        weights = width * own / (ranks if job.stage == 3 else 1)
        gradients = job.engine.sum_bytes * own / (ranks if job.stage >= 2 else 1)
        if job.engine.name == "nanotron":  # the 16-bit gradients stay beside their fp32 sum
            gradients += width * own
        optimizer = 12 * own / (ranks if job.stage else 1)
    kept, working = kept_bytes(job)
    blocks = job.stage_blocks()[index]
    again = blocks_recomputed(job.recompute, blocks) if job.recompute != "selective" else 0
    tokens = job.local_tokens
    spread = job.tensor if job.sequence else 1
    activations = (blocks - again) * kept + again * tokens * 2 * job.shape.hidden_size / spread
    # Gradients in flight inside one block, or one block that runs again.
    activations = activations * in_flight(job, index) + working
    is_last = index == job.pipeline - 1
    logits = job.engine.logit_bytes * tokens * job.shape.vocab_size / job.tensor if is_last else 0.0
    return StageMemory(weights, gradients, optimizer, activations, logits, buffers)


def kept_bytes(job: Job) -> tuple[float, float]:
    """(bytes that one block keeps of a micro-batch, the same without recomputation)."""
    shape, t, tokens = job.shape, job.tensor, job.local_tokens
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    spread = t if job.sequence else 1
    heads = 2 * shape.query / t + 2 * max(shape.key / t, shape.width)
    is_classic = job.engine.name.startswith("megatron")
    # Norm inputs and outputs; dropout masks where there is dropout (Korthikanti et al.: 34 h).
    norms = (8 + (2 if is_classic and not shape.is_gated else 0)) * hidden / spread
    inner = 2 * (4 if shape.is_gated else 2) * ffn / t
    if is_classic and shape.is_gated:
        inner = 2 * 3 * ffn / t  # the product is computed again
    if job.engine.name == "nanotron" and t > 1:  # what was gathered for a product is kept
        norms += 4 * hidden * (1 - 1 / t)
    scores = 0.0
    if not job.engine.attention and job.recompute != "selective":
        scores = 5.0 * shape.num_attention_heads / t * job.seq_len
    whole = tokens * (norms + 2 * heads + inner + scores)
    if job.recompute == "selective" and not is_classic:
        if job.engine.name == "xla":  # queries, keys, values and attention's output
            return tokens * 2 * (2 * hidden / spread + heads), whole
        few = 2 * (3 * hidden / spread + shape.query / t + shape.key / t + ffn / t)
        return tokens * few, whole
    return whole, whole


def fits_recompute(job: Job, machine: Machine) -> str:
    """The least recomputation under which the job fits the card; full where nothing does."""
    for how in ("none", "selective", "full"):
        tried = dataclasses.replace(job, recompute=how)
        # The error of a prediction for an engine whose settings are not all known.
        if verdict(0.9 * worst(tried).peak, machine) != TOO_LARGE:
            return how
    return "full"


__all__ = ["MIB", "StageMemory", "chunk_tokens", "memory_of_stages", "verdict", "worst"]
