"""Samples of several sources: their document starts and their token ids, checked as they are read.

This module knows the place of a sample (source, first token) and nothing of steps or ranks.

Rule: an id outside the model's vocabulary is refused before use, and so is a document start without
an end id before it, where the corpus states that each document has one.

Units: a sample is `seq_len` tokens and one more, its last target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from base.errors import UserError
from data.corpus.corpus import Corpus
from data.corpus.shards import groups
from data.stream.ledger import sample_hashes
from data.stream.skips import FOREVER, Mask
from data.stream.windows import Rows


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
        types = {split.dtype for split in self.splits if split}
        self._dtype = types.pop() if len(types) == 1 else np.dtype(np.int32)
        self._end_ids = np.array([corpus.eod_id for corpus in corpora])
        # True for sources whose end id before a document is also its begin id.
        self.are_begun = np.array([c.is_begin_shared for c in corpora])
        has_ends = np.array([c.manifest["eod_policy"] == "append" for c in corpora])
        self._are_ended = has_ends | self.are_begun

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

    def damaged(self, source: np.ndarray, start: np.ndarray) -> np.ndarray:
        """True for samples that touch a block with a wrong hash, bool (n,); hashes new blocks."""
        is_damaged = np.zeros(len(source), dtype=bool)
        for number, which in groups(source):
            is_damaged[which] = self.splits[number].damaged(start[which], self.seq_len + 1)
        return is_damaged

    def token_range(self, number: int, mask: Mask) -> tuple[int, int]:
        """Tokens [first, end) of a source's split that a mask names.

        Raises UserError where the source has fewer documents, or the document fewer tokens.
        """
        split, (first, end) = self.splits[number], mask.documents
        if end > split.num_documents:
            raise UserError(
                f"data.skip.mask: documents {list(mask.documents)} of data.sources."
                f"{self.uids[number]}, which has {split.num_documents} to train on, numbered from 0"
            )
        low, high = split.document_range(first)[0], split.document_range(end - 1)[1]
        begin, stop = mask.tokens
        length, is_open = high - low, stop == FOREVER
        if begin >= max(length, 1) or (stop > length and not is_open):
            raise UserError(
                f"data.skip.mask: tokens [{begin}, {'null' if is_open else stop}] of document"
                f" {self.uids[number]}:{first}, which has {length}, numbered from 0: give [first,"
                f" end] within [0, {length}]; make audit RUN= DOC= TEXT=1 prints their numbers"
            )
        return low + begin, high if is_open else low + stop

    def read(self, source, start, is_damaged=None) -> tuple[np.ndarray, np.ndarray]:
        """(tokens (n, T + 1), hashes (n,) uint64) of samples, ids checked; tokens have the type
        of the shards, int32 where the sources differ.

        A damaged sample (bool, (n,)) is not read: its row is filled with the end id.
        """
        if is_damaged is None and len(source) and (source == source[0]).all():
            tokens = self._ids(int(source[0]), start)
            return tokens, sample_hashes(tokens)
        tokens = np.empty((len(source), self.seq_len + 1), dtype=self._dtype)
        is_read = np.ones(len(source), dtype=bool) if is_damaged is None else ~is_damaged
        tokens[~is_read] = self._end_ids[source[~is_read], None]
        for number, which in groups(np.where(is_read, source, -1)):
            if number >= 0:
                tokens[which] = self._ids(number, start[which])
        return tokens, sample_hashes(tokens)

    def rows(self, tokens, hashes, source, start_row, start_position, mine: np.ndarray) -> Rows:
        """Rows from the tokens and hashes of the batch's samples numbered `mine`.

        start_row, start_position: document starts of the whole batch; those in other samples are
        left out. A number past the last sample is a row without documents: padding.
        """
        row, position = start_row, start_position
        if not np.array_equal(mine, np.arange(len(source))):  # not the whole batch in order
            place = np.full(max(len(source), int(mine.max()) + 1), -1)
            place[mine] = np.arange(len(mine))
            row = place[start_row]
            row, position = row[row >= 0], start_position[row >= 0]
        owner = source[mine[row]]
        self._refuse_loose_starts(tokens, row, position, owner)
        return Rows(tokens, row, position, hashes, self.are_begun[owner])

    def _ids(self, number: int, start: np.ndarray) -> np.ndarray:
        ids = self.splits[number].read(start, self.seq_len + 1)
        self._refuse_foreign_ids(number, ids)
        return ids

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
        end_id = self._end_ids[owner]
        is_wrong = (position >= 1) & (tokens[row, position - 1] != end_id)
        wrong = np.flatnonzero(is_wrong & self._are_ended[owner])
        if len(wrong):
            at = wrong[0]
            raise UserError(
                f"{self.corpora[owner[at]].folder}: expected the end id {end_id[at]} before a "
                f"document start of the index, found {tokens[row[at], position[at] - 1]}: an .idx "
                "does not belong to its .bin; restore the corpus or build it again (imported with"
                " QUICK=1: import it without)"
            )
