"""The DeepSpeed JSON of a run: a preset from ds_configs/, `ds.*` on top, the rest from the recipe.

    ds_configs/zero1.json  <-  ds.a.b=value  <-  "auto" and absent keys: recipe and layout

One rule: each value has one owner. A key that the recipe owns may be "auto" or equal, never another
value; what nobody fills is refused; the result is plain JSON with exact numbers and holds every key
whose default DeepSpeed has changed before. No torch, no deepspeed. Units: sequences, elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.schema import Recipe, UserError, as_float, as_int, did_you_mean
from runtime import strict_json
from runtime.engine_keys import FIXED, FIXED_IN_PIPELINE, KEYS, NO_STAGE, OWNED, refusal

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ROOT / "ds_configs"
AUTO = "auto"
STAGE = "zero_optimization.stage"
ACCUM_DTYPE = "data_types.grad_accum_dtype"
IMMEDIATE = "bf16.immediate_grad_update"
OFFLOAD = "zero_optimization.offload_optimizer.device"

Leaves = dict[str, tuple[Any, str]]  # dotted key -> (value, where it came from)
Fixed = dict[str, tuple[Any, str]]  # dotted key -> (the one value, why)


@dataclass(frozen=True)
class Preset:
    """One file of ds_configs/ (or elsewhere), as written."""

    shown: str  # its name in messages, relative to the repository where it is inside
    json: dict[str, Any]
    stage: int


@dataclass(frozen=True)
class EngineConfig:
    """What the engine gets: fully resolved JSON, and the origin of each dotted key."""

    json: dict[str, Any]
    origins: dict[str, str]
    stage: int

    @property
    def grad_dtype(self) -> str:
        """Type in which gradients are summed: fp32 or bf16."""
        return self.json["data_types"]["grad_accum_dtype"]

    @property
    def is_immediate(self) -> bool:
        """Whether BF16_Optimizer frees each 16-bit gradient as it is produced."""
        return self.json["bf16"].get("immediate_grad_update", False)

    @property
    def is_offloaded(self) -> bool:
        """Whether optimizer states live outside the device."""
        block = self.json["zero_optimization"].get("offload_optimizer", {})
        return block.get("device", "none") != "none"

    @property
    def optimizer_class(self) -> str:
        """Name of the class that DeepSpeed wraps around the optimizer."""
        if self.stage == 3:
            return "DeepSpeedZeroOptimizer_Stage3"
        is_bf16 = self.json["bf16"]["enabled"]
        if self.stage == 1 and is_bf16 and self.grad_dtype == "fp32" and not self.is_offloaded:
            return "BF16_Optimizer"
        return "DeepSpeedZeroOptimizer"


def load_preset(zero: int | str) -> Preset:
    """The preset that `zero` names: 1, 2, 3, a name in ds_configs/, or the path of a .json file.

    A path (it has a slash or ends in .json) is relative to the repository, wherever the command was
    started. Raises UserError.
    """
    name = f"zero{zero}" if isinstance(zero, int) else zero
    if "/" in name or name.endswith(".json"):
        path = (ROOT / name).resolve()
        if not path.is_file():
            raise UserError(
                f"zero={zero}: there is no file {path} (paths are relative to the repository)"
            )
    else:
        path = PRESETS / f"{name}.json"
        known = preset_names()
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(
                f"zero={zero}: there is no file {path}{near} There are: {', '.join(known)}"
            )
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    content = strict_json.read(path, shown)
    block = content.get("zero_optimization")
    stage = block.get("stage") if isinstance(block, dict) else None
    try:
        number = as_int(stage)
    except ValueError:
        number = 0
    if number not in (1, 2, 3):
        raise UserError(f"{shown}: zero_optimization.stage={stage!r}: {NO_STAGE}")
    return Preset(shown, content, number)


def preset_names() -> list[str]:
    """Names of the files in ds_configs/."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def engine_config(
    recipe: Recipe, *, data_size: int, accumulation: int, accumulates: bool
) -> EngineConfig:
    """The JSON for `recipe` on `data_size` data-parallel ranks.

    `accumulation` is the number of micro-batches per rank of the first step; `accumulates` says
    whether any step has more than one, which decides the type that gradients are summed in. Raises
    UserError with every problem.
    """
    preset = load_preset(recipe.zero)
    leaves, problems = _merge(preset, recipe.ds)
    _fill_owned(leaves, problems, recipe, data_size, accumulation)
    fixed = FIXED | FIXED_IN_PIPELINE if recipe.parallel.pipeline > 1 else FIXED
    _fill_derived(leaves, recipe, accumulates, fixed)
    problems += _check_leaves(leaves, preset.stage, fixed)
    problems += _check_together(leaves, recipe, preset)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    if recipe.optim.name != "adamw":
        leaves["zero_allow_untested_optimizer"] = (True, "recipe: optim.name")
    return EngineConfig(
        json=_nested({key: value for key, (value, _) in leaves.items()}),
        origins={key: origin for key, (_, origin) in leaves.items()},
        stage=preset.stage,
    )


def _merge(preset: Preset, ds: dict[str, Any]) -> tuple[Leaves, list[str]]:
    """Preset and `ds.*` as flat leaves; null for a block removes it."""
    leaves: Leaves = {key: (value, preset.shown) for key, value in _flat(preset.json)}
    problems = []
    for key, value in _flat(ds):
        origin = f"ds.{key}"
        if key == STAGE and value != AUTO and not _equal(value, preset.stage):
            instead = NO_STAGE if _equal(value, 0) else f"set zero={value} instead"
            problems.append(
                f"{origin}={value!r} contradicts {preset.shown}, stage {preset.stage}; {instead}"
            )
            continue
        if value is None and is_part_of(STAGE, key):
            problems.append(f"{origin}=null would remove the ZeRO stage; choose one with zero=")
            continue
        inside = [name for name in leaves if name.startswith(f"{key}.")]
        for name in inside:
            del leaves[name]
        if not (inside and value is None):
            leaves[key] = (value, origin)
    return leaves, problems


def is_part_of(key: str, block: str) -> bool:
    """Whether dotted `key` is `block` or lies in it."""
    return key == block or key.startswith(f"{block}.")


def _fill_owned(
    leaves: Leaves, problems: list[str], recipe: Recipe, data_size: int, accumulation: int
) -> None:
    """Values that the recipe owns; anything but "auto" or the same value is a contradiction."""
    batch = f"layout: {data_size} data ranks x micro_batch {recipe.micro_batch} x {accumulation}"
    passes = "layout: batch_tokens / (data ranks x micro_batch x seq_len)"
    values = {
        "train_batch_size": (data_size * recipe.micro_batch * accumulation, batch),
        "train_micro_batch_size_per_gpu": (recipe.micro_batch, "recipe: micro_batch"),
        "gradient_accumulation_steps": (accumulation, passes),
        "gradient_clipping": (recipe.optim.clip, "recipe: optim.clip"),
        "bf16.enabled": (recipe.precision == "bf16", "recipe: precision"),
    }
    assert values.keys() == OWNED.keys()
    for key, (value, origin) in values.items():
        given, where = leaves.get(key, (AUTO, ""))
        if given != AUTO and not _equal(given, value):
            problems.append(
                f"{_shown(key, given, where)} contradicts {value} ({origin}); the recipe owns it"
                f' ({OWNED[key]}): remove it, or set it to "auto"'
            )
        leaves[key] = (value, origin)


def _fill_derived(leaves: Leaves, recipe: Recipe, accumulates: bool, fixed: Fixed) -> None:
    """Keys that follow from the recipe unless they are set, and keys with one legal value."""
    sums = recipe.precision == "fp32" or accumulates or recipe.parallel.pipeline > 1
    reason = "precision" if recipe.precision == "fp32" else "accumulation"
    dtype = ("fp32" if sums else "bf16", f"recipe: {reason if sums else 'no accumulation'}")
    if leaves.get(ACCUM_DTYPE, (AUTO, ""))[0] == AUTO:
        leaves[ACCUM_DTYPE] = dtype
    if leaves.get("communication_data_type", (AUTO, ""))[0] == AUTO:
        leaves["communication_data_type"] = (leaves[ACCUM_DTYPE][0], "as data_types")
    for key, (value, reason) in fixed.items():
        if leaves.get(key, (AUTO, ""))[0] == AUTO:
            leaves[key] = (value, f"always: {reason}")


def _check_leaves(leaves: Leaves, stage: int, fixed: Fixed) -> list[str]:
    """Each key known, of its type, in its range and read by this stage; normalises numbers."""
    problems, autos = [], []
    for key, (value, origin) in leaves.items():
        shown = _shown(key, value, origin)
        refused = refusal(key)
        if key in fixed:
            if value != fixed[key][0]:
                problems.append(f"{shown}: {fixed[key][1]}; remove it")
        elif refused:
            block, reason = refused
            problems.append(f"{shown if block == key else _named(block, origin)}: {reason}")
        elif key not in KEYS:
            problems.append(_unknown(key, origin))
        elif value == AUTO:
            autos.append(_named(key, origin))
        elif stage not in KEYS[key].only:
            stages = " or ".join(map(str, KEYS[key].only))
            problems.append(f"{shown} has no effect at ZeRO stage {stage}: only {stages} reads it")
        else:
            try:
                leaves[key] = (_typed(key, value), origin)
            except ValueError as error:
                problems.append(f"{shown} {error}: {KEYS[key].meaning}")
    if autos:
        problems.append(f'still at "auto", which nothing here fills: {", ".join(autos)}; set each')
    return problems


def _named(key: str, origin: str) -> str:
    return f"ds.{key}" if origin.startswith("ds.") else f"{key} ({origin})"


def _shown(key: str, value: Any, origin: str) -> str:
    return f"ds.{key}={value!r}" if origin.startswith("ds.") else f"{key}={value!r} ({origin})"


def _unknown(key: str, origin: str) -> str:
    """The message for a key that is in no list, with the nearest one."""
    inside = [name.removeprefix(f"{key}.") for name in KEYS if name.startswith(f"{key}.")]
    if inside:
        return f"{_named(key, origin)} is a block; its keys: {', '.join(inside)}"
    blocks = {".".join(name.split(".")[:n]) for name in KEYS for n in range(1, name.count(".") + 1)}
    parent = key.rpartition(".")[0]
    if parent and parent not in blocks:  # the block is misspelt, not the key in it
        return f"{_named(parent, origin)}: no such block{did_you_mean(parent, blocks)}"
    return f"{_named(key, origin)}: no such key{did_you_mean(key, [*KEYS, *blocks])}"


def _typed(key: str, value: Any) -> Any:
    """The value in the key's type. Raises ValueError with the reason."""
    rule = KEYS[key]
    if rule.kind is int:
        value = as_int(value)
    elif rule.kind is float:
        value = as_float(value)
    elif not isinstance(value, rule.kind):
        wanted = {bool: "true or false", str: "text", list: "a list"}[rule.kind]
        raise ValueError(f"is not {wanted}")
    if rule.choices and value not in rule.choices:
        raise ValueError(f"is not one of {', '.join(map(str, rule.choices))}")
    if rule.low is not None and value < rule.low:
        raise ValueError(f"must be at least {rule.low}")
    return value


def _check_together(leaves: Leaves, recipe: Recipe, preset: Preset) -> list[str]:
    """Rules between keys, and between the JSON and the recipe."""
    problems = []
    has_pipeline = any(key.startswith("pipeline.") for key in leaves)
    if has_pipeline and recipe.parallel.pipeline == 1:
        problems.append(
            f"zero={recipe.zero} has a pipeline block, which has no effect with"
            f" parallel.pipeline=1; use zero={preset.stage}, or set parallel.pipeline"
        )
    offloads = leaves.get(OFFLOAD, ("none", ""))[0] != "none"
    if offloads and recipe.parallel.pipeline > 1:
        problems.append(
            f"{OFFLOAD} with parallel.pipeline={recipe.parallel.pipeline}: DeepSpeed 0.19.8 drops"
            " the gradient of tied weights there; use zero=pipeline"
        )
    problems += _check_cut(leaves, recipe, preset)
    bucket, origin = leaves.get("zero_optimization.allgather_bucket_size", (2, ""))
    if preset.stage in (1, 2) and isinstance(bucket, int) and bucket % 2:
        problems.append(
            f"{_shown('zero_optimization.allgather_bucket_size', bucket, origin)} must be even at"
            f" ZeRO stage {preset.stage}; nearest: {bucket + 1}"
        )
    if preset.stage == 2:
        for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
            value, origin = leaves.get(key, (plain, ""))
            if value != plain:
                problems.append(
                    f"{_shown(key, value, origin)}: ZeRO stage 2 divides after the reduction;"
                    " remove it, or use zero=1"
                )
    for key in (ACCUM_DTYPE, "communication_data_type"):
        if recipe.precision == "fp32" and leaves[key][0] == "bf16":
            problems.append(
                f"{_shown(key, 'bf16', leaves[key][1])} contradicts precision=fp32, the reference;"
                " use precision=bf16"
            )
    return problems


def _check_cut(leaves: Leaves, recipe: Recipe, preset: Preset) -> list[str]:
    """Rules between the JSON and modules that are cut over ranks."""
    axes, problems = recipe.parallel, []
    if preset.stage != 3 or axes.tensor * axes.context == 1:
        return problems
    key = "zero_optimization.leaf_module.classes"
    classes, origin = leaves.get(key, ([], preset.shown))
    if "Block" not in classes:
        problems.append(
            f"{_shown(key, classes, origin)} with parallel.tensor={axes.tensor}, parallel.context="
            f"{axes.context}: a cut block uses several weights at a time, so ZeRO-3 must gather it"
            " whole; add Block"
        )
    key = "zero_optimization.zero_hpz_partition_size"
    size, origin = leaves.get(key, (1, ""))
    if not _equal(size, 1):
        problems.append(
            f"{_shown(key, size, origin)} with parallel.tensor={axes.tensor}, parallel.context="
            f"{axes.context}: DeepSpeed makes the groups of its second copy over all ranks, as if"
            " there were no other axis; remove it"
        )
    return problems


def _equal(given: Any, value: Any) -> bool:
    """Equal as numbers where they are numbers: text "8" is 8, but true is not 1."""
    if isinstance(value, bool) or isinstance(given, bool):
        return given is value
    try:
        return as_float(given) == as_float(value)
    except ValueError:
        return given == value


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty block has none."""
    leaves = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves += _flat(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return leaves


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *blocks, last = path.split(".")
        node = tree
        for block in blocks:
            node = node.setdefault(block, {})
        node[last] = value
    return tree
