"""The ledger: the samples of each step and the hash of its global batch, as append-only JSON lines.

    runs/<run>/ledger/steps.jsonl     {"step": 1, "data_step": 0, "samples": [0, 8], ...}

Rule: a line records what was trained on, independent of the layout that did it. The batch hash is
xxh3-64 over the samples' hashes in batch order; a sample's hash is xxh3-64 over its window's ids as
little-endian int32, whatever the storage width. A last line that was torn by a kill is ignored when
read and cut off before the next append.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from base import jsonl
from base.errors import UserError
from base.tail import newest_lines

STEPS_FILE = "steps.jsonl"
HAVE = {"step", "data_step", "samples", "batch_hash", "tokens"}  # fields of every line


def sample_hashes(tokens: np.ndarray) -> np.ndarray:
    """xxh3-64 of each row of token ids, uint64 (rows,); tokens (rows, T + 1) of any integer
    type.
    """
    rows = np.ascontiguousarray(tokens, dtype="<i4")
    return np.array([xxhash.xxh3_64_intdigest(row) for row in rows], dtype=np.uint64)


def batch_hash(hashes: np.ndarray) -> str:
    """xxh3-64 in hex over the samples' hashes (n,) uint64, in batch order."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(hashes, dtype="<u8").tobytes())


def in_batch_order(hashes: np.ndarray) -> np.ndarray:
    """Gathered sample hashes (data ranks, micro-steps, micro-batch) as one global batch (n,), by
    `stream`'s layout.
    """
    return np.asarray(hashes).transpose(1, 0, 2).reshape(-1)


class Ledger:
    """Appends step lines to `folder`; one process of a run writes it.

    `after_step` is the step this process continues from in `segment`: later lines of that segment
    are removed, because those steps are trained again. Lines of earlier segments stay.
    """

    def __init__(self, folder: Path, after_step: int | None = None, segment: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.segment = folder / STEPS_FILE, segment
        jsonl.drop_torn_line(self.path)
        if after_step is not None:
            _cut_after(self.path, after_step, segment)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - until close

    def append(
        self,
        *,
        step: int,
        samples: tuple[int, int],
        batch_hash: str,
        tokens: int,
        targets: int,
        sources: dict[str, int],
        data_step: int | None = None,
        segment: int | None = None,
        is_update: bool = True,
        masked: int = 0,
        quarantined: Sequence[int] = (),
        skips: str | None = None,
        length: int | None = None,
    ) -> None:
        """Record one step: samples [a, b), tokens seen, targets among them, samples per source.

        data_step defaults to step - 1, which holds until a range of data is skipped; segment
        defaults to the ledger's. Unusual facts are added: `update` false, the number of targets
        that masks took away, samples in quarantine, the fingerprint of the skip list, the length
        that sequences were cut to.
        """
        line = {
            "step": step,
            "data_step": step - 1 if data_step is None else data_step,
            "segment": self.segment if segment is None else segment,
            "samples": list(samples),
            "batch_hash": batch_hash,
            "tokens": tokens,
            "targets": targets,
            "sources": sources,
        }
        unusual = {
            "update": None if is_update else False,
            "masked": masked or None,
            "quarantined": list(quarantined) or None,
            "skips": skips,
            "length": length,
        }
        line |= {name: value for name, value in unusual.items() if value is not None}
        jsonl.append(self._file, jsonl.encode(line))

    def sync(self) -> None:
        """Make all lines durable. May be called beside `append`, from another thread."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make all lines durable and close the file."""
        self.sync()
        self._file.close()


def read_ledger(folder: Path) -> Iterator[dict]:
    """The lines of a ledger in order; a torn last one and damaged ones are left out.
    Raises UserError where there is no ledger.
    """
    path = folder / STEPS_FILE
    if not path.is_file():
        raise UserError(f"{path}: not found; the run has recorded no step")
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            values = _parsed(line)
            if values is not None:
                yield values


def _parsed(line: bytes) -> dict | None:
    """Fields of a line; None where it is damaged."""
    try:
        values = jsonl.decode(line)
    except ValueError:
        return None
    return values if values.keys() >= HAVE else None


def _cut_after(path: Path, step: int, segment: int) -> None:
    """Remove the lines of `segment` past `step`, which stand at the end: lines are in order of
    segment, then step. Damaged ones before them stay.
    """
    cut = None
    for begins, line in newest_lines(path):
        values = _parsed(line)
        if values and (values["step"] <= step or values.get("segment", 0) < segment):
            break
        cut = begins if values else cut
    if cut is not None:
        os.truncate(path, cut)
