"""Block hashes: one xxh3-64 per 8 MiB of a .bin, kept beside it, so that damage is found before a
token of it is used.

The side file `<shard>.xxh` holds little-endian uint64, one per block in file order; the last block
may be shorter.

Rule: a block is hashed whole when a process first touches it, and never again.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import xxhash

from base.errors import UserError

BLOCK_BYTES = 8 << 20


class BlockHasher:
    """Hashes a stream of bytes block by block."""

    def __init__(self):
        self._digests: list[int] = []
        self._current = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while len(data):
            taken = min(len(data), BLOCK_BYTES - self._filled)
            self._current.update(data[:taken])
            self._filled += taken
            data = data[taken:]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def side_file(self) -> bytes:
        """The content of the side file; ends the last block."""
        if self._filled:
            self._end_block()
        return np.array(self._digests, dtype="<u8").tobytes()

    def _end_block(self) -> None:
        self._digests.append(self._current.intdigest())
        self._current.reset()
        self._filled = 0


def side_file_bytes(bin_bytes: int) -> int:
    """Size of the side file of a .bin of that size."""
    return 8 * -(-bin_bytes // BLOCK_BYTES)


class BlockChecker:
    """Remembers which blocks of one .bin are known to be good. Not safe for threads: the caller
    holds a lock.

    is_hashed: False for a .bin without a side file; its blocks cannot be checked, so all pass.
    """

    def __init__(self, bin_path: Path, bin_bytes: int, is_hashed: bool = True):
        self.bin_path, self.bin_bytes = bin_path, bin_bytes
        if is_hashed:
            self._expected = np.fromfile(bin_path.with_suffix(".xxh"), dtype="<u8")
        self._is_good = np.full(side_file_bytes(bin_bytes) // 8, not is_hashed)
        self._bad: set[int] = set()

    def check(self, fd: int, first_byte: np.ndarray, end_byte: np.ndarray) -> None:
        """Hash every block that the byte ranges [first, end) touch for the first time.

        Raises UserError naming file, block, expected and found hash.
        """
        first, last = first_byte // BLOCK_BYTES, (end_byte - 1) // BLOCK_BYTES
        if self._is_good[first].all() and self._is_good[last].all() and (last - first <= 1).all():
            return
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            for block in range(low, high + 1):
                if not self._is_good[block]:
                    self._check_block(fd, block)

    def damaged(self, fd: int, first_byte: np.ndarray, end_byte: np.ndarray) -> np.ndarray:
        """True for byte ranges [first, end) that touch a bad block, bool (n,).

        A bad block stays bad as long as the process lives, so that all ranks keep agreeing.
        """
        first, last = first_byte // BLOCK_BYTES, (end_byte - 1) // BLOCK_BYTES
        found = np.zeros(len(first), dtype=bool)
        for number, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            for block in range(low, high + 1):
                if self._is_good[block]:
                    continue
                if block not in self._bad:
                    try:
                        self._check_block(fd, block)
                        continue
                    except UserError:
                        self._bad.add(block)
                found[number] = True
        return found

    def _check_block(self, fd: int, block: int) -> None:
        start = block * BLOCK_BYTES
        data = bytearray(min(BLOCK_BYTES, self.bin_bytes - start))
        read_exactly(fd, memoryview(data), start, self.bin_path)
        found, expected = xxhash.xxh3_64_intdigest(data), int(self._expected[block])
        if found != expected:
            raise UserError(
                f"{self.bin_path}: bytes {start} to {start + len(data)} have xxh3 {found:016x}, "
                f"expected {expected:016x}: the file is damaged; restore it from a copy or build "
                "the corpus again"
            )
        self._is_good[block] = True


def read_exactly(fd: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill `target` (bytes) from the file position `offset`.

    A read that ends early is tried once more. Raises UserError where the file is too short.
    """
    done, last_try = 0, False
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0 and last_try:
            raise UserError(
                f"{path}: expected {len(target)} bytes at {offset}, found {done}: the file was cut "
                "while in use; restore it from a copy or build the corpus again"
            )
        last_try = count == 0
        done += count
