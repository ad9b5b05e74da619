"""Every key of the DeepSpeed JSON that has an effect here, and the reason why others are refused.

DeepSpeed reads top-level keys and the blocks data_types, pipeline, checkpoint and
activation_checkpointing with `.get`: a misspelt name there is ignored without a message. So this
list, not DeepSpeed, says which keys exist; a test compares its zero_optimization and bf16 parts
with DeepSpeed's own classes, and the readers of each key with what DeepSpeed reads while it trains.
Rule: a key is listed with the classes that read it, or it is refused with the way out;
`runtime.ds_config.key_rules` refuses it where no class that reads it is built. Sizes are numbers of
elements unless they say otherwise. Written for DeepSpeed 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes.schema import FP16, STAGE_0

# The classes that DeepSpeed wraps around the optimizer, and the stages at which it builds them.
ZERO_12, ZERO_3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
BF16 = "BF16_Optimizer"
STAGES = {ZERO_12: (1, 2), BF16: (1,), ZERO_3: (3,)}


@dataclass(frozen=True)
class Key:
    """Type, meaning and legal values of one key. `readers` names the classes that read it.

    For a list, `choices` are the legal items.
    """

    kind: type
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    readers: tuple[str, ...] = (ZERO_12, BF16, ZERO_3)

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages at which a reader is built."""
        return tuple(sorted({stage for name in self.readers for stage in STAGES[name]}))


def _zero(kind: type, meaning: str, low: float | None = None, high: float | None = None) -> Key:
    return Key(kind, meaning, low=low, high=high, readers=(ZERO_12, ZERO_3))


def _zero12(kind: type, meaning: str) -> Key:
    return Key(kind, meaning, readers=(ZERO_12,))


def _zero3(kind: type, meaning: str, low: float | None = 0, choices: tuple[str, ...] = ()) -> Key:
    return Key(kind, meaning, low if kind is int else None, None, choices, (ZERO_3,))


DTYPES = ("fp32", "bf16")
OLD_BF16 = ("bfp16", "bfloat16")

# Owned by the recipe: "auto" in the JSON, or the same value.
OWNED = {
    "train_batch_size": "batch_tokens",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "batch_tokens and micro_batch",
    "gradient_clipping": "optim.clip",
    "bf16.enabled": "precision",
}

# Classes of the decoder with several weights inside and one tensor as result: what can be gathered
# in one go.
LEAF_CLASSES = ("Block", "Attention", "MLP")

KEYS: dict[str, Key] = {
    "train_batch_size": Key(int, "sequences per step over all ranks", low=1),
    "train_micro_batch_size_per_gpu": Key(int, "sequences per rank and pass", low=1),
    "gradient_accumulation_steps": Key(int, "passes per step and rank", low=1),
    "gradient_clipping": Key(float, "largest global gradient norm; 0 = none", low=0),
    "communication_data_type": Key(str, "type in which gradients are reduced", choices=DTYPES),
    "prescale_gradients": Key(bool, "divide gradients before the reduction, not after"),
    "gradient_predivide_factor": Key(
        float, "part of the division done before it", low=1, high=2**20
    ),
    "disable_python_gc": Key(bool, "no garbage collection while stepping"),
    "memory_breakdown": Key(bool, "print memory before and after each pass and step"),
    "log_level": Key(str, "DeepSpeed's log level", choices=("debug", "info", "warning", "error")),
    "bf16.enabled": Key(bool, "bf16 weights"),
    "bf16.immediate_grad_update": Key(
        bool, "add each gradient to the fp32 sum at once and free it", readers=(BF16,)
    ),
    "data_types.grad_accum_dtype": Key(str, "type in which gradients are summed", choices=DTYPES),
    "pipeline.pipe_partitioned": Key(bool, "shard activations over tensor ranks when sent"),
    "pipeline.grad_partitioned": Key(bool, "shard their gradients likewise"),
    "zero_optimization.stage": Key(int, "sharded: 1 optimizer, 2 + gradients, 3 + weights"),
    "zero_optimization.contiguous_gradients": _zero(bool, "copy gradients into one buffer"),
    "zero_optimization.reduce_scatter": _zero(bool, "each rank receives only its part"),
    "zero_optimization.reduce_bucket_size": _zero(
        int, "gradients per reduction; memory is taken for all of them", low=1, high=10**10
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": _zero12(
        bool, "one all-reduce per bucket instead of one reduce per owner"
    ),
    "zero_optimization.allgather_bucket_size": Key(
        int, "weights per all-gather", low=1, readers=(ZERO_12, BF16)
    ),
    "zero_optimization.overlap_comm": _zero(bool, "reduce while backward goes on"),
    "zero_optimization.round_robin_gradients": _zero12(
        bool, "deal weights out to ranks in turn, so that copies to the host are spread"
    ),
    "zero_optimization.parameter_alignment": _zero12(
        bool, "pad so that each weight starts at 16 bytes"
    ),
    "zero_optimization.sub_group_size": _zero3(int, "weights stepped at a time"),
    "zero_optimization.stage3_prefetch_bucket_size": _zero3(int, "weights gathered ahead"),
    "zero_optimization.stage3_param_persistence_threshold": _zero3(
        int, "smaller weights stay gathered on every rank"
    ),
    "zero_optimization.stage3_model_persistence_threshold": _zero3(
        int, "at most so many weights stay gathered"
    ),
    "zero_optimization.stage3_max_live_parameters": _zero3(int, "gathered weights at a time"),
    "zero_optimization.stage3_max_reuse_distance": _zero3(
        int, "keep a weight that is used again within so many weights"
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _zero3(
        bool, "gather by all-reduce"
    ),
    "zero_optimization.stage3_allgather_sequential": _zero3(bool, "gather weights one by one"),
    "zero_optimization.leaf_module.classes": _zero3(
        list, "module classes gathered whole", choices=LEAF_CLASSES
    ),
    "zero_optimization.zero_hpz_partition_size": _zero3(
        int, "ranks that share a second copy", low=1
    ),
    "zero_optimization.zero_quantized_weights": _zero3(bool, "gather weights in 8 bits"),
    "zero_optimization.zero_quantized_gradients": _zero3(bool, "reduce gradients in 4 bits"),
    "zero_optimization.memory_efficient_linear": _zero3(bool, "DeepSpeed's own linear function"),
    "zero_optimization.log_trace_cache_warnings": _zero3(bool, "say when the order changes"),
    "zero_optimization.enable_sanity_checks": _zero3(bool, "DeepSpeed's internal checks"),
    "zero_optimization.offload_optimizer.device": Key(
        str, "where optimizer states live", choices=("none", "cpu"), readers=(ZERO_12, ZERO_3)
    ),
    "zero_optimization.offload_optimizer.pin_memory": _zero(bool, "page-locked host memory"),
    "zero_optimization.offload_param.device": _zero3(
        str, "where idle weights live", choices=("none", "cpu")
    ),
    "zero_optimization.offload_param.pin_memory": _zero3(bool, "page-locked host memory"),
}

# Always in the JSON with this one value.
FIXED: dict[str, tuple[Any, str]] = {
    "steps_per_print": (None, "the console line is ours: log.every"),
    "wall_clock_breakdown": (False, "its timers block on every phase; metrics.jsonl has the split"),
    "timers.throughput.enabled": (False, "it synchronises the device; tokens/s is ours"),
    "zero_force_ds_cpu_optimizer": (False, "the optimizer is torch's AdamW, offloaded or not"),
}

# The same with parallel.pipeline above 1.
WHOLE = "a stage sends whole activations: DeepSpeed's shards need them equal on all tensor ranks"
FIXED_IN_PIPELINE: dict[str, tuple[Any, str]] = {
    "pipeline.pipe_partitioned": (False, WHOLE),
    "pipeline.grad_partitioned": (False, WHOLE),
    "zero_optimization.overlap_comm": (
        False,
        "DeepSpeed switches it off in a pipeline, which reduces once, after its last pass",
    ),
}

OPTIMIZER = "the optimizer is ours; use optim.name, optim.lr, optim.weight_decay, ..."
MONITOR = "metrics are ours; use log.tensorboard or log.wandb"
NO_PROFILER = "it has no part in this loop; metrics.jsonl has MFU and the split of each step"
CHECKPOINTS = "DeepSpeed's checkpoints are not used here, so it has no effect"
REMOVED = "DeepSpeed 0.19.8 has removed it"
IGNORED = "DeepSpeed 0.19.8 parses and ignores it"
NVME = (
    "NVMe offload is not offered: checkpoints read weights and optimizer states in memory; use"
    " device=cpu"
)

# Key or block -> why it is refused and what to use.
REFUSED: dict[str, str] = {
    "optimizer": OPTIMIZER,
    "scheduler": "the learning rate is ours; use optim.schedule, optim.lr and warmup",
    "fp16": FP16,
    "bfloat16": "it is the old name of bf16; use precision=bf16",
    "torch_autocast": "weights are kept in the training dtype; use precision",
    "bf16.bf16_master_weights_and_grads": "master weights are fp32 here; precision=bf16 has both",
    "bf16.bf16_optimizer_states": "moments are fp32 here",
    "bf16.check_grad_overflow": (
        "a step whose gradients are not finite is skipped in every layout; see health.max_skips"
    ),
    "data_types.param_dtype": "it is owned by precision",
    "data_types.buffer_dtype": "the model chooses the type of its buffers",
    "data_types.keep_in_fp32_modules": "the model chooses the type of its buffers",
    "activation_checkpointing": "nothing here uses it, so it has no effect; use recompute=full",
    "pipeline.activation_checkpoint_interval": "use recompute=full or every-K",
    "pipeline.use_reentrant": "stages recompute their blocks themselves; use recompute=full",
    "pipeline.stages": f"{IGNORED}; use parallel.pipeline",
    "pipeline.partition": f"{IGNORED}; use parallel.bounds",
    "pipeline.seed_layers": f"{IGNORED}; weights are seeded by name",
    "tensorboard": MONITOR,
    "wandb": MONITOR,
    "csv_monitor": MONITOR,
    "comet": MONITOR,
    "monitor_config": MONITOR,
    "flops_profiler": NO_PROFILER,
    "autotuning": "it starts runs of its own; try layouts with make show",
    "timers": "it synchronises the device; tokens/s is ours",
    "comms_logger": (
        "nothing here prints what it collects, and it blocks on every collective; metrics.jsonl"
        " has the split of each step"
    ),
    "dump_state": "ds_config.json in the run folder has every setting, and make show prints them",
    "aio": NVME,
    "checkpoint": CHECKPOINTS,
    "datastates": CHECKPOINTS,
    "zero_optimization.load_from_fp32_weights": CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": CHECKPOINTS,
    "zero_optimization.legacy_stage1": IGNORED,
    "zero_optimization.allgather_partitions": IGNORED,
    "zero_optimization.ignore_unused_parameters": (
        "every weight of the decoder gets a gradient, so it has no effect"
    ),
    "zero_optimization.override_module_apply": (
        "weights are filled one by one, not by Module.apply, so it has no effect"
    ),
    "zero_optimization.stage3_module_granularity_threshold": (
        "it may take the whole model, which then fails in its first step; use"
        " zero_optimization.leaf_module.classes"
    ),
    "zero_optimization.leaf_module.names": "blocks are alike; use leaf_module.classes",
    "zero_optimization.leaf_module.name_suffixes": "blocks are alike; use leaf_module.classes",
    "zero_optimization.compute_grad_norm": "the gradient norm is needed to clip and to log",
    "zero_optimization.zenflow": "it steps weights at other times, so the run would be another one",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "there is no Muon here",
    "zero_optimization.zero_quantized_nontrainable_weights": "every weight is trained here",
    "zero_optimization.offload_optimizer.ratio": (
        "a second optimizer would step its GPU part, out of reach of our learning rate"
    ),
    "zero_optimization.offload_optimizer.super_offload": "it needs DeepSpeed's own optimizer",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "it needs DeepSpeed's own optimizer",
    "zero_optimization.offload_optimizer.nvme_path": NVME,
    "zero_optimization.offload_optimizer.buffer_count": NVME,
    "zero_optimization.offload_optimizer.pipeline_read": NVME,
    "zero_optimization.offload_optimizer.pipeline_write": NVME,
    "zero_optimization.offload_optimizer.fast_init": NVME,
    "zero_optimization.offload_param.nvme_path": NVME,
    "zero_optimization.offload_param.buffer_count": NVME,
    "zero_optimization.offload_param.buffer_size": NVME,
    "zero_optimization.offload_param.max_in_cpu": NVME,
    "zero_optimization.cpu_offload": "old name; use zero_optimization.offload_optimizer.device=cpu",
    "zero_optimization.cpu_offload_param": "old name; use zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_use_pin_memory": (
        "old name; use zero_optimization.offload_optimizer.pin_memory"
    ),
    "zero_allow_untested_optimizer": "it is set from optim.name",
    "managed_gradient_accumulation": "the loop marks the end of each accumulation itself",
    "gradient_allreduce_op": "the loss is scaled for a mean over ranks",
    "dataloader_drop_last": "the loader is ours, so it has no effect",
    "data_efficiency": "the order of data is ours, so it has no effect",
    "disable_allgather": IGNORED,
    "seq_parallel_communication_data_type": "no DeepSpeed sequence parallelism here",
    "sequence_parallel_size": "use parallel.context",
    "tensor_parallel": "tensor parallelism is ours; use parallel.tensor",
    "expert_parallel": "there are no experts here",
    "use_data_before_expert_parallelism": "there are no experts here",
    "compile": "blocks are compiled by torch; use compile=true",
    "hybrid_engine": "it serves generation; it has no effect here",
    "weight_quantization": "it serves inference; it has no effect here",
    "vocabulary_size": "DeepSpeed only warns by it; use model.vocab_size",
    "elasticity": f"{REMOVED}; a run may change its number of ranks without it (WORLD or NPROC)",
    "nebula": f"{REMOVED}; checkpoints are ours",
    "amp": f"{REMOVED}; use precision=bf16",
    "curriculum_learning": f"{REMOVED}; the order of data is ours",
    "progressive_layer_drop": f"{REMOVED}; every block runs",
    "sparse_gradients": f"{REMOVED}; gradients are dense",
    "compression_training": f"{REMOVED}; there is no compression here",
    "quantize_training": f"{REMOVED}; there is no quantisation here",
    "eigenvalue": f"{REMOVED}; there is no quantisation here",
    "sparse_attention": f"{REMOVED}; use data.attend=within",
    "graph_harvesting": f"{REMOVED}; use compile=true",
    "zero_optimization.mics_shard_size": (
        f"{REMOVED}; use zero_optimization.zero_hpz_partition_size"
    ),
    "zero_optimization.mics_hierarchical_params_gather": (
        f"{REMOVED}; use zero_optimization.zero_hpz_partition_size"
    ),
    "zero_optimization.zeropp_loco_param": f"{REMOVED}; use zero_quantized_gradients alone",
}

# Refused keys that public files carry switched off: false or null is what holds here anyway.
OFF = {
    *(f"activation_checkpointing.{name}" for name in (
        "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "profile",
        "number_checkpoints", "synchronize_checkpoint_boundary",
    )),
    *(f"zero_optimization.{name}" for name in (
        "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "legacy_stage1", "zero_quantized_nontrainable_weights",
    )),
    "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "compile.deepcompile",
    "disable_allgather", "dump_state", "sparse_gradients",
}  # fmt: skip

# A bare number or `true` where DeepSpeed once took a stage.
NO_STAGE = f"zero_optimization.stage must be 1, 2 or 3. {STAGE_0}"


def refusal(path: str) -> tuple[str, str] | None:
    """(key or block that is refused, why and what to use instead) for a dotted path, or None."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        block = ".".join(parts[:end])
        if block in REFUSED:
            return block, REFUSED[block]
    return None
