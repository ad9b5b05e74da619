"""Compares the recipe of a checkpoint with that of now, and decides which changes are allowed.

    fixed        another model, another order of the data, another optimizer: refused
    deliberate   changes the loss curve from here on: needs its name in `allow`, is recorded
    free         speed, memory, place, display: is recorded

Rule: a knob that is not listed here is deliberate. Keys are those of recipes/schema.py, dotted. A
pattern covers everything under it, and `*` stands for one name. `identity` contains what the recipe
itself does not: fingerprints of corpora and tokenizer, and the version of the order.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.check import with_new_names
from recipes.composed_file import OF_ONE_START
from recipes.schema import Recipe

FIXED = (
    "identity",
    "model",
    "seed",
    "data.window_tokens",
    "data.shift_windows",
    "data.tokenizer",
    "data.attend",
    "optim.name",
)
FREE = (
    "run",
    "stop_after",
    "allow",
    "init_from",
    "zero",
    "parallel",
    "micro_batch",
    "recompute",
    "compile",
    "cluster",
    "log",
    "ds",
    "checkpoint",
    "health",
    "alerts",
    "hardware",
    "watch",
    "restart",
    "eval_every",
    "eval_tokens",
    "data.prefetch",
    # These tell where a corpus is; `identity` has the fingerprint of the corpus itself.
    "data.sources.*.corpus",
    "data.sources.*.build",
    "data.sources.*.max_epochs",
)
CORPORA = "identity.corpora."
ABSENT = "(absent)"


@dataclass(frozen=True)
class RecipeChange:
    """A knob whose value differs."""

    key: str
    stored: Any
    now: Any
    treatment: str  # fixed, deliberate or free

    def __str__(self) -> str:
        name = self.key
        if name.startswith(CORPORA):  # the corpus behind a knob, which may be where it was
            name = f"data.sources.{name.removeprefix(CORPORA)}.corpus holds another corpus"
        return f"{name}: {_shown(self.stored)} in the checkpoint, {_shown(self.now)} now"


@dataclass(frozen=True)
class ChangeVerdict:
    """The decision whether a run may go on, and the changes."""

    problems: list[str]  # one line each; empty means that the run may go on
    changes: list[RecipeChange]  # deliberate ones are recorded in the history, free ones in events


def check_resume(stored: Mapping, now: Mapping, allow: Iterable[str] = ()) -> ChangeVerdict:
    """Compare two resolved recipes (nested dicts, with `identity` beside them). Pure.

    `allow` names deliberate changes: dotted keys, or groups that cover everything under them. A
    name in it that is not a knob, or is fixed, is a problem, because it would allow nothing.
    """
    before, after = flatten(with_new_names(stored)), flatten(with_new_names(now))
    # A key that only one side has (an added source, a knob of another version) differs as well.
    keys = [*before, *(key for key in after if key not in before)]
    keys = [key for key in keys if key not in OF_ONE_START]
    allowed = list(allow)
    problems = [line for name in allowed if (line := _bad_allowance(name, keys))]
    changes = []
    for key in keys:
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if _same(old, new) or (old == ABSENT and _is_default(key, new)):
            continue
        change = RecipeChange(key, old, new, treatment(key))
        changes.append(change)
        if change.treatment == "fixed":
            what = "that corpus" if key.startswith(CORPORA) else "the old value"
            problems.append(
                f"{change}; it is part of what this run is: put {what} back, or start a new"
                " run (run=<name> init_from=<this run>@<step>)"
            )
        elif change.treatment == "deliberate" and not any(_covers(a, key) for a in allowed):
            problems.append(
                f"{change}; it changes the run from here on: put the old value back, or allow it by"
                f" name with allow=[{key}]"
            )
    return ChangeVerdict(problems, changes)


def treatment(key: str) -> str:
    """Return fixed, deliberate or free."""
    if any(_covers(pattern, key) for pattern in FIXED):
        return "fixed"
    if any(_covers(pattern, key) for pattern in FREE):
        return "free"
    return "deliberate"


def flatten(values: Mapping, prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value}, for all values that are not mappings."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{key}.")
        elif not isinstance(value, Mapping):
            flat[key] = value
    return flat


def _is_default(key: str, value: Any) -> bool:
    """Return whether the value of a dotted knob is its default."""
    place: Any = Recipe
    *groups, name = key.split(".")
    for group in groups:
        if typing.get_origin(place) is dict:  # sources: the user chose the name of the group
            place = typing.get_args(place)[1]
        else:
            place = typing.get_type_hints(place).get(group) if place else None
    fields = dataclasses.fields(place) if dataclasses.is_dataclass(place) else ()
    for field in fields:
        if field.name == name:
            has_factory = field.default_factory is not dataclasses.MISSING
            return _same(field.default_factory() if has_factory else field.default, value)
    return False


def _covers(pattern: str, key: str) -> bool:
    """Return whether `key` is `pattern` or lies under it."""
    wanted, names = pattern.split("."), key.split(".")
    return len(wanted) <= len(names) and all(
        w in ("*", n) for w, n in zip(wanted, names, strict=False)
    )


def _bad_allowance(name: str, keys: Iterable[str]) -> str | None:
    if "*" in name:
        return f"allow=[{name}]: changes are allowed by name; give each one, or its group"
    under = [key for key in keys if _covers(name, key)]
    if not under:
        return f"allow=[{name}]: no knob has this name; `make knobs` lists them"
    if all(treatment(key) == "fixed" for key in under):
        return f"allow=[{name}]: this cannot change within a run; start a new one (init_from=...)"
    return None


def _same(old: Any, new: Any) -> bool:
    """Return whether two values are equal as JSON: a tuple is a list, 1 is 1.0, 1 is not True."""
    if isinstance(old, bool) != isinstance(new, bool):
        return False
    return old == new or json.dumps(old, default=str) == json.dumps(new, default=str)


def _shown(value: Any) -> str:
    return value if value == ABSENT else json.dumps(value, default=str)
