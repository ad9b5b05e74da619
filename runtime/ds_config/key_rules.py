"""Rules between the keys of a DeepSpeed JSON, and between it and the recipe.

    leaves (dotted key -> value, origin) x recipe -> problems, one line each

Rule: a value that nothing would read is refused or reported, never passed on without a word. A key
has no effect where the class that reads it is not built, or where another key switches it off. A
file serves several recipes, so rules that depend on the recipe hold for `ds.*` alone. No torch, no
deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from base.values import as_float, as_written
from model.cost import num_parameters
from recipes.schema import Recipe
from runtime.ds_config.keys import BF16, KEYS, ZERO_3, ZERO_12

ZERO = "zero_optimization"
ACCUM_DTYPE = "data_types.grad_accum_dtype"
COMM_DTYPE = "communication_data_type"
OFFLOAD = f"{ZERO}.offload_optimizer.device"
OFFLOAD_PARAM = f"{ZERO}.offload_param.device"
SCATTER = f"{ZERO}.reduce_scatter"
SEQUENTIAL = f"{ZERO}.stage3_allgather_sequential"
PRESCALE = "prescale_gradients"
QUANTIZED = (f"{ZERO}.zero_quantized_weights", f"{ZERO}.zero_quantized_gradients")
DEFAULT_BUCKET = 500_000_000  # DeepSpeed's own, also for models that are smaller
WAYS_TO_BF16 = "zero=1 or zero=pipeline, precision=bf16, gradients summed in fp32"

Leaves = dict[str, tuple[Any, str]]  # dotted key -> (value, where it came from)


@dataclass(frozen=True)
class Switch:
    """`dead` is not read, because of `reason`, where `is_off` holds for the value of `key`."""

    dead: str
    key: str
    default: Any  # the value of `key` where it is absent
    is_off: Callable[[Any], bool]
    reason: str


SWITCHES = (
    Switch(
        f"{ZERO}.offload_optimizer.pin_memory", OFFLOAD, "none", lambda device: device == "none",
        f"nothing is offloaded; set {OFFLOAD}=cpu, or remove it",
    ),
    Switch(
        f"{ZERO}.offload_param.pin_memory", OFFLOAD_PARAM, "none", lambda device: device == "none",
        f"nothing is offloaded; set {OFFLOAD_PARAM}=cpu, or remove it",
    ),
    Switch(
        f"{ZERO}.use_multi_rank_bucket_allreduce", SCATTER, True, lambda value: value is False,
        f"{SCATTER}=false sends whole buckets; remove one of them",
    ),
    Switch(
        f"{ZERO}.stage3_prefetch_bucket_size", SEQUENTIAL, False, lambda value: value is True,
        f"{SEQUENTIAL}=true gathers one weight at a time; remove one of them",
    ),
    Switch(
        "gradient_predivide_factor", PRESCALE, False, lambda value: value is True,
        f"{PRESCALE}=true divides at once; remove one of them",
    ),
)  # fmt: skip


def optimizer_class(stage: int, leaves: Leaves) -> str:
    """Name of the class that DeepSpeed wraps around the optimizer, by stage, precision, offload."""
    if stage == 3:
        return ZERO_3
    is_bf16 = value_of(leaves, "bf16.enabled", False)
    sums_in_fp32 = value_of(leaves, ACCUM_DTYPE, None) == "fp32"
    offloads = value_of(leaves, OFFLOAD, "none") != "none"
    return BF16 if stage == 1 and is_bf16 and sums_in_fp32 and not offloads else ZERO_12


def value_of(leaves: Leaves, key: str, default: Any) -> Any:
    """The value of a key, or `default` where it is absent."""
    return leaves.get(key, (default, ""))[0]


def named(key: str, origin: str) -> str:
    """A key with its origin, for messages."""
    return f"ds.{key}" if is_override(origin) else f"{key} ({origin})"


def shown(key: str, value: Any, origin: str) -> str:
    """A key with its value and origin, for messages."""
    written = as_written(value)
    return f"ds.{key}={written}" if is_override(origin) else f"{key}={written} ({origin})"


def is_override(origin: str) -> bool:
    """True for a value that `ds.*` set, False for one of a file."""
    return origin.startswith("ds.")


def problems_of(leaves: Leaves, recipe: Recipe, stage: int, data_size: int) -> list[str]:
    """Every broken rule, one line each; the values of `leaves` have the right types."""
    built = optimizer_class(stage, leaves)
    return [
        *_unread(leaves, stage, built),
        *_switched_off({key: leaf for key, leaf in leaves.items() if _is_read(key, built)}),
        *_pipeline(leaves, recipe, stage),
        *_cut(leaves, recipe, stage),
        *_division(leaves, stage, built),
        *_sizes(leaves, stage, data_size, num_parameters(recipe.model)),
        *_precision(leaves, recipe, stage),
    ]


def _is_read(key: str, built: str) -> bool:
    return key in KEYS and built in KEYS[key].readers


def _unread(leaves: Leaves, stage: int, built: str) -> list[str]:
    """Problems of keys whose readers are not built: at this stage, or in this run."""
    problems = []
    for key, (value, origin) in leaves.items():
        if key not in KEYS or _is_read(key, built):
            continue
        if stage not in KEYS[key].stages:
            stages = " or ".join(map(str, KEYS[key].stages))
            problems.append(
                f"{shown(key, value, origin)} has no effect at ZeRO stage {stage}: only {stages}"
                " reads it; remove it"
            )
        elif is_override(origin):
            reason = f"only {BF16} reads it ({WAYS_TO_BF16})"
            if built == BF16:
                reason = f"{BF16}, which this run builds ({WAYS_TO_BF16}), does not read it"
            problems.append(f"{shown(key, value, origin)} has no effect: {reason}; remove it")
    return problems


def _switched_off(leaves: Leaves) -> list[str]:
    """Problems of keys that another key switches off. An override may switch off a file's key."""
    problems = []
    for switch in SWITCHES:
        if switch.dead not in leaves or not switch.is_off(
            value_of(leaves, switch.key, switch.default)
        ):
            continue
        value, origin = leaves[switch.dead]
        by = leaves.get(switch.key, (None, origin))[1]
        if is_override(origin) or not is_override(by):
            problems.append(f"{shown(switch.dead, value, origin)} has no effect: {switch.reason}")
    return problems


def _pipeline(leaves: Leaves, recipe: Recipe, stage: int) -> list[str]:
    """Problems of the pipeline block without a pipeline, and of offload with one."""
    size = recipe.parallel.pipeline
    block = {key: leaf for key, leaf in leaves.items() if key.startswith("pipeline.")}
    problems = []
    if block and size == 1:
        if any(not is_override(origin) for _, origin in block.values()):
            problems.append(
                f"zero={recipe.zero} has a pipeline block, which has no effect with"
                f" parallel.pipeline=1; use zero={stage}, or set parallel.pipeline"
            )
        problems += [
            f"{shown(key, value, origin)} has no effect with parallel.pipeline=1; remove it, or"
            " set parallel.pipeline above 1"
            for key, (value, origin) in block.items()
            if is_override(origin)
        ]
    if size > 1 and value_of(leaves, OFFLOAD, "none") != "none":
        problems.append(
            f"{shown(OFFLOAD, *leaves[OFFLOAD])} with parallel.pipeline={size}: DeepSpeed 0.19.8"
            " drops the gradient of tied weights there; remove it, or use zero=pipeline"
        )
    return problems


def _cut(leaves: Leaves, recipe: Recipe, stage: int) -> list[str]:
    """Problems of ZeRO-3 with modules that are sharded over tensor or context ranks."""
    axes, problems = recipe.parallel, []
    if stage != 3 or axes.tensor * axes.context == 1:
        return problems
    where = f"parallel.tensor={axes.tensor}, parallel.context={axes.context}"
    key = f"{ZERO}.leaf_module.classes"
    classes, origin = leaves.get(key, ([], "absent"))
    if "Block" not in classes:
        problems.append(
            f"{shown(key, classes, origin)} with {where}: a sharded block uses several weights at"
            " a time, so ZeRO-3 must gather it whole; add Block"
        )
    key = f"{ZERO}.zero_hpz_partition_size"
    size, origin = leaves.get(key, (1, ""))
    if not equal(size, 1):
        problems.append(
            f"{shown(key, size, origin)} with {where}: DeepSpeed makes the groups of its second"
            " copy over all ranks, as if there were no other axis; remove it"
        )
    return problems


def _division(leaves: Leaves, stage: int, built: str) -> list[str]:
    """Problems of keys for the division of gradients, which reduce_scatter does not read."""
    problems = []
    reads = built == BF16 or value_of(leaves, SCATTER, True) is False
    for key, plain in ((PRESCALE, False), ("gradient_predivide_factor", 1)):
        value, origin = leaves.get(key, (plain, ""))
        if value != plain and not reads:
            problems.append(
                f"{shown(key, value, origin)}: ZeRO stage {stage} divides in its own way while"
                f" gradients are scattered; remove it, or set ds.{SCATTER}=false"
            )
    key = f"{ZERO}.contiguous_gradients"
    if stage < 3 and value_of(leaves, OFFLOAD, "none") != "none":
        value, origin = leaves.get(key, (True, ""))
        if value is False:
            problems.append(
                f"{shown(key, value, origin)} has no effect: offload needs the buffer; remove it"
            )
    return problems


def _sizes(leaves: Leaves, stage: int, data_size: int, parameters: int) -> list[str]:
    """Problems of sizes: too large, odd, or not a divisor of the number of ranks."""
    problems = []
    key, most = f"{ZERO}.reduce_bucket_size", max(parameters, DEFAULT_BUCKET)
    bucket, origin = leaves.get(key, (1, ""))
    if isinstance(bucket, int) and bucket > most:
        problems.append(
            f"{shown(key, bucket, origin)} is more than the {parameters:,} gradients of the model,"
            f" and every rank takes memory for all of it; at most {most}"
        )
    key = f"{ZERO}.allgather_bucket_size"
    bucket, origin = leaves.get(key, (2, ""))
    if isinstance(bucket, int) and bucket % 2:
        problems.append(
            f"{shown(key, bucket, origin)} must be even at ZeRO stage {stage}; nearest:"
            f" {bucket + 1}"
        )
    key = f"{ZERO}.zero_hpz_partition_size"
    ranks, origin = leaves.get(key, (1, ""))
    if isinstance(ranks, int) and data_size % ranks:
        legal = [str(n) for n in range(1, min(data_size, 64) + 1) if data_size % n == 0]
        problems.append(
            f"{shown(key, ranks, origin)} does not divide the {data_size} data-parallel ranks;"
            f" legal: {', '.join(legal)}"
        )
    return problems


def _precision(leaves: Leaves, recipe: Recipe, stage: int) -> list[str]:
    """Problems with precision=fp32, the reference: nothing in it is rounded to fewer bits."""
    problems = [
        f"{shown(key, True, leaves[key][1])} rounds what is sent, and precision=fp32 is the exact"
        " reference; use precision=bf16, or remove it"
        for key in QUANTIZED
        if stage == 3 and recipe.precision == "fp32" and value_of(leaves, key, False) is True
    ]
    return problems + [
        f"{shown(key, 'bf16', leaves[key][1])} contradicts precision=fp32, the reference;"
        " use precision=bf16"
        for key in (ACCUM_DTYPE, COMM_DTYPE)
        if recipe.precision == "fp32" and value_of(leaves, key, "fp32") == "bf16"
    ]


def kernel_problems(config: dict[str, Any], device: str) -> list[str]:
    """Problems of a resolved JSON that asks for kernels which `device` (cpu, cuda) lacks.

    ZeRO++ on the CPU: one of these keys fails at the start and the other in the first backward.
    """
    if device == "cuda":
        return []
    block = config["zero_optimization"]
    return [
        f"ds.{key}=true: its kernels exist for CUDA only, and this run is on {device}; remove it"
        for key in QUANTIZED
        if block.get(key.removeprefix(f"{ZERO}."))
    ]


def equal(given: Any, value: Any) -> bool:
    """True where both are equal, as numbers if they are numbers: "8" is 8, but true is not 1."""
    if isinstance(value, bool) or isinstance(given, bool):
        return given is value
    try:
        return as_float(given) == as_float(value)
    except ValueError:
        return given == value
