"""Exact duplicates among documents, by a 16-byte digest of their text: the first in input order
stays.

Its one rule: memory is bounded, however many documents there are. The digests lie in files; they
are looked at in passes, each over the share of them that falls to it, with at most `PASS_DOCUMENTS`
new ones held at once (about 64 bytes each). Cost on disk: 16 bytes a document, and one byte for the
answer; a pass reads all digests once.

Two different texts count as equal with a chance of n * n / 2**129 for n documents (xxh3-128).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

PASS_DOCUMENTS = 8 << 20


def mark_first(
    digests: Callable[[], Iterable[np.ndarray]],
    num_documents: int,
    path: Path,
    pass_documents: int = PASS_DOCUMENTS,
) -> np.ndarray:
    """Which documents are the first with their digest: bool (num_documents,), mapped from `path`.

    digests() gives the digests in input order, uint64 (n, 2) a time; it is called once a pass.
    """
    path.write_bytes(b"")
    if not num_documents:
        return np.zeros(0, dtype=bool)
    is_first = np.memmap(path, dtype=bool, mode="w+", shape=(num_documents,))
    passes = -(-num_documents // pass_documents)
    for number in range(passes):
        seen, buffer, held, base = np.empty((0, 2), np.uint64), [], 0, 0
        for chunk in digests():
            mine = np.flatnonzero(chunk[:, 0] % np.uint64(passes) == number)
            buffer.append((chunk[mine], base + mine))
            base, held = base + len(chunk), held + len(mine)
            if held >= pass_documents:
                seen, buffer, held = _merge(seen, buffer, is_first), [], 0
        _merge(seen, buffer, is_first)
        assert base == num_documents
    is_first.flush()
    return is_first


def _merge(seen: np.ndarray, buffer: list, is_first: np.ndarray) -> np.ndarray:
    """Mark those in the buffer that are new; returns all that were seen."""
    fresh = np.concatenate([seen, *(digest for digest, _ in buffer)])
    number = np.concatenate([np.full(len(seen), -1), *(at for _, at in buffer)]).astype(np.int64)
    order = np.lexsort((fresh[:, 1], fresh[:, 0]))  # stable: the earliest of equals comes first
    ordered = fresh[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = number[order[is_new]]
    is_first[first[first >= 0]] = True
    return ordered[is_new]
