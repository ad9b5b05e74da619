"""Exact reading of the values that a person gives, and the declaration of a knob.

Rule: a value is read exactly or refused, never changed into another one; 1.5 steps, true and nan
are not counts.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import field
from decimal import Decimal, InvalidOperation
from typing import Any

from base.errors import UserError

# Above this a float no longer holds every whole number, so 1e17 may not be what was meant.
LARGEST_EXACT_FLOAT = 2**53
LARGEST_INT = 2**63 - 1  # what numpy, torch and the files hold
# Limits far beyond any run, so that arithmetic on a slip of the finger stays exact and quick.
MANY = 2**40  # tokens, steps
WIDE = 2**24  # sizes of a model
# No count in training has more digits; "1e999999999" would fill the memory as an int.
LARGEST_EXPONENT = 30
ALIKE = 0.67  # `dropout` is not `recompute` (0.65); `16` may be `bf16`
LONGEST_SHOWN = 200  # characters of a value in a message


def as_int(value: Any) -> int:
    """A whole number as an exact int: 8, 5e8, "8" and "5e8" are; 1.5, true and nan are not.

    NumPy's integers and floats count as Python's. Raises ValueError with the reason, to be put
    behind `knob=value`.
    """
    value = _of_python(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST_INT:
            raise ValueError("is too large for any count")
        return value
    if isinstance(value, bool) or not isinstance(value, float | str):
        raise ValueError("is not a whole number")
    try:
        exact = Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError("is not a whole number") from None
    if not exact.is_finite() or exact.adjusted() > LARGEST_EXPONENT:
        raise ValueError("is not a finite number")
    if exact != exact.to_integral_value():
        raise ValueError("is not a whole number")
    if isinstance(value, float) and abs(value) > LARGEST_EXACT_FLOAT:
        raise ValueError("is too large to be exact in this notation; write all digits")
    return int(exact)


def as_float(value: Any) -> float:
    """A finite number as a float: 3e-4, 1 and "3e-4" are; true, nan and inf are not.

    Raises ValueError with the reason, to be put behind `knob=value`.
    """
    value = _of_python(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("is not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _of_python(value: Any) -> Any:
    """The Python number equal to a NumPy one; all else as it is."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def as_written(value: Any) -> str:
    """A value in the notation of recipes, for messages: null, true, [a, 1]; shortened if long."""
    if isinstance(value, str | float):
        text = repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str).replace('"', "")
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def read_ranks(variable: str, text: str) -> int:
    """A number of ranks given as text. Raises UserError that names the `variable`."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise UserError(f"{variable}={text[:80]!r} is not a number of ranks; give 1 or more")
    return int(text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `2 ranks`; a large number with commas."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], most: int) -> str:
    """`a, b and 5 more`. Never "and 1 more": one name beyond `most` is as short as its count."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def first_of(lines: Sequence[str], most: int, noun: str) -> list[str]:
    """The first `most` lines, then one line that counts the others; one line beyond is shown."""
    if len(lines) <= most + 1:
        return list(lines)
    return [*lines[:most], f"... and {len(lines) - most:,} more {noun}"]


def split_arguments(variable: str, text: str) -> list[str]:
    """Arguments given as one text, split by the shell's rules for quotes and blanks.

    Nothing is expanded. Raises UserError that names the `variable`.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{variable}={text!r}: {str(error).lower()}; close it") from None


def read_steps(text: str) -> range:
    """Steps given as text: 10:15 is 10, 11, 12, 13, 14. Raises ValueError with the reason."""
    first, colon, end = text.partition(":")
    if not colon or not all(part.isascii() and part.isdigit() for part in (first, end)):
        raise ValueError("is not a range of steps; write A:B, such as 10:15 for steps 10 to 14")
    if len(text) > 40 or not 1 <= int(first) < int(end):
        raise ValueError("holds no step; steps count from 1, and B is the first step after them")
    return range(int(first), int(end))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean x?` for the nearest known dotted name, else `.`.

    The last part counts: `lr` is near `optim.lr`, and `model.x` is near nothing.
    """

    def likeness(full: str) -> tuple[float, int]:
        last = _likeness(name.rpartition(".")[2], full.rpartition(".")[2])
        return last + 0.05 * _likeness(name, full), -len(full)

    best = max(known, key=likeness, default=None)
    return f"; did you mean {best}?" if best and likeness(best)[0] >= ALIKE else "."


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()


def knob(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    choices=(),
    low=None,
    high=None,
    above=None,
    below=None,
    kind="",
):
    """A dataclass field of a recipe with its documentation and range.

    Legal values satisfy `low <= value <= high` and `above < value < below`; `choices` are all
    legal texts; `default` REQUIRED means that the recipe must give a value. `kind` is
    the type in words, where the annotation does not show it.
    """
    metadata = dict(meaning=meaning, unit=unit, choices=tuple(choices), kind=kind)
    metadata |= dict(low=low, high=high, above=above, below=below)
    if default is REQUIRED:
        return field(metadata=metadata, kw_only=True)
    if isinstance(default, (list, dict)):
        return field(
            default_factory=lambda: type(default)(default), metadata=metadata, kw_only=True
        )
    return field(default=default, metadata=metadata, kw_only=True)


REQUIRED = object()
