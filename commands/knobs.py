"""`make knobs`: lists every knob of a recipe and every key of the DeepSpeed JSON, by groups.

    python -m commands.knobs --find lr

Prints name, type, default, legal values and meaning of the knobs whose name or meaning contains
the text, as wide as the terminal. The list is read from the schema and the key table themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from base.command_line import Parser, refuse
from base.errors import UserError
from recipes.check import knob_names
from recipes.compose import group_options
from recipes.overrides import GROUPS
from recipes.schema import Recipe
from runtime.ds_config.keys import KEYS, OWNED

# Types as people name them.
TYPES = {"int": "integer", "float": "number", "bool": "true or false", "str": "text",
         "dict[str, Any]": "keys and values"}  # fmt: skip
RUN, JSON_KEYS = "run", "ds"  # the knobs without a group; the keys of the DeepSpeed JSON
NAME_WIDTH = 34  # characters; a longer name has a line of its own
NARROWEST = 60


class KnobRow(NamedTuple):
    """What is printed of one knob. `legal` is empty where the type says it all."""

    name: str
    kind: str
    default: str
    legal: str
    meaning: str

    @property
    def group(self) -> str:
        """Group under which the knob is printed."""
        first, dot, _ = self.name.partition(".")
        return first if dot else RUN


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog="make knobs", description=__doc__)
    parser.add_argument("--find", default="", help="text in the name or the meaning")
    wanted = parser.parse_args(arguments).find.lower()
    rows = [
        row for row in all_rows() if wanted in row.name.lower() or wanted in row.meaning.lower()
    ]
    if not rows:
        problem = f"FIND={wanted}: no knob has this in its name or meaning; make knobs lists all"
        return refuse(UserError(problem))
    width = max(shutil.get_terminal_size((100, 24)).columns, NARROWEST)
    print("\n".join(listing(rows, width)))
    return 0


def all_rows() -> list[KnobRow]:
    """Rows of all knobs and of all keys of the DeepSpeed JSON that a recipe may set."""
    rows = []
    for name, field in knob_names().items():
        data = field.metadata
        unit = f" [{data['unit']}]" if data["unit"] else ""
        rows.append(KnobRow(name, _kind(field), _default(field), _legal(data),
                            data["meaning"] + unit))  # fmt: skip
    for key, rule in KEYS.items():
        if key not in OWNED:
            legal = " | ".join(map(str, rule.choices))
            legal = legal or _legal(vars(rule) | {"above": None, "below": None})
            stages = (
                "" if len(rule.stages) == 3 else f" (ZeRO {' or '.join(map(str, rule.stages))})"
            )
            kind = TYPES.get(rule.kind.__name__, rule.kind.__name__)
            rows.append(KnobRow(f"ds.{key}", kind, "preset", legal, rule.meaning + stages))
    return rows


def listing(rows: Sequence[KnobRow], width: int) -> list[str]:
    """Lines of at most `width` characters: each group with a heading, each knob with its facts."""
    groups: dict[str, list[KnobRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    lines = []
    for group, own in groups.items():
        lines += ["", *textwrap.wrap(heading(group), width)]
        for row in own:
            lines += entry(row, width)
    return lines[1:]


def heading(group: str) -> str:
    """Title of a group, and how it is chosen where it is a config group."""
    meanings = {field.name: field.metadata["meaning"] for field in dataclasses.fields(Recipe)}
    meanings[RUN] = "length, batches and precision of the run"
    text = f"{group.upper()}: {meanings.get(group, '')}"
    if group in GROUPS:
        text += (
            f" ({group}=NAME takes a file of recipes/{group}/: {', '.join(group_options(group))})"
        )
    return text


def entry(row: KnobRow, width: int) -> list[str]:
    """Lines of one knob: the name at the left, type, default, bounds and meaning beside it."""
    default = row.default if row.default in ("required", "preset") else f"default {row.default}"
    facts = "; ".join(filter(None, (row.kind, row.legal, default)))
    left = min(NAME_WIDTH, width // 2)
    texts = [*textwrap.wrap(facts, width - left), *textwrap.wrap(row.meaning, width - left)]
    if len(row.name) + 3 > left:
        return [f"  {row.name}", *(" " * left + text for text in texts)]
    first, *more = texts
    return [f"  {row.name}".ljust(left) + first, *(" " * left + text for text in more)]


def _kind(field: dataclasses.Field) -> str:
    kind, _, optional = str(field.type).partition(" | ")
    named = field.metadata["kind"] or TYPES.get(kind, kind)
    has_null = optional == "None" or (kind == "Any" and field.default is None)
    return f"{named}, or null" if has_null else named


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    return "{}" if field.default_factory is not dataclasses.MISSING else "required"


def _legal(data) -> str:
    if data["choices"]:
        return " | ".join(data["choices"])
    low, high = data["low"], data["high"]
    if low is not None and high is not None:
        parts = [f"{_bound(low)} to {_bound(high)}"]
    else:
        parts = [f"at least {_bound(low)}"] if low is not None else []
        parts += [f"at most {_bound(high)}"] if high is not None else []
    parts += [f"above {_bound(data['above'])}"] if data["above"] is not None else []
    parts += [f"below {_bound(data['below'])}"] if data["below"] is not None else []
    return ", ".join(parts)


def _bound(number: float) -> str:
    """Text of a bound. Powers of two above a million stay powers: 2^40, not 1.09951e+12."""
    power = round(math.log2(number)) if number > 1e6 else 0
    for less in (0, 1):
        if power and number == 2**power - less:
            return f"2^{power}{' - 1' * less}"
    return f"{number:g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
