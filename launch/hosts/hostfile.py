"""The hosts of a run from DeepSpeed's hostfile, include and exclude lists, or SLURM's node lists.

    worker-1 slots=8    # comment                 one host a line, `slots` = ranks it can take
    worker-9 slots=8 spare                        waits until another one fails
    INCLUDE=worker-1@worker-2:0,2                 these hosts, of worker-2 only slots 0 and 2
    gpu[01-04,9]-ib                               -> gpu01-ib ... gpu04-ib gpu9-ib

Rule: a name is a plain host name or an IP address, or it is refused. Names become arguments of ssh,
so `-oProxyCommand=`, `;` and `$()` must never pass as a name. Pure functions.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from base.errors import UserError
from base.values import counted
from launch.hosts.judge import names

# Letters, digits and inner hyphens between dots (RFC 1123), and the underscore that some sites use.
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*\.?")
MOST_HOSTS = 100_000
MOST_SLOTS = 1024


@dataclass(frozen=True)
class Host:
    """One host with `slots` ranks; `devices` are its GPUs where only some of them are used."""

    name: str
    slots: int
    devices: tuple[int, ...] | None = None
    is_spare: bool = False


def is_host_name(text: str) -> bool:
    """Whether `text` is a host name or an IP address and nothing else."""
    try:
        return not getattr(ipaddress.ip_address(text), "scope_id", None)
    except ValueError:
        # An all-numeric name such as 10.0.0 is a mistyped address, which ssh would complete.
        return (
            len(text) <= 253
            and HOST_NAME.fullmatch(text) is not None
            and not re.fullmatch(r"[\d.]+", text)
        )


def plain(name: str) -> str:
    """A name as DNS compares it: without case, and without a dot at the end."""
    return name.rstrip(".").lower()


def read_hosts(path: Path, include: str = "", exclude: str = "") -> list[Host]:
    """The hosts of a file, in its order, after `include` or `exclude`. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise UserError(f"HOSTFILE={path}: {reason}; one line per host: NAME slots=N") from None
    return choose(parse(text, str(path)), include, exclude)


def parse(text: str, where: str) -> list[Host]:
    """The hosts of lines `NAME slots=N [spare]`, with `#` comments and blank lines.

    Raises UserError with every bad line.
    """
    hosts: list[Host] = []
    first_line: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        shown = f"{where}, line {number}: {content[:120]!r}"
        name, *rest = content.split()
        slots = re.fullmatch(r"slots\s*=\s*(\d{1,9})( spare)?", " ".join(rest), re.ASCII)
        if not is_host_name(name):
            problems.append(
                f"{shown}: {name[:80]!r} is not a host name or an IP address; user, port and key"
                " belong into SSH= or ~/.ssh/config"
            )
        elif not slots or not 1 <= int(slots.group(1)) <= MOST_SLOTS:
            problems.append(f"{shown} is not NAME slots=N with N from 1 to {MOST_SLOTS}")
        elif plain(name) in first_line:
            problems.append(f"{shown}: {name} is in line {first_line[plain(name)]} already")
        else:
            first_line[plain(name)] = number
            hosts.append(Host(name, int(slots.group(1)), is_spare=bool(slots.group(2))))
    if not hosts and not problems:
        problems.append(f"{where} names no host; one line per host: NAME slots=N")
    if problems:
        raise UserError(*problems)
    return hosts


def choose(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """The hosts and slots that are wanted. Raises UserError.

    Both lists read `NAME[:SLOT,SLOT...]@NAME...`; a name without slots means all of it.
    """
    if include and exclude:
        raise UserError(
            f"INCLUDE={include} and EXCLUDE={exclude} cannot be given together; give one of them"
        )
    wanted = _filter("INCLUDE", include, hosts)
    unwanted = _filter("EXCLUDE", exclude, hosts)
    chosen = []
    for host in hosts:
        slots = set(range(host.slots)) - unwanted.get(host.name, set())
        if include:
            slots &= wanted.get(host.name, set())
        if len(slots) == host.slots:
            chosen.append(host)
        elif slots:
            chosen.append(replace(host, slots=len(slots), devices=tuple(sorted(slots))))
    if not chosen:
        which = f"INCLUDE={include}" if include else f"EXCLUDE={exclude}"
        raise UserError(
            f"{which} leaves none of the hosts ({names([host.name for host in hosts])})"
        )
    return chosen


def part(hosts: Sequence[Host], spares: int) -> tuple[list[Host], list[Host]]:
    """The hosts that train, and those that wait: marked `spare`, or the last `spares` others.

    Raises UserError where none is left to train.
    """
    marked = [host for host in hosts if host.is_spare]
    others = [host for host in hosts if not host.is_spare]
    if len(others) <= spares:
        raise UserError(
            f"SPARES={spares} leaves no host to train, of {counted(len(others), 'host')}; give"
            f" SPARES={max(0, len(others) - 1)} or less"
        )
    first = len(others) - spares
    return others[:first], [*marked, *others[first:]]


def ranks_per_host(hosts: Sequence[Host], nproc: int | None) -> int:
    """The number of ranks on each host: `nproc`, or the slots of the hostfile.

    It is the same on every host, so that a tensor group never crosses hosts. Raises UserError.
    """
    fewest = min(hosts, key=lambda host: host.slots)
    if nproc is None:
        if len({host.slots for host in hosts}) > 1:
            most = max(hosts, key=lambda host: host.slots)
            raise UserError(
                f"slots differ ({fewest.name}: {fewest.slots}, {most.name}: {most.slots}) and every"
                f" host takes the same number of ranks; give NPROC={fewest.slots} or less"
            )
        return fewest.slots
    if nproc > fewest.slots:
        raise UserError(
            f"NPROC={nproc} is more than the slots={fewest.slots} of {fewest.name}; give"
            f" NPROC={fewest.slots} or less, or leave that host out (EXCLUDE={fewest.name})"
        )
    return nproc


def expand(nodes: str) -> list[str]:
    """The single names of SLURM's list of nodes: `gpu[01-04,9]-ib,login` -> gpu01-ib ...

    Raises UserError.
    """
    found: list[str] = []
    for part in _split_outside_brackets(nodes.strip()):
        found += _expand_one(part, nodes)
        if len(found) > MOST_HOSTS:
            raise UserError(f"node list {nodes[:80]!r} names more than {MOST_HOSTS} hosts")
    for name in found:
        if not is_host_name(name):
            raise UserError(f"node list {nodes[:80]!r}: {name[:80]!r} is not a host name")
    if not found:
        raise UserError("the node list is empty")
    return found


def _filter(variable: str, text: str, hosts: Sequence[Host]) -> dict[str, set[int]]:
    """The slots by name in an include or exclude list. Raises UserError."""
    known = {plain(host.name): host for host in hosts}
    found: dict[str, set[int]] = {}
    for part in filter(None, map(str.strip, text.split("@"))):
        host, numbers = known.get(plain(part)), None
        if host is None and ":" in part:  # an IPv6 address has colons of its own
            name, _, numbers = part.rpartition(":")
            host = known.get(plain(name))
        if host is None:
            known_names = names([host.name for host in hosts])
            raise UserError(f"{variable}={text}: {part!r} is not one of the hosts ({known_names})")
        if numbers is not None and not re.fullmatch(r"\d{1,4}(,\d{1,4})*", numbers, re.ASCII):
            raise UserError(f"{variable}={text}: {part!r} is not NAME or NAME:SLOT,SLOT")
        slots = set(range(host.slots)) if numbers is None else set(map(int, numbers.split(",")))
        if max(slots) >= host.slots:
            raise UserError(
                f"{variable}={text}: {host.name} has slots 0 to {host.slots - 1}, not {max(slots)}"
            )
        found.setdefault(host.name, set()).update(slots)
    return found


def _split_outside_brackets(text: str) -> list[str]:
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise UserError(f"node list {text[:80]!r}: brackets do not match")
    return list(filter(None, re.split(r",(?![^\[]*\])", text)))


def _expand_one(part: str, nodes: str) -> list[str]:
    """The names of one entry; the leftmost bracket varies slowest, as in scontrol."""
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, suffix = rest.partition("]")
    numbers: list[str] = []
    for piece in ranges.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece, re.ASCII)
        if not ends:
            raise UserError(f"node list {nodes[:80]!r}: [{ranges}] is not numbers and ranges")
        low, high = ends.group(1), ends.group(2) or ends.group(1)
        if int(low) > int(high) or int(high) - int(low) >= MOST_HOSTS:
            raise UserError(f"node list {nodes[:80]!r}: {piece} is no range")
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    tails = _expand_one(suffix, nodes)
    return [prefix + number + tail for number in numbers for tail in tails]
