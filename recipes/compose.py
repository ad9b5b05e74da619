"""Composes a recipe, its config group options and overrides into the frozen Recipe, with Hydra.

    recipes/tiny.yaml -> defaults list: model/ data/ optim/ cluster/ -> knob=value overrides
      -> plain values + where each came from -> recipes.check -> Recipe

An override sets one value whether or not the recipe has it; a value that is a dict replaces the
whole dict.

Rule: Hydra does defaults lists, groups and the override grammar, nothing else. It creates no folder
and changes no directory, `recipes.check` checks what it composed, and no other file imports it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from base.errors import UserError
from base.paths import ROOT
from base.values import as_written, did_you_mean
from recipes.check import folder_name, is_text, read_data, to_recipe
from recipes.schema import Data, Recipe

RECIPES = ROOT / "recipes"
ADAM_ONLY = ("beta1", "beta2", "eps")
GROUPS = ("model", "data", "optim", "cluster")
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
MISREAD = re.compile(r"[-+]?(0[0-9_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


@dataclass(frozen=True)
class Composed:
    """A checked recipe, the origin of each dotted knob (absent: the default), and warnings."""

    recipe: Recipe
    origins: dict[str, str]
    warnings: list[str]
    file: Path  # of the recipe


@dataclass(frozen=True)
class Override:
    """One override of a value; `text` is what was typed after the equals sign."""

    key: str
    value: Any
    text: str
    is_removal: bool


def compose(
    recipe_name: str,
    overrides: Sequence[str] = (),
    check_ds: Callable[[dict[str, Any]], list[str]] = lambda ds: [],
    check_data: Callable[[Data], list[str]] = lambda data: [],
) -> Composed:
    """The recipe `recipe_name` (in recipes/, or a path to a .yaml file) with overrides applied.

    `model=...`, `data=...`, `optim=...`, `cluster=...` choose a config group option; `a.b=value`
    sets a knob, `~a.b` removes a key. Raises UserError with all problems; `check_ds` and
    `check_data` add those of DeepSpeed keys and corpora, which are checked later where the knobs
    are right.
    """
    path = locate(recipe_name)
    choices, changes, problems, warnings = parse(overrides)
    try:
        tree, origins = _hydra(path, choices)
    except CONFIG_ERRORS as error:
        raise UserError(*problems, f"{_shown(path)}: {_reason(error)}") from None
    problems += [line for change in changes for line in _apply(tree, origins, change)]
    problems += [f"{key}: hydra settings are not used" for key in origins if _is_hydra(key)]
    values, missing, broken = _plain(tree)
    problems += _targets(values)
    try:
        recipe, more = to_recipe(values, origins, missing, broken)
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
) -> Composed:
    """The recipe of a command line `recipe=tiny zero=3 ...`. Raises UserError like `compose`."""
    recipes_named = [text.partition("=")[2] for text in arguments if text.startswith("recipe=")]
    overrides = [text for text in arguments if not text.startswith("recipe=")]
    if len(recipes_named) != 1:
        raise UserError(f"give one recipe=NAME, not {len(recipes_named)}; for example recipe=tiny")
    return compose(recipes_named[0], overrides, check_ds, check_data)


def run_name(stem: str) -> str:
    """The run's name, from the file name of its recipe. Raises UserError where it is not legal."""
    try:
        return folder_name(stem)
    except ValueError as error:
        raise UserError(f"run={stem!r} (the recipe's file name) {error}; give run=NAME") from None


def sweep_values(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Key -> the overrides of a sweep: `zero=1,2` is {"zero": ["zero=1", "zero=2"]}.

    Hydra's grammar: lists with commas, choice(...), range(...). Raises UserError with all problems.
    """
    parser = OverridesParser.create()
    found: dict[str, list[str]] = {}
    problems = []
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
            key = parsed.key_or_group
            if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
                raise ValueError("its values cannot be counted")
            if parsed.is_sweep_override():
                values = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
            else:
                values = [override]
        except (HydraException, ValueError) as error:
            problems.append(
                f"sweep {override!r} is malformed ({_one_line(error)}); write knob=1,2,3"
            )
            continue
        if key in found:
            problems.append(f"sweep {key} is given twice; put all its values behind one {key}=")
        repeated = sorted({value for value in values if values.count(value) > 1})
        problems += [f"sweep {override!r}: {value} stands there twice" for value in repeated]
        found[key] = values
    if problems:
        raise UserError(*problems)
    return found


def recipe_yaml(recipe: Recipe) -> str:
    """YAML with every knob and without interpolations; composing it gives the same recipe."""
    note = f"# make pretrain RECIPE=runs/{recipe.run}/recipe.yaml OVERRIDES=run=NEW_NAME\n"
    return note + OmegaConf.to_yaml(OmegaConf.create(_listed(dataclasses.asdict(recipe))))


def recipe_names() -> list[str]:
    """Names of the recipes in recipes/."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def group_options(group: str) -> list[str]:
    """Names of the options of one config group."""
    return sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))


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


def parse(overrides: Sequence[str]) -> tuple[list[str], list[Override], list[str], list[str]]:
    """Config group choices, overrides of values, problems and warnings of a list of overrides."""
    parser = OverridesParser.create()
    choices: dict[str, str] = {}
    changes: dict[str, Override] = {}
    problems, warnings = [], []
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
            str(parsed.value())  # Python refuses to print integers of thousands of digits
        except (HydraException, ValueError) as error:
            problems.append(
                f"override {text!r} is malformed ({_one_line(error)}); write knob=value"
            )
            continue
        key = parsed.key_or_group
        line = _refusal(text, parsed)
        if line:
            problems.append(line)
            continue
        chosen = choices if key in GROUPS and isinstance(parsed.value(), str) else changes
        if key in chosen:
            warnings.append(f"{key} is given twice; {text} replaces the earlier one")
        if chosen is choices:
            choices[key] = text.lstrip("+")
        else:
            typed = text.partition("=")[2]
            changes.pop(key, None)  # the later one also comes later
            changes[key] = Override(key, parsed.value(), typed, parsed.is_delete())
    return list(choices.values()), list(changes.values()), problems, warnings


def _refusal(text: str, parsed: Any) -> str | None:
    """The refusal of a well-formed override that cannot be taken, or None."""
    key = parsed.key_or_group
    if not all(key.split(".")):
        return f"override {text!r} is malformed (no name before =); write knob=value"
    if _is_hydra(key):
        return f"override {text!r}: hydra settings are not used; runs go to runs/<run> (run=NAME)"
    if parsed.package is not None or "/" in key:
        return f"override {text!r}: write group=name or knob=value, without @ and /"
    if parsed.is_sweep_override():
        return f"override {text!r} has several values; one run takes one value per knob"
    if key in GROUPS and parsed.is_delete():
        return f"override {text!r}: a config group option is replaced by {key}=NAME, not removed"
    value = parsed.value()
    if key in GROUPS and isinstance(value, str) and value not in group_options(key):
        near = did_you_mean(value, group_options(key))
        known = ", ".join(group_options(key))
        return f"{key}={value}: no such config group option{near} There are: {known}"
    return None


def _is_hydra(key: str) -> bool:
    return re.split(r"[./@]", key, maxsplit=1)[0] == "hydra"


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
        return [f"override {change.key}={change.text}: {_one_line(error)}"]
    inner = _leaves(value) if isinstance(value, dict) else ()
    origins |= {f"{change.key}.{key}": "override" for key in inner} or {change.key: "override"}
    return []


def _plain(tree: DictConfig) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Resolved plain values, knobs left at `???`, and knob -> why it cannot be resolved."""
    missing: list[str] = []
    broken: dict[str, str] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, DictConfig):
            result = {}
            for key in node:
                full = f"{path}.{key}" if path else str(key)
                if OmegaConf.is_missing(node, key):
                    missing.append(full)
                    continue
                try:
                    result[key] = walk(node[key], full)
                except OmegaConfBaseException as error:
                    broken[full] = _unresolved(node, key, error)
            return result
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_list(node) else node

    return walk(tree, ""), missing, broken


def _unresolved(node: DictConfig, key: Any, error: Exception) -> str:
    """The reason why a knob's ${...} has no value."""
    written = OmegaConf.to_container(node, resolve=False)[key]
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", _one_line(error))
    return (
        f"{written} has no value ({reason}); name another knob, or an environment variable that is"
        " set: ${oc.env:NAME}"
    )


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


def _listed(value: Any) -> Any:
    """Nested values with lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return value


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _reason(error: Exception) -> str:
    """Hydra's reason; our own text where its way out does not exist here."""
    found = re.search(r"Could not override '(\w+)'\.\s+No match", str(error))
    if found:
        group = found.group(1)
        return f"its defaults list has no {group}; set single knobs, {group}.NAME=..., instead"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    """The first paragraph of a library's message, as one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or its defaults list leads back to itself"
    text = str(error).split("\n    full_key")[0].split("\nSee https")[0]
    cause = error.__cause__ or error.__context__
    if not text.strip() and isinstance(cause, Exception):
        return _one_line(cause)
    return " ".join(text.split()) or type(error).__name__
