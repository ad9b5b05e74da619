"""The evaluation set: the first windows of each source's validation split.

Rule: the set depends on the corpora, the mixture and `eval_tokens` alone, so every layout evaluates
on the same windows, and each window counts once. A micro-batch holds windows of one source, so that
each source has a loss of its own. Arrays are (n,) int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from base.errors import UserError
from base.values import counted
from data.corpus.corpus import Corpus
from data.corpus.shards import Split
from data.corpus.token_bytes import TokenBytes, token_bytes
from data.corpus.tokenizer import load_tokenizer
from data.stream.mixture import Stages
from data.stream.samples import Samples
from data.stream.sources import num_windows
from data.stream.windows import Batch, make_batches, own_positions

FEW_DOCUMENTS = 20  # the mean loss of fewer moves by several per cent with their choice


@dataclass(frozen=True)
class HeldOut:
    """One rank's micro-batches of the evaluation set; each rank has as many of each source."""

    batches: list[Batch]
    sources: list[int]  # of each micro-batch: its place in `uids`
    uids: list[str]  # the sources that have held-out windows

    def __len__(self) -> int:
        return len(self.batches)


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
        " depends on their kind of text. Hold out more: build the corpus with"
        " OVERRIDES=valid=0.05, or name documents in held_out"
    ]


def held_out(
    valid: Samples,
    source: np.ndarray,
    start: np.ndarray,
    data_rank: int,
    data_size: int,
    micro_batch: int,
    attend: str,
    uids: Sequence[str],
) -> HeldOut:
    """One rank's part of the set; `uids` are the names of all sources."""
    found = HeldOut([], [], [])
    for number in np.unique(source).tolist():
        own, place = source == number, (data_rank, data_size, micro_batch)
        batches = evaluation_batches(valid, source[own], start[own], *place, attend)
        found.batches.extend(batches)
        found.sources.extend([len(found.uids)] * len(batches))
        found.uids.append(uids[number])
    return found


def evaluation_batches(
    valid: Samples,
    source: np.ndarray,
    start: np.ndarray,
    data_rank: int,
    data_size: int,
    micro_batch: int,
    attend: str,
) -> list[Batch]:
    """One rank's micro-batches of the windows, as many as each other rank has; rows that fill them
    up have no targets.
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


def target_bytes(
    valid: Samples, source: np.ndarray, start: np.ndarray, corpora: Sequence[Corpus], attend: str
) -> list[int] | None:
    """UTF-8 bytes of the text of all targets, a number for each source of the set, in order.

    None where they are not known: a corpus without a tokenizer, or text that is unknown to it.
    """
    found: list[int] = []
    sizes: dict[str | None, TokenBytes | None] = {}
    for number in np.unique(source).tolist():
        corpus, own = corpora[number], source == number
        made_with = corpus.tokenizer_fingerprint
        if made_with is None:
            return None
        if made_with not in sizes:
            sizes[made_with] = token_bytes(load_tokenizer(corpus.tokenizer_folder, needs_end=False))
        separators = {corpus.begin_id, corpus.eod_id} - {None}
        (batch,) = evaluation_batches(valid, source[own], start[own], 0, 1, int(own.sum()), attend)
        table = sizes[made_with]
        count = table and table.count(batch.input_ids, batch.labels, separators)
        if count is None:
            return None
        found.append(count)
    return found
