"""The order of a source: a function from its k-th draw to an epoch and a window; no stored shuffle.

It is one keyed bijection of [0, n) (a balanced Feistel network with cycle walking), used with
another key in each epoch, so that every window comes once per epoch.

    "order1|run seed|uid|epoch" --xxh3-64--> seed --SplitMix64--> 6 round keys
    index --Feistel with the keys--> window
    output 7 of the same stream --> start of the first window of the epoch, if windows are shifted

Rule: integers only, no random stream, nothing stored. Any position is reached in constant time, and
every machine gives the same numbers. Each run records `ORDER_VERSION`; a change of one output is a
new version, and the old one stays.

Units: draws, epochs and windows are counts from 0. Arrays are int64 outside and uint64 inside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import xxhash

ORDER_VERSION = 1
NUM_ROUNDS = 6
TABLE_BITS = 16  # of a half: six tables of its values take 3 MiB

# The increment and the two multipliers of SplitMix64 (Steele, Lea, Flood 2014, with Stafford's "mix
# 13"). They are arrays without axes: the last passes of a walk are short, so numpy's cost per call
# decides, and such an array costs half as much as a numpy scalar or an array of one element.
GAMMA = 0x9E3779B97F4A7C15
C1, C2 = (np.array(c, dtype=np.uint64) for c in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

_U30, _U27, _U31, _U32, _U64 = (np.array(bits, np.uint64) for bits in (30, 27, 31, 32, 64))


class Order:
    """Maps draws of several sources to windows, and back.

    `uids` names the sources, `num_windows` holds the size of each; both follow the caller's
    numbering of sources. A source's order depends on its own uid, its size and the run's seed,
    never on its neighbours. Where `num_shifts` is more than 1, each epoch has a shift below it.
    """

    def __init__(
        self, run_seed: int, uids: Sequence[str], num_windows: Sequence[int], num_shifts: int = 1
    ):
        assert len(uids) == len(num_windows)
        assert all(n >= 1 for n in num_windows)
        self.run_seed, self.num_shifts = run_seed, num_shifts
        self.uids = tuple(uids)
        self.num_windows = np.array(num_windows, dtype=np.int64)
        self._half = np.array([half_bits(n) for n in num_windows], dtype=np.uint64)
        self._keys: dict[tuple[int, int], np.ndarray] = {}
        self._tabled: tuple = None, None  # the key that was asked for last, and its tables

    def windows(self, source: np.ndarray, draw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, window) of the given draws; all arrays (n,) int64."""
        size = self.num_windows[source]
        epoch, index = np.divmod(draw, size)
        keys, half = self._keys_of(source, epoch), self._half[source]
        tables = self._tables_of(source, epoch, keys) if keys.ndim == 1 else None
        window = _walk(index, size, half, keys, tables=tables)
        return epoch, window.astype(np.int64)

    def draws(self, source: np.ndarray, epoch: np.ndarray, window: np.ndarray) -> np.ndarray:
        """The draw that yields `window` in `epoch`: the inverse of `windows`; all arrays (n,)
        int64.
        """
        size = self.num_windows[source]
        keys = self._keys_of(source, epoch)
        index = _walk(window, size, self._half[source], keys, inverse=True)
        return epoch * size + index.astype(np.int64)

    def shifts(self, source: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """First token of the first window of an epoch of a source; all arrays (n,) int64."""
        if self.num_shifts == 1:
            return np.zeros_like(epoch)
        pairs, which = np.unique(epoch * len(self.uids) + source, return_inverse=True)
        found = np.zeros(len(pairs), dtype=np.int64)
        for place, pair in enumerate(pairs.tolist()):
            past, number = divmod(pair, len(self.uids))
            seed = order_seed(self.run_seed, self.uids[number], past)
            found[place] = int(splitmix64(seed, NUM_ROUNDS + 1)[0]) * self.num_shifts >> 64
        return found[which]

    def _keys_of(self, source: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        pair = epoch * len(self.uids) + source
        if len(pair) and (pair == pair[0]).all():  # one source, one epoch: nothing to sort
            return self._key(int(source[0]), int(epoch[0]))
        pairs, which = np.unique(pair, return_inverse=True)
        columns = [
            self._key(int(pair % len(self.uids)), int(pair // len(self.uids))) for pair in pairs
        ]
        return np.stack(columns, axis=1)[:, which]  # (rounds, draws)

    def _tables_of(self, source: np.ndarray, epoch: np.ndarray, keys: np.ndarray):
        """Tables of the round outputs for every half, int64 (rounds, halves).

        They are made when a key is used a second time: a look-up is a third of the work. None at
        the first use, and for the largest sources.
        """
        which, half = (int(source[0]), int(epoch[0])), self._half[source[0]]
        last, tables = self._tabled  # read once: another thread may replace it
        if last != which or half > TABLE_BITS:
            tables = None
        elif tables is None:
            every = np.arange(1 << int(half), dtype=np.uint64)
            made = [scramble(every) for scramble in _rounds(keys, half)]
            tables = np.stack(made).astype(np.int64)
        self._tabled = which, tables
        return tables

    def _key(self, source: int, epoch: int) -> np.ndarray:
        if (source, epoch) not in self._keys:
            if (
                len(self._keys) > 65536
            ):  # a run passes through epochs in order: old ones do not come back
                self._keys.clear()
            self._keys[source, epoch] = round_keys(
                order_seed(self.run_seed, self.uids[source], epoch)
            )
        return self._keys[source, epoch]


def order_seed(run_seed: int, uid: str, epoch: int) -> int:
    """The 64-bit seed of one source's epoch: a hash, so that epochs of neighbouring run seeds never
    coincide.
    """
    return xxhash.xxh3_64_intdigest(f"order{ORDER_VERSION}|{run_seed}|{uid}|{epoch}".encode())


def round_keys(seed: int) -> np.ndarray:
    """The first six outputs of SplitMix64 from `seed`, uint64 (6,)."""
    return splitmix64(seed, np.arange(1, NUM_ROUNDS + 1))


def splitmix64(seed: int, index: np.ndarray) -> np.ndarray:
    """Outputs number `index` (from 1) of the SplitMix64 stream of `seed`, uint64, shape of
    `index`.
    """
    z = np.uint64(seed) + np.atleast_1d(np.asarray(index, dtype=np.uint64)) * np.uint64(GAMMA)
    z = (z ^ (z >> _U30)) * C1
    z = (z ^ (z >> _U27)) * C2
    return z ^ (z >> _U31)


def forward(index, n: int, seed: int) -> np.ndarray:
    """Images of `index` under the bijection of [0, n) keyed by `seed`; uint64 (len(index),)."""
    return _one_key(index, n, seed, inverse=False)


def inverse(image, n: int, seed: int) -> np.ndarray:
    """The indices whose images are given: `inverse(forward(i, n, s), n, s) == i`."""
    return _one_key(image, n, seed, inverse=True)


def half_bits(n: int) -> int:
    """Bits of each Feistel half for a domain of n: the bits of n-1 rounded up to even, at least 2,
    halved.
    """
    return max(1, ((n - 1).bit_length() + 1) // 2)


def _one_key(index, n: int, seed: int, inverse: bool) -> np.ndarray:
    index = np.atleast_1d(np.asarray(index))
    size, half = np.array([n]), np.array([half_bits(n)], dtype=np.uint64)
    return _walk(index, size, half, round_keys(seed), inverse)


def _walk(index, size, half, keys, inverse=False, tables=None) -> np.ndarray:
    """Feistel images, applied again while they fall outside [0, size): at most four times on
    average.

    keys: (rounds,) for all, with one size and half, and then perhaps tables; or (rounds, n).
    """
    kind = np.uint64 if tables is None else np.int64
    size, half, is_one = size.astype(kind), half.astype(kind), keys.ndim == 1
    if is_one:
        size, half = size[:1].reshape(()), half[:1].reshape(())
    rounds = tables is not None and [table.__getitem__ for table in tables]
    x = image = index.astype(kind)
    where = np.arange(len(x))
    while len(image):
        image = _feistel(image, half, rounds or _rounds(keys, half), inverse)
        x[where] = image
        outside = np.flatnonzero(image >= size)
        image, where = image[outside], where[outside]
        if not is_one:
            size, half, keys = size[outside], half[outside], keys[:, outside]
    return x


def _feistel(x, half, rounds, inverse) -> np.ndarray:
    one = np.array(1, dtype=x.dtype)
    left, right = x >> half, x & np.asarray((one << half) - one)
    if inverse:
        for scramble in rounds[::-1]:
            left, right = right ^ scramble(left), left
    else:
        for scramble in rounds:
            left, right = right, left ^ scramble(right)
    return (left << half) | right


def _rounds(keys, half) -> list:
    """The function of each round, applied to a half."""
    top = np.asarray(_U64 - half)
    return [functools.partial(_round, key=keys[n, ...], top=top) for n in range(NUM_ROUNDS)]


def _round(x, key, top) -> np.ndarray:
    # The top bits of the product: the low bits of a multiplication are nearly linear in the input.
    z = (x ^ key) * C1
    z ^= z >> _U32
    return (z * C2) >> top
