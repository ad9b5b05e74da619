"""Tells damage from disagreement: what one rank or one host sees is not yet the truth.

    a rank reports a problem --> ranks of other hosts look at the same file
                                   all see a problem        -> damaged
                                   one reads it whole       -> look again a few times
                                   it goes away             -> read again (files that appear late)
                                   it stays                 -> refused: who sees what, on which host

Rule: a checkpoint is damaged only if no rank that looked can read it. Where views differ, nothing
is renamed and no older checkpoint is taken: a host without the mount would otherwise set good
checkpoints aside, one after the other. Every function here is a collective. Units: seconds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from base.errors import Shared
from base.values import counted
from checkpoint.comm import Comm
from checkpoint.format.manifest import NAME, all_committed

# Before each new look: network file systems show new names late.
PAUSES_S = (1, 4, 15)
WITNESS_HOSTS = 4  # hosts of which one rank looks again at a file that others cannot read
MOST_FILES = 3  # files that a message describes

# For each rank that looked: file -> its problems there; an empty list means that it was whole.
Views = Sequence[Mapping[str, Sequence[str]]]


def host_name() -> str:
    """Return the name of this host, for messages."""
    return socket.gethostname()


def second_look(
    comm: Comm, mine: Mapping[str, Sequence[str]], look: Callable[[str], Sequence[str]], where: Path
) -> bool:
    """Let other ranks look at the files of which some ranks report problems (`mine`, this rank's).

    `look` returns the problems of a file; `where` is the folder, for the message. Returns False
    where the problems are damage, and True where they have gone away, so that the caller reads
    again. Raises Shared where the ranks disagree to the end.
    """
    known = comm.exchange((host_name(), dict(mine)), "second look")
    hosts = [host for host, _ in known]
    reported = {rank: found for rank, (_, found) in enumerate(known) if found}
    if not reported:
        return False
    names = sorted({name for found in reported.values() for name in found})
    chosen = {name: witnesses(hosts, name, reported) for name in names}
    first = {name: list(look(name)) for name in names if comm.rank in chosen[name]}
    views: Views = [
        {**found, **reported.get(rank, {})}
        for rank, found in enumerate(comm.exchange(first, "witnesses"))
    ]
    disputed = disputes(views)
    if not disputed:
        return False
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        again = {name: list(look(name)) for name in disputed if mine.get(name)}
        views = [
            {**view, **found}
            for view, found in zip(views, comm.exchange(again, "look again"), strict=True)
        ]
        if not disputes(views):
            return True
    raise Shared(*described(views, hosts, where))


def witnesses(
    hosts: Sequence[str], name: str, reported: Mapping[int, Mapping[str, Sequence[str]]]
) -> list[int]:
    """Return the ranks that look again at a file: of the first few hosts each the first rank that
    reported nothing about it. Pure.
    """
    found: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        if host not in found and name not in reported.get(rank, {}):
            found[host] = rank
    return list(found.values())[:WITNESS_HOSTS]


def disputes(views: Views) -> list[str]:
    """Return the files that some rank read whole and another did not. Pure."""
    names = sorted({name for view in views for name in view})
    return [name for name in names if len({bool(view[name]) for view in views if name in view}) > 1]


def described(views: Views, hosts: Sequence[str], where: Path) -> list[str]:
    """Return a line for each disputed file, and what to do. Pure."""
    lines, names = [], disputes(views)
    blind: set[str] = set()
    for name in names[:MOST_FILES]:
        bad = [rank for rank, view in enumerate(views) if view.get(name)]
        whole = [rank for rank, view in enumerate(views) if name in view and not view[name]]
        blind |= {hosts[rank] for rank in bad}
        lines.append(
            f"{name}: {ranks_on_hosts(bad, hosts)} cannot read it ({views[bad[0]][name][0]}), but"
            f" {ranks_on_hosts(whole, hosts)} can"
        )
    if len(names) > MOST_FILES:
        lines.append(f"... and {len(names) - MOST_FILES} more files on which the ranks disagree")
    return [
        *lines,
        f"the ranks see different files in {where}; nothing was renamed and no older checkpoint was"
        f" taken. Check on {', '.join(sorted(blind))} that this folder is the shared file system of"
        " all hosts (mount, network) and that memory and disk are sound; then give the same command"
        " again",
    ]


def ranks_on_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks with their hosts: `rank 3 (host b)`, `ranks 4, 5 and 2 more (host b)`. Pure."""
    of_hosts: dict[str, list[int]] = {}
    for rank in ranks:
        of_hosts.setdefault(hosts[rank], []).append(rank)
    parts = []
    for host, some in of_hosts.items():
        shown = ", ".join(str(rank) for rank in some[:4])
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        parts.append(f"rank{'s' if len(some) > 1 else ''} {shown}{more} (host {host})")
    return ", ".join(parts)


def same_listing(comm: Comm, checkpoints: Path) -> None:
    """Raise Shared unless all ranks see the same checkpoints in the folder.

    A host that lacks the shared file system would otherwise start the run anew, or find every
    checkpoint damaged. Looks again a few times, because new names may appear late.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            names = sorted(path.name for _, _, path in all_committed(checkpoints))
        except OSError as error:
            names = [f"an error: {error.strerror}"]
        views = comm.exchange((host_name(), names), "list of checkpoints")
        if all(names == views[0][1] for _, names in views):
            return
        # A listing may lag behind files that can be opened by name.
        first = views[0][1]
        is_same = set(names) <= set(first) and all(_opens(checkpoints / n) for n in first)
        if all(comm.exchange(is_same, "checkpoints by name")):
            return
        if pause_s is not None:
            time.sleep(pause_s)
    raise Shared(*different_listings(views, checkpoints))


def _opens(folder: Path) -> bool:
    """Whether the manifest of a checkpoint can be opened by its name."""
    try:
        os.close(os.open(folder / NAME, os.O_RDONLY))
    except OSError:
        return False
    return True


def different_listings(views: Sequence[tuple[str, list[str]]], checkpoints: Path) -> list[str]:
    """Return a line for each group of ranks that sees the same list, and what to do. Pure."""
    hosts, groups = [host for host, _ in views], {}
    for rank, (_, names) in enumerate(views):
        groups.setdefault(tuple(names), []).append(rank)
    lines = []
    for names, ranks in list(groups.items())[:MOST_FILES]:
        sees = "no checkpoint"
        if names:
            sees = f"{counted(len(names), 'checkpoint')}, the last one {names[-1]}"
        lines.append(f"{checkpoints}: {ranks_on_hosts(ranks, hosts)} sees {sees}")
    return [
        *lines,
        "the ranks see different checkpoints; nothing was renamed and the run was not started anew."
        f" Check that {checkpoints.parent} is the same shared file system on all hosts (is it"
        " mounted?); then give the same command again",
    ]
