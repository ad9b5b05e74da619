"""The number of text bytes that each token stands for, for losses in bits per byte.

    sizes = token_bytes(tokenizer)    sizes.count(input_ids, labels, ends)

Rule: the bytes are those of the text that the tokenizer decodes, in UTF-8. Tokens without text (the
end of a document) have 0 bytes. A token that holds a part of a character has as many bytes as it
holds. The first token of a document is counted without the space that some tokenizers put before a
document and take away again when they decode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from data.corpus.tokenizer import PROBE, TextTokenizer

ONE_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of byte fallback
NO_TARGET = 0  # labels below it are no target


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of each id; arrays are (vocab_size,) int64."""

    inside: np.ndarray  # behind another token of the document
    first: np.ndarray  # as the first token of a document
    unknown: int | None  # the id that stands for text which the vocabulary does not have

    def count(
        self, input_ids: np.ndarray, labels: np.ndarray, separators: Collection[int]
    ) -> int | None:
        """Bytes of the targets' text; None where a target stands for unknown text.

        input_ids, labels: (B, T) int64, labels[b, t] follows input_ids[b, t], negative labels are
        no target. separators: ids behind which a document begins.
        """
        is_target = labels >= NO_TARGET
        targets, before = labels[is_target], input_ids[is_target]
        if self.unknown is not None and (targets == self.unknown).any():
            return None
        is_first = np.isin(before, list(separators))
        return int(np.where(is_first, self.first[targets], self.inside[targets]).sum())


def token_bytes(tokenizer: TextTokenizer) -> TokenBytes | None:
    """The table of a tokenizer; None where its tokens do not add up to the text of a probe."""
    decoder = json.dumps(json.loads(tokenizer.definition).get("decoder") or {})
    inside, first = np.zeros((2, tokenizer.vocab_size), dtype=np.int64)
    pieces = tokenizer.pieces()
    ids = sorted(pieces.keys() - tokenizer.special_ids)
    if '"ByteLevel"' in decoder:
        # Each character of a piece stands for one byte; added tokens hold their own text.
        for number in ids:
            piece, is_added = pieces[number]
            inside[number] = first[number] = len(piece.encode()) if is_added else len(piece)
    else:
        anchor = int(tokenizer.encode(["a"])[0][-1])
        alone = len(tokenizer.decode([anchor]).encode())
        has_fallback = '"ByteFallback"' in decoder
        for number in ids:
            if has_fallback and ONE_BYTE.fullmatch(pieces[number][0]):
                inside[number] = first[number] = 1
                continue
            inside[number] = len(tokenizer.decode([anchor, number]).encode()) - alone
            first[number] = len(tokenizer.decode([number]).encode())
    sizes = TokenBytes(inside, first, tokenizer.unk_id)
    return sizes if _adds_up(sizes, tokenizer) else None


def _adds_up(sizes: TokenBytes, tokenizer: TextTokenizer) -> bool:
    """True where the probe's bytes are those of its decoded text; unknown text is left out."""
    texts = [PROBE, "a plain line, as most documents have"]
    for ids in tokenizer.encode(texts):
        if tokenizer.unk_id in ids:
            continue
        sizes_of = np.concatenate([sizes.first[ids[:1]], sizes.inside[ids[1:]]])
        if sizes_of.sum() != len(tokenizer.decode(ids).encode()):
            return False
    return True
