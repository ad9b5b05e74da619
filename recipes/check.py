"""Checks plain values and turns them into a frozen Recipe: names, types and ranges of all knobs.

Rule: all problems are collected and raised together, with those of `recipes.rules`. Each is one
line with the knob, its value, the origin of the value, the rule and the way out. Nothing is
corrected in silence but the notation of a number: 5e8 where an int is wanted is 500000000.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from base.errors import UserError
from base.redaction import redact, redacted
from base.values import MANY, as_float, as_int, as_written, did_you_mean
from recipes.rules import RULES, WARNINGS
from recipes.schema import FP16, RENAMED, STAGE_0, Data, Recipe

# Folder and source names: what every file system, shell and dotted knob name takes unquoted.
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*")
LONGEST_NAME = 100
LONGEST_PART = 255
MOST_TOKENS = MANY * 2**16
LARGEST_SHARE = 1e12  # sums of these are exact enough
BAD = object()  # stands for a value that has already been reported


def to_recipe(
    values: dict[str, Any],
    origins: Mapping[str, str],
    missing: Sequence[str],
    broken: Mapping[str, str] = {},
) -> tuple[Recipe, list[str]]:
    """The frozen recipe and its warnings, from nested plain values.

    `origins`: dotted knob -> where its value came from. `missing`: knobs left at `???`. `broken`:
    knob -> why its value cannot be resolved. Raises UserError with every problem found.
    """
    reader = _Reader(origins, missing, broken)
    recipe = reader.read_class(Recipe, with_new_names(values), "")
    known = {path: value for path, value in reader.read.items() if value is not BAD}
    problems = [f"{path}: {reason}" for path, reason in broken.items()] + reader.problems
    for path in missing:  # a key of the DeepSpeed JSON, or a whole source
        reader.missing.setdefault(path, "which stands at ???")
    if reader.missing:
        listed = ", ".join(f"{path} ({meaning})" for path, meaning in reader.missing.items())
        problems.insert(0, f"no value for {listed}; set each in the recipe or as knob=value")
    for knobs, rule in RULES:
        if all(knob in known for knob in knobs):
            line = rule(*(known[knob] for knob in knobs))
            problems += [line] if line else []
    if problems:
        raise UserError(*problems)
    return recipe, [
        line
        for knobs, rule in WARNINGS
        if (line := rule(*(known[knob] for knob in knobs))) is not None
    ]


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of a recipe with each knob that was renamed (`RENAMED`) under its new name.

    Where both names are given, both stay, and the old one is refused as unknown.
    """
    found = dict(values)
    for group, names in RENAMED.items():
        inner = found.get(group)
        if isinstance(inner, Mapping):
            new = {names.get(key, key) for key in inner}
            if len(new) == len(inner):
                found[group] = {names.get(key, key): value for key, value in inner.items()}
    return found


def read_data(values: Any) -> Data | None:
    """The Data of a recipe's `data` group alone; None where it is not legal."""
    found = _Reader({}, [], {}).read_class(Data, values, "data")
    return None if found is BAD else found


def knob_names(cls: type = Recipe, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Dotted name -> field of every knob; `data.sources.NAME.weight` stands for any source."""
    names = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, kind = prefix + field.name, hints[field.name]
        inner = typing.get_args(kind)[1:] if typing.get_origin(kind) is dict else (kind,)
        if dataclasses.is_dataclass(inner[0]):
            middle = "." if inner[0] is kind else ".NAME."
            names |= knob_names(inner[0], path + middle)
        else:
            names[path] = field
    return names


def is_text(path: str) -> bool:
    """True where the knob at a dotted path is text only, so that `run=007` is not a number."""
    cls: Any = Recipe
    for part in path.split("."):
        if not dataclasses.is_dataclass(cls):
            inner = typing.get_args(cls)
            if typing.get_origin(cls) is not dict:
                return False
            cls = inner[1]
            continue
        cls = typing.get_type_hints(cls).get(part)
    return cls is str or cls == (str | None)


class _Reader:
    """Reads nested values into dataclasses; remembers problems, missing knobs and values read."""

    def __init__(
        self, origins: Mapping[str, str], missing: Sequence[str], broken: Mapping[str, str]
    ):
        self.origins = origins
        self.unset = set(missing)
        self.broken = broken
        self.problems: list[str] = []
        self.missing: dict[str, str] = {}
        self.read: dict[str, Any] = {}

    def fail(self, path: str, value: Any, reason: str) -> Any:
        self.problems.append(f"{path}={as_written(value)}{self.where(path)} {reason}")
        return BAD

    def where(self, path: str) -> str:
        under = (origin for known, origin in self.origins.items() if _is_under(known, path))
        origin = self.origins.get(path) or next(under, None)
        return f" ({origin})" if origin else ""

    def read_class(self, cls: type, values: Any, path: str) -> Any:
        """An instance of dataclass `cls`, or BAD where anything in it is wrong."""
        if not isinstance(values, dict):
            return self.fail(path, values, f"is not a group of knobs; set {path}.KNOB instead")
        prefix = f"{path}." if path else ""
        hints = typing.get_type_hints(cls)
        self.unknown(cls, values, prefix)
        arguments = {}
        for field in dataclasses.fields(cls):
            name, kind = prefix + field.name, hints[field.name]
            if name in self.broken:
                value = BAD
            elif field.name in values:
                value = self.read_value(kind, values[field.name], name, field.metadata)
            elif _has_default(field) and name not in self.unset:
                value = self.default(field, kind, name)
            else:
                self.lacks(kind, name, field)
                value = BAD
            arguments[field.name] = self.read[name] = value
        return BAD if any(value is BAD for value in arguments.values()) else cls(**arguments)

    def unknown(self, cls: type, values: dict, prefix: str) -> None:
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if "." in str(key):
                first, _, rest = str(key).partition(".")
                self.problems.append(
                    f"{prefix}{key}{self.where(f'{prefix}{key}')}: in a file groups are nested;"
                    f" write {first}: {{{rest}: ...}}"
                )
            elif key not in names:
                path = f"{prefix}{key}"
                hint = did_you_mean(path, [prefix + name for name in names] + list(knob_names()))
                if hint == ".":
                    hint = f"; knobs here: {', '.join(names)}"
                self.problems.append(f"{path}{self.where(path)}: no such knob{hint}")

    def default(self, field: dataclasses.Field, kind: Any, name: str) -> Any:
        if dataclasses.is_dataclass(kind):
            return self.read_class(kind, {}, name)
        if field.default is not dataclasses.MISSING:
            return field.default
        return field.default_factory()

    def lacks(self, kind: Any, name: str, field: dataclasses.Field) -> None:
        if dataclasses.is_dataclass(kind) and name not in self.unset:
            self.read_class(kind, {}, name)  # names each knob of the group
        else:
            self.missing[name] = field.metadata["meaning"]

    def read_value(self, kind: Any, value: Any, path: str, metadata: Mapping[str, Any]) -> Any:
        if dataclasses.is_dataclass(kind):
            return self.read_class(kind, value, path)
        if typing.get_origin(kind) is dict:
            return self.read_dict(typing.get_args(kind)[1], value, path)
        special = SPECIAL.get(re.sub(r"^data\.sources\.[^.]+\.", "data.sources.NAME.", path))
        if special:
            try:
                return special(value)
            except ValueError as error:
                return self.fail(path, value, f"{error} ({metadata['meaning']})")
        if isinstance(kind, types.UnionType):
            if value is None:
                return None
            kind = typing.get_args(kind)[0]
        try:
            value = CONVERT[kind](value)
        except ValueError as error:
            return self.fail(path, value, f"{error}: {metadata['meaning']}")
        reason = _outside(value, metadata)
        return self.fail(path, value, reason) if reason else value

    def read_dict(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return self.fail(path, value, f"is not a group; write {path}.NAME=...")
        if kind is Any:
            return value
        read = {}
        for name, inner in value.items():
            if not SAFE_NAME.fullmatch(str(name)) or "." in str(name):
                read[name] = self.fail(
                    path, str(name), "is not a name; use ASCII letters, digits, dash and underscore"
                )
                continue
            read[name] = self.read_class(kind, inner, f"{path}.{name}")
        return BAD if any(item is BAD for item in read.values()) else read


def _has_default(field: dataclasses.Field) -> bool:
    return not (
        field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _is_under(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


def _outside(value: Any, metadata: Mapping[str, Any]) -> str | None:
    """The reason why a value of the right type is outside its range; else None."""
    unit = f" {metadata['unit']}" if metadata["unit"] else ""
    if metadata["choices"] and value not in metadata["choices"]:
        if value in ("fp16", "float16", "half"):
            return f"is refused: {FP16}"
        near = did_you_mean(value, metadata["choices"]).rstrip(".")
        return f"is not one of {', '.join(metadata['choices'])}{near}"
    for bound, broken, text in (
        ("low", lambda a, b: a < b, "must be at least"),
        ("high", lambda a, b: a > b, "must be at most"),
        ("above", lambda a, b: a <= b, "must be above"),
        ("below", lambda a, b: a >= b, "must be below"),
    ):
        if metadata[bound] is not None and broken(value, metadata[bound]):
            return f"{text} {metadata[bound]}{unit}: {metadata['meaning']}"
    return None


def _to_bool(value: Any) -> bool:
    if value in ("true", "false"):
        raise ValueError("is text; write true or false without quotes")
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")
    return value


def _to_text(value: Any) -> str:
    if value is None:
        raise ValueError("is not legal here")
    if not isinstance(value, str):
        raise ValueError("is not text; put it in quotes")
    if any(ord(letter) < 32 for letter in value):
        raise ValueError("has a control character")
    if any(len(part.encode(errors="replace")) > LONGEST_PART for part in value.split("/")):
        raise ValueError(f"has a part longer than {LONGEST_PART} bytes, which no file system takes")
    return value


def _to_filled_text(value: Any) -> str:
    text = _to_text(value)
    if not text.strip():
        raise ValueError("is empty; null means none")
    return text


def folder_name(value: Any) -> str | None:
    """A name for a folder under runs/ that no shell, glob or option parser misreads."""
    if value is None:
        return None
    text = _to_text(value)
    if not SAFE_NAME.fullmatch(text) or len(text) > LONGEST_NAME:
        raise ValueError(
            "is not a folder name: letters, digits and _ . + = - only, not starting with a dot or"
            f" dash, at most {LONGEST_NAME} characters, no slash"
        )
    return text


def _positive(value: Any) -> int:
    number = as_int(value)
    if not 1 <= number <= MOST_TOKENS:
        raise ValueError(f"must be from 1 to {MOST_TOKENS}")
    return number


def _tokens(value: Any) -> int | str | None:
    if value is None or value == "chinchilla":
        return value
    try:
        return _positive(value)
    except ValueError as error:
        raise ValueError(f"{error}; give a number of tokens, or chinchilla") from None


def _batch_tokens(value: Any) -> int | tuple[tuple[int, int], ...]:
    if not isinstance(value, list | tuple):
        return _positive(value)
    return _by_step(value, _positive, "[step, tokens]")


def _seq_len_warmup(value: Any) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError("is not a list of [data step, tokens] pairs; write [[0,128],[1000,256]]")
    return _by_step(value, _positive, "[data step, tokens]")


def _by_step(value: Any, convert: Callable[[Any], Any], shape: str) -> tuple[tuple[int, Any], ...]:
    """(first step, value) pairs of a value that changes during the run, from step 0 on."""
    if not value or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        raise ValueError(f"is not a list of {shape} pairs")
    pieces = tuple((as_int(step), convert(part)) for step, part in value)
    steps = [step for step, _ in pieces]
    if steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError("must start at step 0 and its steps must increase")
    return pieces


def _warmup(value: Any) -> int | float:
    number = as_float(value)
    if number < 0:
        raise ValueError("must not be negative")
    if 0 < number < 1:
        return number
    try:
        return as_int(value)
    except ValueError:
        raise ValueError("is neither a fraction below 1 nor a whole number of steps") from None


def _zero(value: Any) -> int | str:
    if isinstance(value, bool) or value is None:
        raise ValueError("is neither a stage (1, 2, 3) nor the name of a file in ds_configs/")
    try:
        stage = as_int(value)
    except ValueError:
        if isinstance(value, str) and value:
            return _to_text(value)
        raise ValueError("is neither a stage (1, 2, 3) nor a name") from None
    if stage == 0:
        raise ValueError(f"is refused: {STAGE_0}")
    if stage not in (1, 2, 3):
        raise ValueError("is not a ZeRO stage; legal: 1, 2, 3")
    return stage


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("is not a list of knobs, such as [optim.lr,steps]")
    return tuple(value)


def _command(value: Any) -> tuple[str, ...]:
    """Arguments of a command that is started without a shell.

    Every user of a host can read them, so they must hold no secret.
    """
    if not isinstance(value, list | tuple) or not all(
        isinstance(text, str) and text and "\0" not in text for text in value
    ):
        raise ValueError("is not a list of texts, such as [/usr/local/bin/page,on-call]")
    line = " ".join(value)
    if redacted(value) != list(value) or redact(line) != line:
        raise ValueError(
            "holds what looks like a secret, which process lists show; let the program read it from"
            " a file"
        )
    return tuple(value)


def _bounds(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError("is not a list of block numbers")
    bounds = tuple(as_int(bound) for bound in value)
    if any(bound < 1 for bound in bounds) or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ValueError("must be block numbers from 1 that increase")
    return bounds


def _interval(value: Any) -> int | str:
    if value == "auto":
        return value
    try:
        steps = as_int(value)
    except ValueError as error:
        raise ValueError(f"{error}; give a number of steps, or auto") from None
    if not 0 <= steps <= MANY:
        raise ValueError(f"must be from 0 to {MANY}, or auto")
    return steps


def _weight(value: Any) -> float | tuple[tuple[int, float], ...]:
    if not isinstance(value, list | tuple):
        return _share(value)
    return _by_step(value, _share, "[data step, weight]")


def _share(value: Any) -> float:
    number = as_float(value)
    if not 0 <= number <= LARGEST_SHARE:
        raise ValueError(f"must be from 0 to {LARGEST_SHARE:g}")
    return number


def _ranges(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("is not a list of ranges; write [[100,200]]")
    return tuple(_range(item) for item in value)


def _range(value: Any, is_open: bool = False) -> tuple[int, int | None]:
    """[first, end) as two counts; `end` null where it may be open."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"has {value!r}, which is not a range [first, end]")
    first = as_int(value[0])
    end = None if is_open and value[1] is None else as_int(value[1])
    if first < 0 or (end is not None and end <= first) or max(first, end or 0) > MANY:
        raise ValueError(f"has the range [{first}, {end}]; it needs 0 <= first < end <= {MANY}")
    return first, end


def _masks(value: Any) -> tuple[dict[str, Any], ...]:
    wanted = ("source", "documents", "steps")
    if not isinstance(value, list | tuple) or not all(isinstance(item, dict) for item in value):
        raise ValueError("is not a list of {source: NAME, documents: [17, 18], steps: [0, null]}")
    masks = []
    for item in value:
        if set(item) - {"tokens"} != set(wanted):
            given = ", ".join(map(str, item))
            raise ValueError(f"has an entry with {given}, not {wanted} and, if need be, tokens")
        if not isinstance(item["source"], str | int) or isinstance(item["source"], bool):
            shown = as_written(item["source"])
            raise ValueError(f"has the source {shown}, which is no text; write its name in quotes")
        mask = {"source": str(item["source"]), "documents": _range(item["documents"])}
        mask["steps"] = _range(item["steps"], is_open=True)
        if "tokens" in item:
            mask["tokens"] = _range(item["tokens"], is_open=True)
            first, end = mask["documents"]
            if end != first + 1:
                raise ValueError(
                    f"has tokens of the documents [{first}, {end}]; they count from the start of"
                    f" one, so give an entry for each, such as documents: [{first}, {first + 1}]"
                )
        masks.append(mask)
    return tuple(masks)


CONVERT: dict[Any, Callable] = {int: as_int, float: as_float, bool: _to_bool, str: _to_filled_text}
SPECIAL: dict[str, Callable] = {
    "run": folder_name,
    "allow": _names,
    "alerts.command": _command,
    "parallel.bounds": _bounds,
    "tokens": _tokens,
    "seq_len_warmup": _seq_len_warmup,
    "batch_tokens": _batch_tokens,
    "warmup": _warmup,
    "checkpoint.interval": _interval,
    "zero": _zero,
    "data.sources.NAME.weight": _weight,
    "data.skip.advance": _ranges,
    "data.skip.no_update": _ranges,
    "data.skip.mask": _masks,
}
