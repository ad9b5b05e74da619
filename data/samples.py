"""Samples of several sources: their document starts and their token ids, checked as they are read.

Knows where a sample lies (source, first token) and nothing of steps or ranks. Its one rule: an id
outside the model's vocabulary, or a document start that no end id precedes, is refused before use.

Units: a sample is `seq_len` tokens and one more, its last target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.corpus import Corpus
from data.ledger import sample_hashes
from data.shards import groups
from data.windows import Rows
from recipes.schema import UserError


class Samples:
    """Reads samples from one split ("train" or "valid") of numbered sources."""

    def __init__(
        self,
        uids: Sequence[str],
        corpora: Sequence[Corpus],
        split: str,
        seq_len: int,
        vocab_size: int,
    ):
        self.uids, self.corpora, self.seq_len, self.vocab_size = uids, corpora, seq_len, vocab_size
        self.splits = [corpus.splits.get(split) for corpus in corpora]

    def document_starts(self, source: np.ndarray, start: np.ndarray) -> tuple:
        """(row, position) of the documents that start in each sample, ascending; reads no token.

        source, start: (n,) int64, source number and first token of each sample.
        """
        found = []
        for number, which in groups(source):
            row, position = self.splits[number].document_starts(start[which], self.seq_len + 1)
            found.append((which[row], position))
        if len(found) == 1:
            return found[0]
        row, position = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(row, kind="stable")
        return row[order], position[order]

    def read(self, source, start, start_row, start_position, mine: np.ndarray) -> Rows:
        """The samples numbered `mine`, with the document starts that `document_starts` found for
        all.

        A number past the last sample gives a row of zeros without documents: padding.
        """
        place = np.full(max(len(source), int(mine.max()) + 1), -1)
        place[mine] = np.arange(len(mine))
        is_mine = place[start_row] >= 0
        row, position = place[start_row[is_mine]], start_position[is_mine]
        real = np.flatnonzero(mine < len(source))
        owner, first = source[mine[real]], start[mine[real]]
        tokens = np.zeros((len(mine), self.seq_len + 1), dtype=np.int32)
        for number, which in groups(owner):
            ids = self.splits[number].read(first[which], self.seq_len + 1)
            self._refuse_foreign_ids(number, ids)
            tokens[real[which]] = ids
        hashes = np.zeros(len(mine), dtype=np.uint64)
        hashes[real] = sample_hashes(tokens[real] if len(real) < len(mine) else tokens)
        self._refuse_loose_starts(tokens, row, position, owner[np.searchsorted(real, row)])
        return Rows(tokens, row, position, hashes)

    def _refuse_foreign_ids(self, number: int, ids: np.ndarray) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise UserError(
                f"data.sources.{self.uids[number]}: found token id {low if low < 0 else high}, "
                f"expected ids from 0 to {self.vocab_size - 1} "
                f"(model.vocab_size={self.vocab_size}); the shards do not match the manifest, "
                "build the corpus again"
            )

    def _refuse_loose_starts(self, tokens, row, position, owner) -> None:
        end_id = np.array([corpus.eod_id for corpus in self.corpora])[owner]
        wrong = np.flatnonzero((position >= 1) & (tokens[row, position - 1] != end_id))
        if len(wrong):
            at = wrong[0]
            raise UserError(
                f"{self.corpora[owner[at]].folder}: expected the end id {end_id[at]} before a "
                f"document start of the index, found {tokens[row[at], position[at] - 1]}: an .idx "
                "does not belong to its .bin; restore the corpus or build it again"
            )
