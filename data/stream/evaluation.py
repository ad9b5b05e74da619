"""The evaluation set: the first windows of each source's validation split.

Rule: the set depends on the corpora, the mixture and `eval_tokens` alone, so every layout evaluates
on the same windows, and each window counts once. Arrays are (n,) int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from base.errors import UserError
from base.values import counted
from data.corpus.shards import Split
from data.stream.mixture import Stages
from data.stream.samples import Samples
from data.stream.sources import num_windows
from data.stream.windows import Batch, make_batches, own_positions

FEW_DOCUMENTS = 20  # the mean loss of fewer moves by several per cent with their choice


def evaluation_set(
    splits: Sequence[Split | None], mixture: Stages, seq_len: int, eval_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(source, first token in its validation split) of the samples. Raises UserError where there is
    nothing to evaluate on.
    """
    wanted = eval_tokens // seq_len
    if wanted < 1:
        raise UserError(
            f"eval_tokens={eval_tokens} is less than one sequence of seq_len={seq_len}; "
            "raise it, or set 0 for no evaluation"
        )
    available = [num_windows(split, seq_len) for split in splits]
    taken = np.minimum(mixture.first_draws(wanted), available)
    if not taken.sum():
        raise UserError(
            f"eval_tokens={eval_tokens}: no source has {seq_len + 1} held-out tokens; "
            "build a corpus with a validation split, or set eval_tokens=0 for no evaluation"
        )
    start = np.concatenate([np.arange(count) * seq_len for count in taken])
    return np.repeat(np.arange(len(taken)), taken), start


def few_documents(num_documents: int) -> list[str]:
    """A warning where so few documents are held out that their loss is mostly chance."""
    if num_documents >= FEW_DOCUMENTS:
        return []
    held_out = "is" if num_documents == 1 else "are"
    return [
        f"only {counted(num_documents, 'document')} {held_out} held out for validation: its loss"
        " depends on their kind of text. Hold out more: build the corpus with valid=0.05"
        " (make corpus OVERRIDES=valid=0.05) or name documents in held_out"
    ]


def evaluation_batches(
    valid: Samples,
    source: np.ndarray,
    start: np.ndarray,
    data_rank: int,
    data_size: int,
    micro_batch: int,
    attend: str,
) -> list[Batch]:
    """One rank's micro-batches of the set, as many as each other rank has; rows that fill them up
    have no targets.
    """
    slab = data_size * micro_batch
    mine = own_positions(-(-len(source) // slab) * slab, data_rank, data_size, micro_batch)
    row, position = valid.document_starts(source, start)
    real = mine[mine < len(source)]
    tokens, hashes = valid.read(source[real], start[real])
    padding = len(mine) - len(real)  # stands at the end: positions ascend
    tokens = np.pad(tokens, ((0, padding), (0, 0)))
    hashes = np.pad(hashes, (0, padding))
    rows = valid.rows(tokens, hashes, source, row, position, mine)
    return make_batches(rows, micro_batch, attend, is_padding=mine >= len(source))
