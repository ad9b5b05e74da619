"""Examines the hosts before the first step: their facts, and the route from each to the first one.

    facts of every host -> judge -> the others call the first on the port of the run -> StartPlan

Rule: a problem that is found here is refused by the name of the host and the key, before any rank
starts. Nothing is left on any host. Units: seconds.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.values import as_int
from launch.hosts.carriers import is_here
from launch.hosts.cluster import AgentCluster
from launch.hosts.judge import Findings, Need, compilers, judge, names

FACTS_TIMEOUT_S = 120.0
REACH_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class StartPlan:
    """The rendezvous of the ranks: the port, and for each host address and interface.

    `address` is the first host's as this host reaches it, `interface` is this host's own; `reasons`
    explain the choice to a person.
    """

    port: int
    hosts: list[dict[str, Any]]
    reasons: list[str]


@dataclass(frozen=True)
class Inspection:
    """The questions to the hosts, besides being alike."""

    need: Need
    environment: Mapping[str, str]
    folders: Sequence[str] = ()
    port: int | None = None
    is_full: bool = False


def preflight(
    cluster: AgentCluster,
    inspection: Inspection,
    log: Callable[[str], None],
    known: Mapping[str, dict] = {},
) -> tuple[StartPlan, dict[str, dict]]:
    """The plan, and the facts by host. Raises UserError with every problem of every host.

    Hosts that are `known`, with their facts, are not asked again.
    """
    news = [host for host in cluster.hosts if host.name not in known]
    asked, skews_s = gather(replace(cluster, hosts=news), inspection) if news else ({}, {})
    facts = {host.name: (known | asked)[host.name] for host in cluster.hosts}
    found: Findings = judge(facts, skews_s, inspection.need)
    if inspection.is_full:
        found.warnings += compilers(facts)
    for warning in found.warnings:
        log(f"warning: {warning}")
    for host, f in asked.items():
        for note in f.get("locks", []):
            log(f"{host}: {note}")
    if found.problems:
        raise UserError(*found.problems)
    first = facts[cluster.hosts[0].name]
    plan = find_routes(cluster, first["port"]["number"], first["addresses"])
    for reason in plan.reasons:
        log(reason)
    return plan, facts


def gather(
    cluster: AgentCluster, inspection: Inspection
) -> tuple[dict[str, dict], dict[str, float]]:
    """Facts, and clock differences to this machine (s, positive = ahead), by host."""
    with shared_mark(cluster) as shared:
        ask = {
            "shared": shared,
            "folders": list(inspection.folders),
            "port": inspection.port,
            "is_full": inspection.is_full,
        }
        order = {"do": "facts", "ask": ask, "environment": dict(inspection.environment)}
        answers = cluster.ask(order, FACTS_TIMEOUT_S)
        facts, skews_s = {}, {}
        for node, host in enumerate(cluster.hosts):
            for message in answers[node]:
                if message["kind"] == "facts":
                    facts[host.name] = message["facts"]
            # The least delayed of the readings: delays make a clock look late.
            skews_s[host.name] = max(
                message["time"] - message["at"]
                for message in answers[node]
                if message["kind"] == "clock"
            )
            if shared and not facts[host.name]["shared"]:
                facts[host.name]["shared"] = unseen(cluster.root / shared["folder"], node)
    return facts, skews_s


@contextlib.contextmanager
def shared_mark(cluster: AgentCluster) -> Iterator[dict[str, str] | None]:
    """A folder with a token that every host must see; removed afterwards.

    None where all hosts are this machine.
    """
    if all(is_here(host.name) for host in cluster.hosts):
        yield None
        return
    token = secrets.token_hex(16)
    runs = cluster.root / "runs"
    is_new = not runs.exists()
    folder = runs / f".doctor-{token[:8]}"
    try:
        folder.mkdir(parents=True)
        (folder / "launcher").write_text(token)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; runs/ must be writable") from None
    try:
        yield {"folder": str(folder.relative_to(cluster.root)), "token": token}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                runs.rmdir()


def unseen(folder: Path, node: int) -> str | None:
    """The reason why a file that a host wrote is not seen here; None where it is."""
    names_here = [path.name for path in folder.iterdir()]  # reads the folder anew, unlike stat
    if f"node-{node}" in names_here:
        return None
    return f"what it writes to {folder.parent} does not arrive on the launching host"


def find_routes(cluster: AgentCluster, port: int, addresses: Mapping[str, str]) -> StartPlan:
    """Find the address over which each host reaches the first, on the very port of the run.

    Raises UserError that names the hosts that are cut off.
    """
    hosts = cluster.hosts
    devices = [list(host.devices) if host.devices else None for host in hosts]
    if len(hosts) == 1:
        only = {"address": "127.0.0.1", "interface": None, "devices": devices[0]}
        return StartPlan(port, [{"name": hosts[0].name, **only}], [])
    # The name first: it is what the user knows. Then IPv4 before IPv6, and last what only another
    # name of the same machine can reach.
    by_family = sorted(addresses, key=lambda address: ":" in address)
    candidates = [hosts[0].name, *by_family, "127.0.0.1"]
    order = {
        "do": "reach",
        "port": port,
        "token": secrets.token_hex(16),
        "addresses": candidates,
        "timeout_s": REACH_TIMEOUT_S,
    }
    answers = cluster.ask(order, 2 * REACH_TIMEOUT_S)
    routes = {
        node: message["route"]
        for node in range(1, len(hosts))
        for message in answers[node]
        if message["kind"] == "route"
    }
    cut_off = [hosts[node].name for node, route in routes.items() if route is None]
    if cut_off:
        # Where no other host reaches the first, the fault is more likely its own.
        who = [hosts[0].name] if len(cut_off) == len(hosts) - 1 > 1 else cut_off
        by = f" (by {names(cut_off)})" if who != cut_off else ""
        raise UserError(
            *(
                f"{name}: port {port} of {hosts[0].name} cannot be reached over any of"
                f" {', '.join(candidates[:-1])}{by}; open the ports between"
                f" these hosts in the firewall, or name one that is open: MASTER_PORT={port} make"
                " ..."
                for name in who
            )
        )
    callers = next(m["routes"] for m in answers[0] if m["kind"] == "callers")
    first = next(iter(callers.values()))
    plans = [{"name": hosts[0].name, "address": first["own"], "interface": first["interface"]}]
    for node in range(1, len(hosts)):
        route = routes[node]
        plans.append(
            {"name": hosts[node].name, "address": route["other"], "interface": route["interface"]}
        )
    for plan, numbers in zip(plans, devices, strict=True):
        plan["devices"] = numbers
    return StartPlan(port, plans, reasons(plans, port))


def reasons(plans: Sequence[Mapping[str, Any]], port: int) -> list[str]:
    """One line for each interface that is used, with the hosts that use it."""
    groups: dict[str, list[str]] = {}
    for plan in plans:
        groups.setdefault(str(plan["interface"]), []).append(plan["name"])
    first = plans[0]
    return [
        f"interface {interface} on {names(hosts)}: it carries the connection to {first['name']}"
        f" ({first['address']}, port {port}); GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME override"
        for interface, hosts in groups.items()
    ]


def wanted_port(environ: Mapping[str, str]) -> int | None:
    """MASTER_PORT of the caller; None = a free one is chosen. Raises UserError."""
    text = environ.get("MASTER_PORT", "")
    if not text:
        return None
    try:
        port = as_int(text)
    except ValueError as error:
        raise UserError(f"MASTER_PORT={text[:40]} {error}") from None
    if not 1024 <= port <= 65535:
        raise UserError(f"MASTER_PORT={port} is not a port from 1024 to 65535")
    return port
