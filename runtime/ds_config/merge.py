"""The DeepSpeed JSON of a run: a preset from ds_configs/, `ds.*` on top, the rest from the recipe.

    ds_configs/zero1.json  <-  ds.a.b=value  <-  "auto" and absent keys: recipe and layout

Rule: each value has one owner. A key that the recipe owns may be "auto" or equal, never another
value; an "auto" that nothing fills is refused; the result is plain JSON with exact numbers and
holds every key whose default DeepSpeed has changed before. No torch, no deepspeed. Units:
sequences, elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from base import strict_json
from base.errors import UserError
from base.paths import ROOT
from base.values import as_float, as_int, as_written, did_you_mean
from recipes.schema import Recipe
from runtime.ds_config.idle_keys import (
    OPTIONS,
    PARAMS,
    TRANSFORMERS_AUTO,
    is_unknown_option,
    leave_out,
)
from runtime.ds_config.key_rules import (
    ACCUM_DTYPE,
    COMM_DTYPE,
    OFFLOAD,
    OFFLOAD_PARAM,
    ZERO,
    Leaves,
    equal,
    is_override,
    named,
    optimizer_class,
    problems_of,
    shown,
)
from runtime.ds_config.keys import (
    DTYPES,
    FIXED,
    FIXED_IN_PIPELINE,
    KEYS,
    NO_STAGE,
    NVME,
    OFF,
    OLD_BF16,
    OPTIMIZER,
    OWNED,
    REFUSED,
    refusal,
)

PRESETS = ROOT / "ds_configs"
AUTO = "auto"
STAGE = "zero_optimization.stage"
DEVICES = (OFFLOAD, OFFLOAD_PARAM)

Fixed = dict[str, tuple[Any, str]]  # dotted key -> (the one value, why)


@dataclass(frozen=True)
class Preset:
    """One file of ds_configs/ (or elsewhere), as written."""

    shown: str  # its name in messages, relative to the repository where it is inside
    json: dict[str, Any]
    stage: int


@dataclass(frozen=True)
class EngineConfig:
    """The fully resolved JSON that the engine gets, and the origin of each dotted key."""

    json: dict[str, Any]
    origins: dict[str, str]
    stage: int
    optimizer_class: str  # the class that DeepSpeed wraps around the optimizer
    notes: tuple[str, ...] = ()  # warnings about keys of the file that have no effect here

    @property
    def grad_dtype(self) -> str:
        """Type in which gradients are summed: fp32 or bf16."""
        return self.json["data_types"]["grad_accum_dtype"]

    @property
    def is_immediate(self) -> bool:
        """True where BF16_Optimizer frees each 16-bit gradient at once."""
        return self.json["bf16"].get("immediate_grad_update", False)

    @property
    def is_offloaded(self) -> bool:
        """True where optimizer states are in host memory."""
        block = self.json["zero_optimization"].get("offload_optimizer", {})
        return block.get("device", "none") != "none"


def load_preset(zero: int | str) -> Preset:
    """The preset that `zero` names, see `read_preset`, with its ZeRO stage. Raises UserError."""
    shown, content = read_preset(zero)
    block = content.get("zero_optimization")
    stage = block.get("stage") if isinstance(block, dict) else None
    try:
        number = as_int(stage)
    except ValueError:
        number = 0
    if number not in (1, 2, 3):
        raise UserError(f"{shown}: zero_optimization.stage={as_written(stage)}: {NO_STAGE}")
    return Preset(shown, content, number)


def read_preset(zero: int | str) -> tuple[str, dict[str, Any]]:
    """(name for messages, content) of a preset: 1, 2, 3, a name in ds_configs/, or a .json file.

    A path (it has a slash or ends in .json) is relative to the repository, wherever the command was
    started. Raises UserError.
    """
    name = f"zero{zero}" if isinstance(zero, int) else zero
    if "/" in name or name.endswith(".json"):
        try:
            path = (ROOT / name).resolve()
            is_there = path.is_file()
        except (OSError, RuntimeError):  # too long, a loop of links
            path, is_there = ROOT / name, False
        if not is_there:
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
    return shown, strict_json.read(path, shown)


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
    problems = [*_misshapen(preset.json, preset.shown), *_misshapen(recipe.ds, "ds.")]
    leaves = _merge(preset, recipe.ds, problems)
    _drop_idle(leaves)
    notes = leave_out(leaves, recipe, preset.stage)
    _fill_owned(leaves, problems, recipe, data_size, accumulation)
    fixed = FIXED | FIXED_IN_PIPELINE if recipe.parallel.pipeline > 1 else FIXED
    _fill_derived(leaves, recipe, accumulates, fixed)
    bad, legal = _check_leaves(leaves, fixed)
    problems += bad + problems_of(legal, recipe, preset.stage, data_size)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    if recipe.optim.name != "adamw":
        leaves["zero_allow_untested_optimizer"] = (True, "recipe: optim.name")
    return EngineConfig(
        json=_nested({key: value for key, (value, _) in leaves.items()}),
        origins={key: origin for key, (_, origin) in leaves.items()},
        stage=preset.stage,
        optimizer_class=optimizer_class(preset.stage, leaves),
        notes=tuple(notes),
    )


def ds_problems(ds: dict[str, Any]) -> list[str]:
    """Problems of `ds.*` that can be found without a layout: names, types and ranges.

    For a recipe that is refused for another reason, so that a person sees all problems at once.
    """
    flat = {key: (value, f"ds.{key}") for key, value in _flat(ds) if value not in (AUTO, None)}
    _drop_idle(flat)
    bad, _ = _check_leaves(flat, FIXED)
    return [*_misshapen(ds, "ds."), *bad]


def file_problems(recipe: Recipe) -> list[str]:
    """Problems of the preset's file that can be found without a ZeRO stage, beside that of the
    stage itself: a person sees them all at once.
    """
    try:
        shown, content = read_preset(recipe.zero)
    except UserError:
        return []  # reported already
    flat = {key: (value, shown) for key, value in _flat(content) if value != AUTO}
    leaves = {key: leaf for key, leaf in flat.items() if key not in (STAGE, ZERO)}
    _drop_idle(leaves)
    leave_out(leaves, recipe, 1)
    bad, _ = _check_leaves(leaves, FIXED)
    return [*_misshapen({**content, ZERO: content.get(ZERO) or None}, shown), *bad]


def _misshapen(tree: dict[str, Any], origin: str, prefix: str = "") -> Iterator[str]:
    """Problems of empty blocks and of names with a dot: neither has leaves."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if "." in str(key):
            yield f"{named(path, origin)}: a dot in a name, which DeepSpeed ignores; nest blocks"
        elif value == {}:
            refused = refusal(path)
            is_block = any(name.startswith(f"{path}.") for name in [*KEYS, *FIXED])
            if refused:
                yield f"{named(refused[0], origin)}: {refused[1]}; remove it"
            elif is_block:
                yield f"{named(path, origin)} is an empty block, which changes nothing; remove it"
            else:
                yield _unknown(path, origin)
        elif isinstance(value, dict):
            yield from _misshapen(value, origin, f"{path}.")


def _merge(preset: Preset, ds: dict[str, Any], problems: list[str]) -> Leaves:
    """Preset and `ds.*` as flat leaves; a null of `ds.*` for a block removes the block."""
    leaves: Leaves = {key: (value, preset.shown) for key, value in _flat(preset.json)}
    for key, value in _flat(ds):
        origin = f"ds.{key}"
        if key == STAGE and value != AUTO and not equal(value, preset.stage):
            instead = NO_STAGE if equal(value, 0) else f"set zero={value} instead"
            problems.append(
                f"{origin}={as_written(value)} contradicts {preset.shown}, stage {preset.stage};"
                f" {instead}"
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
    return leaves


def _drop_idle(leaves: Leaves) -> None:
    """Remove leaves that only switch off what does not exist here.

    A refused block with "enabled": false, a file's settings of an offload to "none", the keys of
    OFF.
    """
    off = [
        block
        for key, (value, _) in leaves.items()
        if (block := key.removesuffix(".enabled")) != key and block in REFUSED and value is False
    ]
    none = [key.removesuffix("device") for key in DEVICES if leaves.get(key, [""])[0] == "none"]
    for key, (value, origin) in list(leaves.items()):
        is_of_none = key.startswith(tuple(none)) and key not in DEVICES and not is_override(origin)
        is_off = key in OFF and (value is None or value is False)
        if is_off or is_of_none or any(is_part_of(key, block) for block in off):
            del leaves[key]


def is_part_of(key: str, block: str) -> bool:
    """True where the dotted `key` is `block` or lies in it."""
    return key == block or key.startswith(f"{block}.")


def _fill_owned(
    leaves: Leaves, problems: list[str], recipe: Recipe, data_size: int, accumulation: int
) -> None:
    """Fill in the values that the recipe owns; any value but "auto" or the same is refused."""
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
        if given != AUTO and not equal(given, value):
            try:
                _typed(key, given)
                what = f"contradicts {as_written(value)} ({origin})"
            except ValueError as error:
                what = str(error)
            problems.append(
                f"{shown(key, given, where)} {what}; the recipe owns it ({OWNED[key]}): remove it,"
                ' or set it to "auto"'
            )
        leaves[key] = (value, origin)


def _fill_derived(leaves: Leaves, recipe: Recipe, accumulates: bool, fixed: Fixed) -> None:
    """Fill in unset keys that follow from the recipe, and keys with one legal value."""
    sums = recipe.precision == "fp32" or accumulates or recipe.parallel.pipeline > 1
    reason = "precision" if recipe.precision == "fp32" else "accumulation"
    dtype = ("fp32" if sums else "bf16", f"recipe: {reason if sums else 'no accumulation'}")
    if leaves.get(ACCUM_DTYPE, (AUTO, ""))[0] == AUTO:
        leaves[ACCUM_DTYPE] = dtype
    given = leaves[ACCUM_DTYPE][0]
    if leaves.get(COMM_DTYPE, (AUTO, ""))[0] == AUTO:
        leaves[COMM_DTYPE] = (given if given in DTYPES else dtype[0], "as data_types")
    for key, (value, reason) in fixed.items():
        if leaves.get(key, (AUTO, ""))[0] == AUTO:
            leaves[key] = (value, f"always: {reason}")
    for key, rule in TRANSFORMERS_AUTO.items():
        if leaves.get(key, (None, ""))[0] == AUTO:
            size = rule(recipe.model.hidden_size)
            leaves[key] = (size, "recipe: model.hidden_size, as Transformers fills it")


def _check_leaves(leaves: Leaves, fixed: Fixed) -> tuple[list[str], Leaves]:
    """Problems, and the leaves that have none: known, of their type, in their range.

    Replaces values by numbers of the key's type.
    """
    problems, autos, legal = [], [], {}
    for key, (value, origin) in leaves.items():
        given = shown(key, value, origin)
        refused = refusal(key)
        if key in fixed:
            if not equal(value, fixed[key][0]):
                problems.append(f"{given}: {fixed[key][1]}; remove it")
        elif is_unknown_option(key) and "optimizer.type" not in leaves:
            near = did_you_mean(key, [PARAMS + name for name in OPTIONS])
            problems.append(f"{named(key, origin)}: no such option{near.rstrip('.')}; {OPTIMIZER}")
        elif refused:
            block, reason = refused
            what = given if block == key else named(block, origin)
            problems.append(f"{what}: {reason}; remove it")
        elif key not in KEYS:
            problems.append(_unknown(key, origin))
        elif value == AUTO:
            autos.append(named(key, origin))
        elif key in DEVICES and value == "nvme":
            problems.append(f"{given}: {NVME}")
        else:
            try:
                leaves[key] = legal[key] = (_typed(key, value), origin)
            except ValueError as error:
                problems.append(f"{given} {error}: {KEYS[key].meaning}")
    if autos:
        problems.append(
            f'still at "auto", which nothing here fills: {", ".join(autos)}; set each, or'
            " remove it for DeepSpeed's default"
        )
    return problems, legal


def _unknown(key: str, origin: str) -> str:
    """The message for an unknown key, with the nearest known one."""
    inside = [name.removeprefix(f"{key}.") for name in KEYS if name.startswith(f"{key}.")]
    if inside:
        return f"{named(key, origin)} is a block; its keys: {', '.join(inside)}"
    blocks = {".".join(name.split(".")[:n]) for name in KEYS for n in range(1, name.count(".") + 1)}
    parent = key.rpartition(".")[0]
    if parent and parent not in blocks:  # the block is misspelt, not the key in it
        return f"{named(parent, origin)}: no such block{did_you_mean(parent, blocks)}"
    return f"{named(key, origin)}: no such key{did_you_mean(key, [*KEYS, *blocks])}"


def _typed(key: str, value: Any) -> Any:
    """The value converted to the key's type. Raises ValueError with the reason."""
    rule = KEYS[key]
    if rule.kind is int:
        value = as_int(value)
    elif rule.kind is float:
        value = as_float(value)
    elif not isinstance(value, rule.kind):
        wanted = {bool: "true or false", str: "text", list: "a list"}[rule.kind]
        more = ", but text; remove the quotes" if value in ("true", "false") else ""
        raise ValueError(f"is not {wanted}{more}")
    for item in value if rule.kind is list else [value]:
        if rule.choices and item not in rule.choices:
            which = f"has {item!r}, which" if rule.kind is list else ""
            old = f" ({item} is an old name of bf16)" if item in OLD_BF16 else ""
            raise ValueError(f"{which} is not one of {', '.join(rule.choices)}{old}".strip())
    if rule.low is not None and value < rule.low:
        raise ValueError(f"must be at least {rule.low}")
    if rule.high is not None and value > rule.high:
        raise ValueError(f"must be at most {rule.high}")
    return value


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty block and a name with a dot have no leaves."""
    leaves = []
    for key, value in tree.items():
        if "." in str(key):
            continue
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
