"""Refuses a run whose ranks have different recipes, before anything is written.

Under `make pretrain` the launcher composes once for all ranks. Under another launcher every rank
composes for itself, from its own files and its own environment.

Rule: digests are compared; values are exchanged only where they differ.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from base.errors import Shared
from base.redaction import redact, secret_values
from checkpoint.comm import Comm
from recipes.composed_file import differences, digest, digest_of, flat, plain
from recipes.schema import Recipe

WAY_OUT = (
    "start all ranks from the same files and the same environment, or with make pretrain, which"
    " composes the recipe once for all of them"
)


def same_recipe(recipe: Recipe, config: Mapping[str, Any], comm: Comm) -> None:
    """Raise Shared where the ranks have different recipes or DeepSpeed settings; a collective.

    `config` is the final DeepSpeed configuration. The lines name knobs, values and hosts.
    """
    own = (recipe.resume, digest(recipe), digest_of(config))
    if len(set(comm.exchange(own, "digest of the recipe"))) == 1:
        return
    values = {"resume": recipe.resume} | flat(plain(recipe)) | flat(dict(config), "ds")
    everyone = comm.exchange((socket.gethostname(), values), "recipe")
    secrets = secret_values(os.environ)
    lines = [redact(line, secrets) for line in differences(by_place(everyone))]
    raise Shared(*(f"the ranks have different recipes: {line}" for line in lines), WAY_OUT)


def by_place(everyone: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    """Values by host, or by rank and host where ranks of one host differ."""
    hosts: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for rank, (host, values) in enumerate(everyone):
        hosts.setdefault(host, []).append((rank, values))
    found: dict[str, Mapping[str, Any]] = {}
    for host, ranks in hosts.items():
        if all(values == ranks[0][1] for _, values in ranks):
            found[host] = ranks[0][1]
        else:
            found |= {f"rank {rank} ({host})": values for rank, values in ranks}
    return found
