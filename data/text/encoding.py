"""Text to ids in a worker: by `tokenizers`, the reference, or by `gigatoken` with equal ids.

Rule: the ids are those of `tokenizers`. `gigatoken` (an optional extra, `pip install gigatoken`) is
used only after it gave equal ids for a probe and the first documents of the input. One document in
`RECHECK` is compared again. Any difference ends its use, and the log reports it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from base.errors import UserError
from data.corpus.documents import pieces_of
from data.corpus.tokenizer import PROBE, TextTokenizer

ENCODE_CHARS = 1 << 20  # text encoded at once: bounds the memory of a worker
RECHECK = 512


class EngineDiffers(Exception):
    """`gigatoken` gave other ids than `tokenizers`."""


class Encoder:
    """Documents to ids, int64 (n,) each, without any token added."""

    def __init__(self, tokenizer: TextTokenizer, engine: str):
        self.tokenizer, self.engine = tokenizer, engine
        self._fast = _load_fast(tokenizer) if engine == "gigatoken" else None
        self._since_check = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text. Raises EngineDiffers where the fast engine gives other ids."""
        if self._fast is None:
            return _in_pieces(texts, self.tokenizer.encode)
        found = _in_pieces(texts, self._encode_fast)
        for text, ids in zip(texts, found, strict=True):
            self._since_check += 1
            if self._since_check >= RECHECK:
                self._since_check = 0
                expected = _in_pieces([text], self.tokenizer.encode)[0]
                if not np.array_equal(expected, ids):
                    raise EngineDiffers(text[:80])
        return found

    def _encode_fast(self, pieces: list[str]) -> list[np.ndarray]:
        # It would read the string of a special token as that token.
        slow = [i for i, piece in enumerate(pieces) if self.tokenizer.count_specials(piece)]
        fast = [piece for i, piece in enumerate(pieces) if i not in set(slow)] if slow else pieces
        rows = self._fast.encode_batch(fast, parallel=False).layout if fast else None
        found = []
        if rows is not None:
            flat = np.asarray(rows.content.data)
            edges = np.asarray(rows.offsets.data)
            found = np.split(flat[edges[0] : edges[-1]], edges[1:-1] - edges[0])
        for at, ids in zip(slow, self.tokenizer.encode([pieces[i] for i in slow]), strict=True):
            found.insert(at, ids)
        return found


def choose_engine(tokenizer: TextTokenizer, wanted: str, sample: Sequence[str]) -> tuple[str, str]:
    """(engine, note for the log): the fast one where it is wanted, installed, and gives equal ids
    for the sample.

    Raises UserError where it was asked for by name and is not installed.
    """
    if wanted == "tokenizers":
        return wanted, ""
    if importlib.util.find_spec("gigatoken") is None:
        if wanted == "gigatoken":
            raise UserError(
                "engine=gigatoken: is not installed; pip install gigatoken, or leave engine out"
            )
        return "tokenizers", ""
    texts = [PROBE, *sample]
    try:
        fast = Encoder(tokenizer, "gigatoken").encode(texts)
    except EngineDiffers:
        fast = None
    except Exception as error:  # the library may raise anything for a tokenizer it cannot take
        return "tokenizers", f"gigatoken cannot take this tokenizer ({error}); using tokenizers"
    slow = _in_pieces(texts, tokenizer.encode)
    if fast is None or not all(np.array_equal(a, b) for a, b in zip(fast, slow, strict=True)):
        return "tokenizers", "gigatoken gives other ids on a sample of the input; using tokenizers"
    return "gigatoken", f"gigatoken gives equal ids on the probe and {len(sample)} documents"


def _load_fast(tokenizer: TextTokenizer):
    import gigatoken

    return gigatoken.Tokenizer.from_json(tokenizer.definition)


def _in_pieces(texts: Sequence[str], encode) -> list[np.ndarray]:
    """Encode long texts in pieces, and not more than about ENCODE_CHARS at once."""
    pieces, owners = [], []
    for number, text in enumerate(texts):
        for piece in pieces_of(text):
            pieces.append(piece)
            owners.append(number)
    parts: list[list[np.ndarray]] = [[] for _ in texts]
    start = 0
    while start < len(pieces):
        stop, size = start, 0
        while stop < len(pieces) and (stop == start or size + len(pieces[stop]) <= ENCODE_CHARS):
            size += len(pieces[stop])
            stop += 1
        for owner, ids in zip(owners[start:stop], encode(pieces[start:stop]), strict=True):
            parts[owner].append(ids)
        start = stop
    return [some[0] if len(some) == 1 else np.concatenate(some) for some in parts]
