"""Lists the layouts that must train alike: all for `make matrix`, a pairwise cover for the suite.

The name of a case is its text, `t2 p1 c1 d2 z3 a4 sequence tied full fp32`. Does not import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields

MOST_RANKS = 8
# Largest relative difference of a bf16 loss from the fp32 loop: a loss is a mean over tokens
# whose logits carry 8 bits; measured over the cover: 6e-5 at most.
BF16_BOUND = 5e-4


@dataclass(frozen=True)
class Case:
    """Sizes of the axes and the knobs that must not change a number."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    stage: int = 1
    accumulation: int = 1
    sequence: bool = True
    tied: bool = False
    recompute: str = "none"
    precision: str = "fp32"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def name(self) -> str:
        letters = zip("tpcdza", astuple(self)[:6], strict=True)
        words = [f"{letter}{size}" for letter, size in letters]
        words += ["sequence" if self.sequence else "whole", "tied" if self.tied else "untied"]
        return " ".join([*words, self.recompute, self.precision])

    @property
    def is_legal(self) -> bool:
        """True where the matrix has the case; a knob without effect makes no new case."""
        if self.pipeline > 1 and (self.stage > 1 or self.context > 1):
            return False
        return self.world <= MOST_RANKS and (self.sequence or self.tensor > 1)


def parse(name: str) -> Case:
    """Read a case from its name."""
    *sizes, sequence, tied, recompute, precision = name.split()
    numbers = [int(word[1:]) for word in sizes]
    return Case(*numbers, sequence == "sequence", tied == "tied", recompute, precision)


CHOICES = {
    "tensor": (1, 2),
    "pipeline": (1, 2, 4),
    "context": (1, 2),
    "data": (1, 2),
    "stage": (1, 2, 3),
    "accumulation": (1, 4),
    "sequence": (True, False),
    "tied": (False, True),
    "recompute": ("none", "full"),
    "precision": ("fp32", "bf16"),
}


def every() -> Iterator[Case]:
    """All cases of the matrix."""
    for values in itertools.product(*CHOICES.values()):
        case = Case(*values)
        if case.is_legal:
            yield case


def pairs(case: Case) -> set[tuple]:
    """All pairs of values of a case."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return set(itertools.combinations(values, 2))


def cover(cases: Iterable[Case]) -> list[Case]:
    """Choose a small part of `cases` that has every pair of values of all cases.

    Greedy: takes the case with the most missing pairs each time, the first one of equals.
    """
    cases = list(cases)
    open_pairs = set().union(*map(pairs, cases))
    chosen = []
    while open_pairs:
        best = max(cases, key=lambda case: len(pairs(case) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen
