"""One training step as the planner sees it: the shape of the model, the sizes of the axes, and the
engine that runs it.

    Recipe + Layout (ours)  or  a row of published runs  ->  Job  ->  memory, time, cost

Rule: nothing here depends on where a job came from, so published runs and our own recipes are
predicted by the same code. Units: tokens, sequences, ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # bytes of an activation


@dataclass(frozen=True)
class Shape:
    """A decoder, with the fields that `model.cost` reads, and what other engines do differently."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    is_gated: bool = True  # gate and up projection; False = one, as in GPT-2
    positions: int = 0  # rows of a learned position table

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.width

    @property
    def key(self) -> int:
        """Width of all key heads."""
        return self.num_key_value_heads * self.width

    @property
    def block_matrices(self) -> int:
        """Parameters of one block that are multiplied with each token."""
        ways = 3 if self.is_gated else 2
        attention = 2 * self.query + 2 * self.key
        return self.hidden_size * (attention + ways * self.intermediate_size)

    @property
    def embedding(self) -> int:
        """Parameters of the token table."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Trained numbers, biases and norms left out."""
        tables = 1 if self.tie_word_embeddings else 2
        ends = tables * self.embedding + self.positions * self.hidden_size
        return self.num_hidden_layers * self.block_matrices + ends

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs, attention over the full square (see `model.cost`)."""
        layers = self.num_hidden_layers
        matrices = layers * self.block_matrices + self.embedding
        return 6 * matrices + 12 * layers * self.query * seq_len


@dataclass(frozen=True)
class Profile:
    """How an engine works, where engines differ. The names are of constants in `constants`."""

    name: str
    year: int  # of the versions that it describes
    bytes_multiple: str  # constant: how much elementwise work is fused
    attention: str  # constant: rate of the attention kernel; "" = unfused
    tensor_exposed: str
    data_exposed: str
    shares_weights: str  # "fsdp" or "zero3": how stage 3 gathers
    copies: str  # constant: bytes per parameter and micro-batch besides the matrix products
    is_calibrated: bool  # some rows of the published runs are of this engine
    sum_bytes: int = 4  # bytes of a summed gradient: 4 = fp32
    logit_bytes: int = 10  # bytes alive per logit at the loss
    is_chunked: bool = False  # the loss never holds all logits
    is_blocking: bool = (
        False  # pipeline messages stand between passes (DeepSpeed's pipeline engine)
    )


ENGINES = {
    profile.name: profile
    for profile in (
        Profile("megatron-classic", 2021, "bytes_fused", "", "all", "data_exposed",
                "fsdp", "sum_bytes", True),
        Profile("megatron", 2024, "bytes_fused", "attention_new", "tensor_exposed",
                "data_exposed", "fsdp", "sum_bytes", True, sum_bytes=2),
        Profile("megatron-deepspeed", 2022, "bytes_fused", "", "all", "all", "zero3", "sum_bytes",
                False, is_blocking=True),
        Profile("xla", 2024, "bytes_fused", "attention_new", "all", "data_exposed", "fsdp",
                "sum_bytes", True),
        Profile("fsdp", 2023, "bytes_eager", "attention_two", "all", "shard_exposed",
                "fsdp", "shard_copies", True, logit_bytes=14),
        Profile("fsdp-compiled", 2024, "bytes_compiled", "attention_two", "all",
                "shard_exposed", "fsdp", "shard_copies", True),
        Profile("deepspeed", 2022, "bytes_eager", "attention_old", "all",
                "all", "zero3", "sum_bytes", False, sum_bytes=2),
        Profile("nanotron", 2024, "bytes_eager", "attention_two", "all",
                "data_exposed", "fsdp", "sum_bytes", False, logit_bytes=14),
        Profile("ours", 2026, "bytes_eager", "attention_two", "all", "all",
                "zero3", "sum_bytes", False, is_chunked=True,
                is_blocking=True),
        Profile("ours-compiled", 2026, "bytes_compiled", "attention_two", "all",
                "all", "zero3", "sum_bytes", False, is_chunked=True, is_blocking=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One step of one run on every rank."""

    shape: Shape
    seq_len: int
    micro_batch: int  # sequences
    micro_batches: int  # per data rank and step
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # chunks of blocks per pipeline rank (interleaved schedule)
    context: int = 1
    data: int = 1
    stage: int = 1  # ZeRO; 0 = all states on every data rank
    recompute: str = "none"
    precision: str = "bf16"
    sequence: bool = True  # tensor parallelism splits norms and residuals by tokens
    blocks: tuple[int, ...] = ()  # of each pipeline stage; () = as even as can be
    schedule: str = "1f1b"  # or zb-1p, zb-2p
    shard_group: int = 0  # ranks over which stage 3 shards; 0 = all data and context ranks
    engine: Profile = ENGINES["ours"]
    # What only our own engine has.
    optimizer: str = "adamw"
    grad_dtype: str = ""  # type in which gradients are summed; "" = as the DeepSpeed JSON has it
    is_immediate: bool = True  # bf16.immediate_grad_update
    is_offloaded: bool = False  # optimizer states in host memory
    is_on_cpu: bool = False
    prefetch: int = 0  # micro-batches prepared in host memory
    saves_in_background: bool = False  # a copy of what is saved, in host memory

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.seq_len * self.micro_batch * self.micro_batches * self.data

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before tensor ranks share them."""
        return self.seq_len * self.micro_batch // self.context

    def stage_blocks(self) -> tuple[int, ...]:
        """Blocks of each pipeline stage."""
        if self.blocks:
            return self.blocks
        even, more = divmod(self.shape.num_hidden_layers, self.pipeline)
        # What is left over goes to the stages in the middle, which have no embedding or head.
        order = sorted(range(self.pipeline), key=lambda i: (i in (0, self.pipeline - 1), i))
        extra = set(order[:more])
        return tuple(even + (index in extra) for index in range(self.pipeline))
