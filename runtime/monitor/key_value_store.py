"""Small facts from every rank to rank 0, beside training, without waiting for any rank.

    any rank   post(name, value)  ->  the store of the rendezvous  ->  rank 0: read(names)

Rule: no collective. A rank writes its keys again and again, rank 0 reads the keys that exist; a
rank that is late or gone costs its own facts and delays no other rank. The store has a connection
of its own, and only threads beside training use it. Values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

PREFIX = "facts"


class KeyValueStore:
    """The store as one rank uses it. Calls raise OSError or RuntimeError where it is gone."""

    def __init__(self, store: dist.Store):
        self._store = store
        self._is_complete: set[tuple[str, ...]] = set()

    def post(self, name: str, value: Any) -> None:
        """Write a value under a name; it replaces the one before."""
        self._store.set(name, json.dumps(value))

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """The newest value of each name that has one; one request once all names have values."""
        names = tuple(names)
        if names not in self._is_complete and self._store.check(list(names)):
            self._is_complete.add(names)
        there = names
        if names not in self._is_complete:  # a read would wait for a missing key
            there = tuple(name for name in names if self._store.check([name]))
        if not there:
            return {}
        values = self._store.multi_get(list(there))
        return {name: json.loads(value) for name, value in zip(there, values, strict=True)}


def open_store() -> KeyValueStore:
    """The key-value store of this process group, over a connection of its own."""
    # torch has no public name for the store that it was initialised with.
    store = dist.distributed_c10d._get_default_store()
    return KeyValueStore(dist.PrefixStore(PREFIX, store.clone()))
