"""`make knobs`: lists every knob of a recipe and every key of the DeepSpeed JSON.

    python -m commands.knobs --find lr

Prints name, type, default, legal values and meaning of the knobs whose name or meaning contains
the text. The list is read from the schema and the key table themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from base.command_line import Parser, refuse
from base.errors import UserError
from base.table import table
from recipes.check import knob_names
from recipes.compose import GROUPS, group_options
from runtime.ds_config.keys import KEYS, OWNED


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog="make knobs", description=__doc__)
    parser.add_argument("--find", default="", help="text in the name or the meaning")
    wanted = parser.parse_args(arguments).find.lower()
    rows = [row for row in all_rows() if wanted in row[0].lower() or wanted in row[-1].lower()]
    if not rows:
        problem = f"FIND={wanted}: no knob has this in its name or meaning; make knobs lists all"
        return refuse(UserError(problem))
    print(table([["knob", "type", "default", "legal", "meaning"], *rows], indent=""))
    return 0


def all_rows() -> list[list[str]]:
    """Rows [name, type, default, legal values, meaning with unit], config groups first."""
    rows = [
        [
            group,
            "config group option",
            "",
            " | ".join(group_options(group)),
            f"a file of recipes/{group}/",
        ]
        for group in GROUPS
    ]
    for name, field in knob_names().items():
        data = field.metadata
        unit = f" [{data['unit']}]" if data["unit"] else ""
        rows.append([name, _kind(field), _default(field), _legal(data), data["meaning"] + unit])
    for key, rule in KEYS.items():
        if key not in OWNED:
            legal = " | ".join(map(str, rule.choices))
            legal = legal or _legal(vars(rule) | {"above": None, "below": None})
            stages = (
                "" if len(rule.stages) == 3 else f" (ZeRO {' or '.join(map(str, rule.stages))})"
            )
            rows.append([f"ds.{key}", rule.kind.__name__, "preset", legal, rule.meaning + stages])
    return rows


def _kind(field: dataclasses.Field) -> str:
    kind = str(field.type).replace(" | None", "?").replace("dict[str, Any]", "dict")
    return "int or text" if kind == "Any" else kind


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    return "{}" if field.default_factory is not dataclasses.MISSING else "required"


def _legal(data) -> str:
    if data["choices"]:
        return " | ".join(data["choices"])
    marks = {"low": ">=", "above": ">", "high": "<=", "below": "<"}
    return ", ".join(
        f"{mark} {_bound(data[name])}" for name, mark in marks.items() if data[name] is not None
    )


def _bound(number: float) -> str:
    """Text of a bound. Powers of two above a million stay powers: 2^40, not 1.09951e+12."""
    power = round(math.log2(number)) if number > 1e6 else 0
    for less in (0, 1):
        if power and number == 2**power - less:
            return f"2^{power}{' - 1' * less}"
    return f"{number:g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
