"""Filters on documents: length, and shares of letters, digits and symbols.

Rule: a filter is a number in the manifest. A document that is dropped is counted under the first
filter that it fails, in the order of `REASONS`.

Shares are of the characters that are not white space: letters with their marks (Unicode L and M),
digits (N), symbols (all others). Units: characters.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import asdict, dataclass

import numpy as np

REASONS = ("too_short", "too_long", "few_letters", "many_digits", "many_symbols")
SPACE, LETTER, DIGIT, SYMBOL = range(4)


@dataclass(frozen=True)
class Filters:
    """Limits for documents; the defaults drop none."""

    min_chars: int = 0
    max_chars: int | None = None
    min_letters: float = 0.0
    max_digits: float = 1.0
    max_symbols: float = 1.0

    def reason(self, text: str) -> str | None:
        """The reason to drop a document; None to keep it."""
        if len(text) < self.min_chars:
            return "too_short"
        if self.max_chars is not None and len(text) > self.max_chars:
            return "too_long"
        if (self.min_letters, self.max_digits, self.max_symbols) == (0.0, 1.0, 1.0):
            return None
        _, letters, digits, symbols = class_counts(text)
        total = max(1, letters + digits + symbols)
        if letters < self.min_letters * total:
            return "few_letters"
        if digits > self.max_digits * total:
            return "many_digits"
        return "many_symbols" if symbols > self.max_symbols * total else None

    def as_dict(self) -> dict:
        return asdict(self)


def class_counts(text: str) -> list[int]:
    """Characters of each class: white space, letters, digits, symbols."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.bincount(_classes()[codes], minlength=4).tolist()


@functools.cache
def _classes() -> np.ndarray:
    """Class of every code point, uint8 (0x110000,)."""
    by_category = {"L": LETTER, "M": LETTER, "N": DIGIT, "Z": SPACE}
    table = np.full(0x110000, SYMBOL, dtype=np.uint8)
    for code in range(0x110000):
        char = chr(code)
        if char.isspace():
            table[code] = SPACE
        else:
            table[code] = by_category.get(unicodedata.category(char)[0], SYMBOL)
    return table
