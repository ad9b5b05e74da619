"""Exact duplicates among documents, by a 16-byte digest of their text: the first in input order
stays.

    digests --by value--> bucket files --one at a time, sorted--> one bool per document

Rule: memory is bounded for any number of documents and of duplicates: about `BUCKET_DOCUMENTS` at
once, some 100 bytes each. On disk the work takes 24 bytes a document, and one byte for the answer.

Two different texts count as equal with a chance of n * n / 2**129 for n documents (xxh3-128).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

BUCKET_DOCUMENTS = 8 << 20
MOST_BUCKETS = 512  # files open at once


def mark_first(
    digests: Iterable[np.ndarray],
    num_documents: int,
    path: Path,
    bucket_documents: int = BUCKET_DOCUMENTS,
) -> np.ndarray:
    """True for documents that are the first with their digest, bool (num_documents,), mapped from
    `path`.

    digests: in input order, uint64 (n, 2) a time.
    """
    path.write_bytes(b"")
    if not num_documents:
        return np.zeros(0, dtype=bool)
    is_first = np.memmap(path, dtype=bool, mode="w+", shape=(num_documents,))
    num_buckets = min(MOST_BUCKETS, -(-num_documents // bucket_documents))
    files = [path.with_name(f"{path.name}.{number}") for number in range(num_buckets)]
    _fill(digests, files)
    for file in files:
        seen = np.empty((0, 2), dtype=np.uint64)
        with open(file, "rb") as rows:
            while len(some := np.fromfile(rows, "<u8", 3 * bucket_documents).reshape(-1, 3)):
                seen = _merge(seen, some, is_first)
        file.unlink()
    is_first.flush()
    return is_first


def _fill(digests: Iterable[np.ndarray], files: list[Path]) -> None:
    """Rows (digest, number of the document), each in the bucket of its digest, in input order."""
    with ExitStack() as stack:
        buckets = [stack.enter_context(open(file, "wb", buffering=1 << 16)) for file in files]
        base = 0
        for chunk in digests:
            number = np.arange(base, base + len(chunk), dtype=np.uint64)
            base += len(chunk)
            rows = np.column_stack([chunk, number]).astype("<u8", copy=False)
            bucket = (chunk[:, 0] % np.uint64(len(files))).astype(np.int64)
            order = np.argsort(bucket, kind="stable")
            ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
            for file, some in zip(buckets, np.split(rows[order], ends[:-1]), strict=True):
                file.write(some.data if len(some) else b"")


def _merge(seen: np.ndarray, rows: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Mark those of the rows whose digest is new; returns all digests that were seen."""
    every = np.concatenate([seen, rows[:, :2]])
    order = np.lexsort((every[:, 1], every[:, 0]))  # stable: the earliest of equals comes first
    ordered = every[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[is_new] - len(seen)
    is_first[rows[first[first >= 0], 2].astype(np.int64)] = True
    return ordered[is_new]
