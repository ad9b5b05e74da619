"""Composes a recipe, its config group options and overrides into the frozen Recipe, with Hydra.

    recipes/tiny.yaml -> defaults list: model/ data/ optim/ cluster/ -> knob=value overrides
      -> plain values + where each came from -> recipes.check -> Recipe

An override sets one value whether or not the recipe has it; a value that is a dict replaces the
whole dict.

Rule: Hydra does defaults lists, groups and the override grammar (`recipes.overrides`), nothing
else. It creates no folder and changes no directory, and `recipes.check` checks what it composed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from base.errors import UserError
from base.paths import ROOT
from base.values import as_written, did_you_mean
from recipes import interpolation
from recipes.check import folder_name, is_text, read_data, to_recipe
from recipes.composed_file import OF_ONE_START, Composed, plain, read_composed
from recipes.overrides import Override, is_hydra, one_line, parse
from recipes.schema import Data, Recipe

RECIPES = ROOT / "recipes"
# Knobs that the plan may choose, and what stands for `auto` until it has: always legal to compose.
STAND_INS: dict[str, Any] = {"parallel": {}, "zero": 1, "micro_batch": 1, "recompute": "none"}
AUTO = "auto"
ADAM_ONLY = ("beta1", "beta2", "eps")
CONFIG_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    TypeError,
    RecursionError,
    OSError,
)
# YAML 1.1 reads 010 as 8 and 12:30 as 750; on the command line they are 10 and no number.
TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
MISREAD = re.compile(r"[-+]?(0[0-9_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


def compose(
    recipe_name: str,
    overrides: Sequence[str] = (),
    check_ds: Callable[[dict[str, Any]], list[str]] = lambda ds: [],
    check_data: Callable[[Data], list[str]] = lambda data: [],
    free: list[str] | None = None,
) -> Composed:
    """The recipe `recipe_name` (in recipes/, or a path to a .yaml file) with overrides applied.

    `model=...`, `data=...`, `optim=...`, `cluster=...` choose a config group option; `a.b=value`
    sets a knob, `~a.b` removes a key. Raises UserError with all problems; `check_ds` and
    `check_data` add those of DeepSpeed keys and corpora, which are checked later where the knobs
    are right. Knobs that the file sets to `auto` and no override gives are added to `free`, and
    have a stand-in; without `free` they are refused.
    """
    path = locate(recipe_name)
    given = parse(overrides, lambda group: group_options(group, path.parent))
    problems = given.problems

    # Compose, and refuse what is not data or not the same in every process.
    try:
        tree, origins = _hydra(path, given.choices)
    except CONFIG_ERRORS as error:
        raise UserError(*problems, f"{_shown(path)}: {_reason(error)}") from None
    roots = {one.key.partition(".")[0] for one in given.overrides if one.key != "parallel.sequence"}
    waiting = [name for name in STAND_INS if tree.get(name) == AUTO and name not in roots]
    for name in STAND_INS:
        if tree.get(name) == AUTO:
            tree[name] = STAND_INS[name]
    if free is None:
        problems += [_only_the_plan(name) for name in waiting]
    else:
        free += waiting
    problems += [line for one in given.overrides for line in _apply(tree, origins, one)]
    problems += [f"{key}: hydra settings are not used" for key in origins if is_hydra(key)]
    problems += interpolation.refusals(OmegaConf.to_container(tree, resolve=False), origins)
    found = interpolation.plain_values(tree)
    values = found.values
    problems += [_no_text(name, origins) for name in found.typed_keys]
    problems += _targets(values)
    warnings = [*given.warnings, *_of_one_start(values, origins)]

    # Check every knob.
    try:
        recipe, more = to_recipe(values, origins, found.missing, found.broken)
    except UserError as error:
        problems += error.problems
        ds = values.get("ds")
        problems += check_ds(ds) if isinstance(ds, dict) else []
        data = read_data(values.get("data"))
        problems += check_data(data) if data else []
        raise UserError(*problems) from None
    if problems:
        raise UserError(*problems)
    if recipe.run is None:
        recipe = dataclasses.replace(recipe, run=run_name(path.stem))
    return Composed(recipe, origins, [*warnings, *more, *idle(recipe, origins)], path)


def _only_the_plan(name: str) -> str:
    """The refusal of a knob that is `auto` where nothing chooses its value."""
    value = STAND_INS[name] if name != "parallel" else 1
    return (
        f"{name}=auto: only make pretrain and make plan choose a value; here, give one:"
        f" OVERRIDES={name if name != 'parallel' else 'parallel.tensor'}={value}"
    )


def _of_one_start(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Take instructions of one start out of `values` where a file gives them; returns warnings."""
    found = []
    for name in OF_ONE_START:
        file = origins.get(name)
        if file is None or file == "override" or name not in values:
            continue
        value = values.pop(name)
        if value != Recipe.__dataclass_fields__[name].default:
            found.append(
                f"{name}={as_written(value)} ({file}) has no effect: it is an instruction of one"
                f" start; give it to that start as an override, OVERRIDES={name}={value}"
            )
    return found


def _no_text(name: str, origins: dict[str, str]) -> str:
    """The refusal of a key that is a number or true or false, and no text."""
    *_, last = name.split(".")
    return (
        f"{name}: the key {last} is no text but a number, true or false; write it in quotes in a"
        f" file, or as {name}...= on the command line"
    )


def idle(recipe: Recipe, origins: dict[str, str]) -> list[str]:
    """One warning for each override that nothing reads under the other settings."""
    optim = recipe.optim
    readers = {
        "optim.decay": ("optim.schedule=wsd", optim.schedule == "wsd"),
        "optim.final_lr_ratio": ("another schedule", optim.schedule != "constant"),
        **{f"optim.{name}": ("optim.name=adamw", optim.name == "adamw") for name in ADAM_ONLY},
    }
    return [
        f"{key} has no effect: only {reader} reads it"
        for key, (reader, is_read) in readers.items()
        if not is_read and origins.get(key) == "override"
    ]


def compose_command(
    arguments: Sequence[str],
    check_ds: Callable[[dict[str, Any]], list[str]] = lambda ds: [],
    check_data: Callable[[Data], list[str]] = lambda data: [],
    free: list[str] | None = None,
) -> Composed:
    """The recipe of a command line `recipe=tiny zero=3 ...`. Raises UserError like `compose`.

    `composed=FILE` in place of `recipe=NAME` reads what a launcher has composed already
    (`recipes.composed_file`); beside it only instructions of one start are taken.
    """
    files = [text.partition("=")[2] for text in arguments if text.startswith("composed=")]
    if files:
        return _read_command(files, [text for text in arguments if text[:9] != "composed="])
    recipes_named = [text.partition("=")[2] for text in arguments if text.startswith("recipe=")]
    overrides = [text for text in arguments if not text.startswith("recipe=")]
    if len(recipes_named) != 1:
        raise UserError(f"give one recipe=NAME, not {len(recipes_named)}; for example recipe=tiny")
    return compose(recipes_named[0], overrides, check_ds, check_data, free)


def _read_command(files: Sequence[str], others: Sequence[str]) -> Composed:
    """The recipe of a command line `composed=FILE resume=...`. Raises UserError."""
    given = dict(text.partition("=")[::2] for text in others)
    unknown = sorted(set(given) - set(OF_ONE_START))
    if unknown or len(files) > 1:
        raise UserError(
            f"composed={files[0]}: the recipe in it is complete; beside it only"
            f" {', '.join(OF_ONE_START)} can be given, not {', '.join(unknown) or 'another file'}"
        )
    found = read_composed(Path(files[0]))
    recipe, _ = to_recipe({**plain(found.recipe), **given}, found.origins, [])
    return dataclasses.replace(found, recipe=recipe)


def run_name(stem: str) -> str:
    """The run's name, from the file name of its recipe. Raises UserError where it is not legal."""
    try:
        return folder_name(stem)
    except ValueError as error:
        raise UserError(f"run={stem!r} (the recipe's file name) {error}; give run=NAME") from None


def recipe_yaml(recipe: Recipe) -> str:
    """YAML with every knob of a run and without interpolations; composing it gives the same run.

    Instructions of one start are not in it.
    """
    note = f"# make pretrain RECIPE=runs/{recipe.run}/recipe.yaml OVERRIDES=run=NEW_NAME\n"
    return note + OmegaConf.to_yaml(OmegaConf.create(plain(recipe)))


def recipe_names() -> list[str]:
    """Names of the recipes in recipes/."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def group_options(group: str, folder: Path = RECIPES) -> list[str]:
    """Names of the options of one config group, with those beside a recipe in another folder."""
    places = {RECIPES / group, folder / group}
    return sorted({path.stem for place in places for path in place.glob("*.yaml")})


def locate(recipe_name: str) -> Path:
    """The file of a recipe. Raises UserError with the list of recipes and the nearest name."""
    is_path = recipe_name.endswith(".yaml") or "/" in recipe_name
    path = ROOT / recipe_name if is_path else RECIPES / f"{recipe_name}.yaml"
    try:
        path = path.resolve() if is_path else path
        is_file = path.is_file() and path.suffix == ".yaml"
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL
        is_file = False
    if is_file and (is_path or re.fullmatch(r"[\w.-]+", recipe_name)):
        return path
    near = did_you_mean(Path(recipe_name).stem, recipe_names())
    what = f"there is no file {str(path)!r:.300}" if is_path else "no such recipe"
    raise UserError(
        f"recipe {recipe_name!r:.300}: {what}{near} There are: {', '.join(recipe_names())}"
    )


def _hydra(path: Path, choices: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """Hydra's composition of a recipe, and the file that set each leaf; both are copies."""
    files = tuple((str(file), file.stat().st_mtime_ns) for file in [path, *RECIPES.rglob("*.yaml")])
    tree, origins = _hydra_once(path, tuple(choices), files)
    return copy.deepcopy(tree), dict(origins)


# Hydra takes a tenth of a second, mostly in YAML; sweeps and tests compose one recipe many times.
@functools.lru_cache(maxsize=64)
def _hydra_once(
    path: Path, chosen: tuple[str, ...], files: tuple[tuple[str, int], ...]
) -> tuple[DictConfig, dict[str, str]]:
    """Like `_hydra`, computed once per state of the files."""
    choices = list(chosen)
    refuse_typed_keys(path)  # Hydra's own message on some of them has no line
    quoted = str(RECIPES).replace("\\", "\\\\").replace("'", "\\'")
    search = [f"hydra.searchpath=['file://{quoted}']"] if path.parent != RECIPES else []
    with hydra.initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
        tree = hydra.compose(config_name=path.stem, overrides=choices + search)
        loader = GlobalHydra.instance().config_loader()
        used = loader.compute_defaults_list(path.stem, choices + search, RunMode.RUN).defaults
    OmegaConf.set_struct(tree, False)
    origins = {}
    for part in used:
        if part.config_path is None or part.config_path.startswith("hydra/"):
            continue
        places = [folder / f"{part.config_path}.yaml" for folder in (path.parent, RECIPES)]
        file = next((place for place in places if place.is_file()), None)
        if file is None:  # Hydra's own `hydra/config`
            continue
        refuse_misread(file)
        refuse_typed_keys(file)
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        content.pop("defaults", None)
        prefix = f"{part.package}." if part.package else ""
        origins |= {prefix + key: _shown(file) for key in _leaves(content)}
    return tree, origins


def refuse_misread(file: Path) -> None:
    """Raise ValueError for a number that YAML reads as another number."""
    for token in yaml.scan(file.read_text(encoding="utf-8-sig")):
        if isinstance(token, yaml.ScalarToken) and token.plain and MISREAD.fullmatch(token.value):
            raise ValueError(
                f"line {token.start_mark.line + 1}: YAML reads {token.value} as"
                f" {yaml.safe_load(token.value)}; write that, or put it in quotes where it is text"
            )


def refuse_typed_keys(file: Path) -> None:
    """Raise ValueError for a key that YAML reads as a number, true, false or null."""
    waiting = [yaml.compose(file.read_text(encoding="utf-8-sig"), get_yaml_loader())]  # or None
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                waiting.append(value)
                if isinstance(key, yaml.ScalarNode) and key.tag not in TEXT_TAGS:
                    kind = key.tag.rpartition(":")[2]
                    raise ValueError(
                        f"line {key.start_mark.line + 1}: YAML reads the key {key.value} as a"
                        f" value of type {kind}, and a name is text; write '{key.value}' in quotes,"
                        " or choose another name"
                    )


def _apply(tree: DictConfig, origins: dict[str, str], change: Override) -> list[str]:
    """Apply one override to the tree; returns problems."""
    for key in list(origins):
        if f"{key}.".startswith(f"{change.key}.") or f"{change.key}.".startswith(f"{key}."):
            del origins[key]
    parent, _, last = change.key.rpartition(".")
    value = change.value
    if is_text(change.key) and isinstance(value, bool | int | float):
        value = change.text  # `run=007` is a name
    try:
        if change.is_removal:
            holder = OmegaConf.select(tree, parent) if parent else tree
            if not isinstance(holder, DictConfig) or last not in holder:
                return [f"~{change.key}: there is no such key to remove"]
            if change.text and value != holder[last]:
                return [
                    f"~{change.key}={change.text}: it is {as_written(holder[last])}, so it stays;"
                    f" write ~{change.key} to remove it whatever it is"
                ]
            del holder[last]
            return []
        OmegaConf.update(tree, change.key, value, merge=False, force_add=True)
    except OmegaConfBaseException as error:
        return [f"override {change.key}={change.text}: {one_line(error)}"]
    inner = _leaves(value) if isinstance(value, dict) else ()
    origins |= {f"{change.key}.{key}": "override" for key in inner} or {change.key: "override"}
    return []


def _targets(values: Any, path: str = "") -> Iterator[str]:
    """Refusals of keys that name code to call: a recipe holds data only."""
    if isinstance(values, dict):
        for key, value in values.items():
            full = f"{path}.{key}" if path else str(key)
            if str(key) in ("_target_", "_args_", "_partial_"):
                yield f"{full}: a recipe names no code to run; remove it"
            yield from _targets(value, full)
    elif isinstance(values, list):
        for item in values:
            yield from _targets(item, path)


def _leaves(content: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(content, dict) and content:
        for key, value in content.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _reason(error: Exception) -> str:
    """Hydra's reason; our own text where its way out does not exist here."""
    found = re.search(r"Could not override '(\w+)'\.\s+No match", str(error))
    if found:
        group = found.group(1)
        return f"its defaults list has no {group}; set single knobs, {group}.NAME=..., instead"
    return one_line(error)
