"""The batch schedule: the sequences that step N trains on, and the length at which the model sees
them. Constant or piecewise constant, computed by prefix sums.

Rule: everything is a function of the step, so a ramp never starts over. Step N >= 1 is the N-th
update of the weights; it uses data step d = N - 1 and the sequences [a, b) of the order.

A warm-up of the sequence length (`seq_len_warmup`) moves no token: batches, micro-batches and their
order are those of sequences of `seq_len` tokens, which are cut into equal parts for the model.

Units: users give tokens per step (`batch_tokens`); here they become sequences of `seq_len` tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from base.errors import UserError
from recipes.schema import Recipe, batch_ramp


@dataclass(frozen=True)
class Schedule:
    """Sequences per step, by pieces: piece i holds from data step starts[i] (starts[0] = 0) up to
    the next start.
    """

    seq_len: int
    starts: tuple[int, ...]
    sequences: tuple[int, ...]
    before: tuple[int, ...]  # sequences used before each piece
    # (first data step, tokens that the model sees at once) of a warm-up; () = always seq_len
    lengths: tuple[tuple[int, int], ...] = ()

    def sequences_at(self, step: int) -> int:
        """Sequences of the global batch of step N >= 1."""
        return self.sequences[self._piece(step - 1)]

    def sample_range(self, step: int) -> tuple[int, int]:
        """The sequences [a, b) that step N >= 1 trains on, counted from the start of the run."""
        first = self.sequences_before(step - 1)
        return first, first + self.sequences_at(step)

    def tokens_after(self, step: int) -> int:
        """Tokens that the first N steps train on; 0 for N = 0."""
        return self.sequences_before(step) * self.seq_len

    def length_at(self, data_step: int) -> int:
        """Tokens that the model sees at once in a data step; it divides `seq_len`."""
        number = bisect_right(self.lengths, (data_step, self.seq_len))
        return self.lengths[number - 1][1] if number else self.seq_len

    def cut_before(self, data_step: int) -> tuple[tuple[int, int], ...]:
        """The pieces of the warm-up that begin before a data step; () where nothing was cut."""
        return tuple(piece for piece in self.lengths if piece[0] < data_step)

    def tokens_by_length(self, steps: int) -> dict[int, int]:
        """Tokens of the first N steps by the length of their sequences."""
        if not self.lengths:
            return {self.seq_len: self.tokens_after(steps)}
        starts = [min(start, steps) for start, _ in self.lengths]
        ends = [*starts[1:], steps]
        return {
            length: self.tokens_after(end) - self.tokens_after(start)
            for (_, length), start, end in zip(self.lengths, starts, ends, strict=True)
        }

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that train on at least `tokens` tokens."""
        wanted = -(-tokens // self.seq_len)
        piece = max(bisect_right(self.before, wanted - 1) - 1, 0)
        return self.starts[piece] + -(-(wanted - self.before[piece]) // self.sequences[piece])

    def data_steps_of(self, sequence: np.ndarray) -> np.ndarray:
        """The data steps that hold the given sequences of the run; arrays (n,) int64."""
        sequence = np.asarray(sequence, dtype=np.int64)
        piece = np.searchsorted(self.before, sequence, side="right") - 1
        starts, before, size = map(np.array, (self.starts, self.before, self.sequences))
        return starts[piece] + (sequence - before[piece]) // size[piece]

    def fingerprint(self) -> str:
        """SHA-256 of the pieces: equal exactly when every step trains on the same sequences."""
        warmup = [self.lengths] if self.lengths else []
        text = json.dumps([self.seq_len, self.starts, self.sequences, *warmup])
        return hashlib.sha256(text.encode()).hexdigest()

    def end_of_piece(self, data_step: int) -> int:
        """The data step at which the batch changes its size next."""
        following = self._piece(data_step) + 1
        return self.starts[following] if following < len(self.starts) else 2**62

    def _piece(self, data_step: int) -> int:
        assert data_step >= 0, "steps count from 1"
        return bisect_right(self.starts, data_step) - 1

    def sequences_before(self, data_step: int) -> int:
        """Sequences of data steps [0, data_step)."""
        piece = self._piece(data_step)
        return self.before[piece] + (data_step - self.starts[piece]) * self.sequences[piece]


def schedule_of(recipe: Recipe) -> Schedule:
    """The schedule of a recipe."""
    return read_schedule(recipe.batch_tokens, recipe.seq_len, recipe.seq_len_warmup or ())


def read_schedule(batch_tokens: Any, seq_len: int, seq_len_warmup: Any = ()) -> Schedule:
    """The schedule a recipe describes: tokens per step, or a ramp [[step, tokens], ...] from data
    step 0 on; and a ramp of lengths that `recipes.rules` has found to be one.

    Raises UserError with every problem and the nearest legal values.
    """
    is_ramp = isinstance(batch_tokens, list | tuple)
    pieces = list(batch_ramp(batch_tokens))
    problems = _shape_problems(batch_tokens, pieces)
    if not problems:
        problems = _start_problems(batch_tokens, [start for start, _ in pieces])
        for number, (_, tokens) in enumerate(pieces):
            problems += _token_problems(
                f"batch_tokens[{number}][1]" if is_ramp else "batch_tokens", tokens, seq_len
            )
    if problems:
        raise UserError(*problems)
    starts = tuple(start for start, _ in pieces)
    sequences = tuple(tokens // seq_len for _, tokens in pieces)
    before = [0]
    for (low, high), count in zip(pairwise(starts), sequences, strict=False):
        before.append(before[-1] + (high - low) * count)
    # Neighbours of equal size are one piece: the fingerprint is of what happens, not of how it was
    # written.
    kept = [i for i in range(len(pieces)) if i == 0 or sequences[i] != sequences[i - 1]]
    lengths = tuple((step, length) for step, length in seq_len_warmup)
    assert all(seq_len % length == 0 for _, length in lengths)
    return Schedule(
        seq_len,
        *(tuple(column[i] for i in kept) for column in (starts, sequences, before)),
        lengths if len(lengths) > 1 else (),
    )


def _shape_problems(batch_tokens: Any, pieces: list) -> list[str]:
    def is_count(value):
        return isinstance(value, int) and not isinstance(value, bool)

    is_right = pieces and all(
        isinstance(piece, list | tuple) and len(piece) == 2 and all(map(is_count, piece))
        for piece in pieces
    )
    if is_right:
        return []
    return [
        f"batch_tokens={batch_tokens!r} is neither a whole number of tokens per step nor a ramp "
        "[[step, tokens], ...] of whole numbers, such as [[0, 16384], [1000, 65536]]"
    ]


def _start_problems(batch_tokens: Any, starts: list[int]) -> list[str]:
    problems = []
    if starts[0] != 0:
        problems.append(f"batch_tokens={batch_tokens!r}: a ramp begins at step 0, not {starts[0]}")
    if any(low >= high for low, high in pairwise(starts)):
        problems.append(
            f"batch_tokens={batch_tokens!r}: the steps {starts} of a ramp must increase"
        )
    return problems


def _token_problems(knob: str, tokens: int, seq_len: int) -> list[str]:
    if tokens > 0 and tokens % seq_len == 0:
        return []
    low = max(tokens // seq_len, 0) * seq_len
    nearest = f"{low} or {low + seq_len}" if low else f"{seq_len}"
    return [f"{knob}={tokens} is not a positive multiple of seq_len {seq_len}; nearest: {nearest}"]
