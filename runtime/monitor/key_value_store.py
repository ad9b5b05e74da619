"""Small facts from every rank to rank 0, beside training: nobody waits for anybody.

    any rank   post(name, value)  ->  the store at which the ranks met  ->  rank 0: read(names)

The one rule: no collective. A rank writes a key over and over, rank 0 looks at what is there; a
rank that is late or gone costs its own facts and holds up nobody. It has a connection of its own,
and only threads beside training use it. Values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

PREFIX = "facts"


class KeyValueStore:
    """One rank's end of it. Calls raise OSError or RuntimeError where the store is gone."""

    def __init__(self, store: dist.Store):
        self._store = store
        self._is_complete: set[tuple[str, ...]] = set()

    def post(self, name: str, value: Any) -> None:
        """Put a value under a name, in the place of the one before."""
        self._store.set(name, json.dumps(value))

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """The newest value of each name that has one; asks once for all as soon as all have."""
        names = tuple(names)
        if names not in self._is_complete and self._store.check(list(names)):
            self._is_complete.add(names)
        there = names
        if names not in self._is_complete:  # a key that is not there would be waited for
            there = tuple(name for name in names if self._store.check([name]))
        if not there:
            return {}
        values = self._store.multi_get(list(there))
        return {name: json.loads(value) for name, value in zip(there, values, strict=True)}


def open_store() -> KeyValueStore:
    """The board of this process group; its own connection to the store."""
    # torch has no public name for the store that it was initialised with.
    store = dist.distributed_c10d._get_default_store()
    return KeyValueStore(dist.PrefixStore(PREFIX, store.clone()))
