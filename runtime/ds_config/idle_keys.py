"""Keys of a DeepSpeed file that change nothing here: left out, with one line that names them.

    leaves of preset and `ds.*` -> the leaves that count, and a warning for the rest

Files of other trainers carry keys for an optimizer, for logging or for another ZeRO stage. Rule: a
key is left out only where the run without it trains the same weights with the same data; a key that
asks for another training (another precision, another optimizer, quantised weights) is refused. A
`ds.*` override is typed for this run, so its idle keys are refused unless they say what holds
anyway. No torch, no deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from base.values import as_written
from recipes.schema import Optim, Recipe
from runtime.ds_config.key_rules import (
    OFFLOAD,
    OFFLOAD_PARAM,
    QUANTIZED,
    ZERO,
    Leaves,
    equal,
    is_override,
)
from runtime.ds_config.keys import FIXED, KEYS, REFUSED

# Key or block of a file -> what decides instead.
IDLE = {
    "steps_per_print": "log.every",
    "wall_clock_breakdown": "metrics.jsonl has the split of each step",
    "zero_allow_untested_optimizer": "optim.name",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's",
    "activation_checkpointing": "recompute",
    "flops_profiler": "log.profile; metrics.jsonl has MFU",
    "comms_logger": "log.communication",
    "comms_config": "log.communication",
    "monitor_config": "log.tensorboard, log.wandb",
    "tensorboard": "log.tensorboard",
    "wandb": "log.wandb",
    "csv_monitor": "metrics.jsonl",
    "comet": "log.tensorboard, log.wandb",
    "dump_state": "ds_config.json in the run folder",
    "timers": "metrics.jsonl has the split of each step",
    "low_cpu_mem_usage": "a key of Transformers",
    "seed": "seed",
    "num_gpus": "NPROC",
    "monitoring": "log.tensorboard, log.wandb",
    "zero3_init_flag": "a key of Accelerate",
    "zero3_save_16bit_model": "a key of Accelerate",
    "aio": "settings of NVMe offload, which is not used",
    "checkpoint": "checkpoints are ours",
    f"{ZERO}.allgather_partitions": "DeepSpeed ignores it",
    f"{ZERO}.legacy_stage1": "DeepSpeed ignores it",
    f"{ZERO}.ignore_unused_parameters": "every weight gets a gradient",
    f"{ZERO}.load_from_fp32_weights": "checkpoints are ours",
    f"{ZERO}.elastic_checkpoint": "checkpoints are ours",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": "make export",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": "make export",
    f"{ZERO}.zero_quantized_nontrainable_weights": "every weight is trained",
    **{
        f"{ZERO}.offload_{kind}.{name}": "a setting of NVMe offload, which is not used"
        for kind, names in (
            ("optimizer", ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write")),
            ("param", ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")),
        )
        for name in names
    },
    f"{ZERO}.offload_optimizer.fast_init": "a setting of DeepSpeed's own optimizer",
}
# Blocks whose "enabled" asks for something: left out where it is absent, false or "auto".
SWITCHED = ("fp16", "amp")
# Names of optimizers that train as the recipe's does: DeepSpeed's Adam decays weights as AdamW.
SAME_OPTIMIZER = {"adamw": ("adam", "adamw", "fusedadam", "cpuadam"), "sgd": ("sgd",)}

# Options of these optimizers in torch and DeepSpeed; another name is a slip.
OPTIONS = (
    "lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "adam_w_mode",
    "torch_adam", "fused", "foreach", "maximize", "capturable", "differentiable", "momentum",
    "dampening", "nesterov", "set_grad_none", "fp32_optimizer_states",
)  # fmt: skip
PARAMS = "optimizer.params."

# DeepSpeed's defaults of keys that ask for something: with these values they ask for nothing.
NEUTRAL = {
    OFFLOAD: "none",
    OFFLOAD_PARAM: "none",
    f"{ZERO}.offload_optimizer.pin_memory": False,
    f"{ZERO}.offload_param.pin_memory": False,
    f"{ZERO}.zero_hpz_partition_size": 1,
    f"{ZERO}.zero_quantized_weights": False,
    f"{ZERO}.zero_quantized_gradients": False,
    f"{ZERO}.mics_shard_size": -1,
    f"{ZERO}.mics_hierarchical_params_gather": False,
    "tensor_parallel.autotp_size": 1,
}
# Keys that ask for another way to hold or to send weights. All other keys of zero_optimization
# change speed and buffers alone: in a file for another stage they are only reported.
ASKS = frozenset(
    {OFFLOAD, OFFLOAD_PARAM, f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.stage", *QUANTIZED}
)
TUNING = frozenset(key for key in KEYS if key.startswith(f"{ZERO}.")) - ASKS
# Sizes at "auto" in files for the Transformers Trainer -> its rule (hidden size -> elements).
TRANSFORMERS_AUTO: dict[str, Callable[[int], int]] = {
    f"{ZERO}.reduce_bucket_size": lambda hidden: hidden * hidden,
    f"{ZERO}.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    f"{ZERO}.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def leave_out(leaves: Leaves, recipe: Recipe, stage: int) -> list[str]:
    """Remove the idle keys from `leaves`; returns one warning for those of the file, or none."""
    left_out: dict[str, str] = {}  # key or block -> what decides instead
    for key, (value, origin) in list(leaves.items()):
        if _is_neutral(key, value, stage):
            del leaves[key]
            continue
        if is_override(origin):
            continue
        is_default = value is None and (key in KEYS or key in IDLE or _is_block(key))
        # DeepSpeed takes "auto" in this block for its default; some sizes are filled as
        # Transformers does.
        is_default |= value == "auto" and key in TUNING - TRANSFORMERS_AUTO.keys()
        if is_default:
            del leaves[key]
            continue
        found = _idle(key, value, leaves, recipe, stage)
        if found:
            block, instead = found
            left_out.setdefault(block, instead)
    for key, (_, origin) in list(leaves.items()):
        is_left_out = any(key == block or key.startswith(f"{block}.") for block in left_out)
        if is_left_out and not is_override(origin) and not is_unknown_option(key):
            del leaves[key]
    if not left_out:
        return []
    listed = ", ".join(f"{key} ({instead})" for key, instead in left_out.items())
    return [f"zero={recipe.zero}: no effect here, and left out: {listed}"]


def is_unknown_option(key: str) -> bool:
    """True for an option of the optimizer that no optimizer here has: a misspelt one."""
    return key.startswith(PARAMS) and key.removeprefix(PARAMS).split(".")[0] not in OPTIONS


def _is_neutral(key: str, value: Any, stage: int) -> bool:
    """True where `key` has DeepSpeed's default and nothing reads it at this stage."""
    if key not in NEUTRAL or not equal(value, NEUTRAL[key]):
        return False
    return key not in KEYS or stage not in KEYS[key].stages


def _is_block(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in [*KEYS, *REFUSED])


def _idle(
    key: str, value: Any, leaves: Leaves, recipe: Recipe, stage: int
) -> tuple[str, str] | None:
    """(key or block to leave out, what decides instead) for a leaf of a file, or None."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        block = ".".join(parts[:end])
        if block in IDLE:
            is_fixed = block in FIXED and equal(value, FIXED[block][0])
            return None if is_fixed else (block, IDLE[block])
    block = parts[0]
    if block in SWITCHED and leaves.get(f"{block}.enabled", (False, ""))[0] in (False, "auto"):
        return block, "precision"
    if block == "optimizer":
        return _optimizer(leaves, recipe.optim)
    if block == "scheduler":
        return _scheduler(leaves, recipe.optim)
    if key in TUNING and stage not in KEYS[key].stages:
        readers = " and ".join(map(str, KEYS[key].stages))
        return key, f"read at stage {readers} only"
    return None


def _optimizer(leaves: Leaves, optim: Optim) -> tuple[str, str] | None:
    """The optimizer block, where it names the recipe's optimizer; with the values that differ."""
    kind = str(leaves.get("optimizer.type", (optim.name, ""))[0]).lower().replace("_", "")
    if kind not in SAME_OPTIMIZER.get(optim.name, ()):
        return None
    ours = {
        "lr": ("optim.lr", optim.lr),
        "betas": ("optim.beta1, optim.beta2", [optim.beta1, optim.beta2]),
        "eps": ("optim.eps", optim.eps),
        "weight_decay": ("optim.weight_decay", optim.weight_decay),
    }
    differ = []
    for name, (knob, value) in ours.items():
        given = leaves.get(f"optimizer.params.{name}", ("auto", ""))[0]
        if given != "auto" and not _same(given, value):
            differ.append(f"its {name}={as_written(given)} is not used: {knob}={as_written(value)}")
    return "optimizer", "; ".join(["optim.*", *differ])


def _scheduler(leaves: Leaves, optim: Optim) -> tuple[str, str]:
    """The scheduler block, with its type: the recipe has a schedule of its own."""
    kind = leaves.get("scheduler.type", (None, ""))[0]
    differ = f"; its type={kind} is not used: optim.schedule={optim.schedule}" if kind else ""
    return "scheduler", f"optim.schedule, optim.lr, warmup{differ}"


def _same(given: Any, value: Any) -> bool:
    if isinstance(value, list):
        return (
            isinstance(given, list)
            and len(given) == len(value)
            and all(equal(one, other) for one, other in zip(given, value, strict=True))
        )
    return equal(given, value)
