"""A composed recipe as a file: written once by the launcher, read by every rank and every restart.

    compose (launcher, once) -> composed_text -> file or order -> read_composed (each rank, attempt)

So recipes/ and the environment are read once, on one host. Ranks compare `digest`s before the first
step; where they differ, `differences` names knobs, values and hosts.

Rule: `resume` is an instruction of one start. It is not in the file, and not in the digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.values import as_written
from recipes.check import to_recipe
from recipes.schema import Recipe

VERSION = 1
OF_ONE_START = ("resume",)
ABSENT = "absent"


@dataclass(frozen=True)
class Composed:
    """A checked recipe, the origin of each dotted knob (absent: the default), and warnings."""

    recipe: Recipe
    origins: dict[str, str]
    warnings: list[str]
    file: Path  # of the recipe


def composed_text(composed: Composed) -> str:
    """The composed recipe as JSON, for `read_composed`. Values may be secret: keep it to the owner.

    The knobs of `OF_ONE_START` are left out; the reader gets their defaults.
    """
    content = {
        "version": VERSION,
        "file": str(composed.file),
        "digest": digest(composed.recipe),
        "recipe": plain(composed.recipe),
        "origins": composed.origins,
        "warnings": composed.warnings,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_composed(path: Path) -> Composed:
    """The composed recipe in a file of `composed_text`.

    Raises UserError for a file that is missing, damaged or of another version of the code.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        recipe, _ = to_recipe(content["recipe"], content["origins"], [])
        same = content["version"] == VERSION and content["digest"] == digest(recipe)
        found = Composed(recipe, content["origins"], content["warnings"], Path(content["file"]))
    except OSError as error:
        raise UserError(f"composed={path}: {error.strerror}; start the run again") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"composed={path}: no whole composed recipe of this version of the code ({error});"
            " start the run again with recipe=NAME"
        ) from None
    if not same:
        raise UserError(
            f"composed={path}: its digest is not that of its knobs: the file is damaged, or the"
            " code on this host is another version; start the run again with recipe=NAME"
        )
    return found


def plain(recipe: Recipe) -> dict[str, Any]:
    """Nested JSON values of all knobs but those of one start."""
    values = json.loads(json.dumps(dataclasses.asdict(recipe), allow_nan=False))
    return {name: value for name, value in values.items() if name not in OF_ONE_START}


def digest(recipe: Recipe) -> str:
    """16 hexadecimal digits for all knobs but those of one start."""
    return digest_of(plain(recipe))


def digest_of(values: Any) -> str:
    """16 hexadecimal digits for plain JSON values; the order of keys does not matter."""
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of nested plain values, such as those of `plain`; lists stay whole."""
    if not isinstance(values, dict) or (prefix and not values):
        return {prefix: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def differences(by_host: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each knob that is not equal on all hosts: `by_host` has host -> `flat` values.

    "optim.lr=0.001 on host-a, 0.002 on host-b, host-c"
    """
    names = sorted({name for values in by_host.values() for name in values})
    lines = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, values in by_host.items():
            shown = as_written(values[name]) if name in values else ABSENT
            hosts.setdefault(shown, []).append(host)
        if len(hosts) > 1:
            parts = (f"{shown} on {', '.join(held)}" for shown, held in hosts.items())
            lines.append(f"{name}=" + ", ".join(parts))
    return lines
