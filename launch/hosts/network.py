"""Addresses, interfaces and ports of this host. No address leaves it unless it is asked for.

Rule: an interface is never guessed from its name. A host uses the interface over which it really
reached, or was reached by, the first host of the run. The reason is printed, and a variable that
the user set has precedence. Units: seconds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from base.errors import UserError

# Below the ports that systems give to outgoing connections (32768 up on Linux, 49152 up elsewhere),
# so that a port found free is not taken by one a moment later.
LOW_PORT, HIGH_PORT = 20_000, 29_999
TRIES = 200
LONGEST_GREETING = 256


@dataclass(frozen=True)
class Route:
    """The way from this host to another: own address and interface, address that answered."""

    interface: str | None
    own: str
    other: str


def addresses() -> dict[str, str]:
    """IP address -> interface, for every interface that is up, except loopback and link-local."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
            if name in up and is_ip and not entry.address.startswith(("127.", "::1", "fe80")):
                found[entry.address] = name
    return found


def missing_interfaces(environ: Mapping[str, str], has_gpus: bool) -> list[str]:
    """Problems of variables that name interfaces of gloo or NCCL which this host does not have."""
    here = set(psutil.net_if_stats())
    gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    nccl = environ.get("NCCL_SOCKET_IFNAME", "") if has_gpus else ""
    wrong = []
    if gloo and not set(gloo.split(",")) <= here:
        # gloo takes whole names alone.
        hint = " (`^` and `=` are NCCL's)" if gloo[0] in "^=" else ""
        wrong.append(f"GLOO_SOCKET_IFNAME={gloo}{hint}")
    if nccl and not nccl_interfaces(nccl, here):
        wrong.append(f"NCCL_SOCKET_IFNAME={nccl}")
    return [f"{one}, but the interfaces are {', '.join(sorted(here))}" for one in wrong]


def nccl_interfaces(wanted: str, here: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME=`wanted` leaves.

    It lists beginnings of names, after `=` whole names; `^` in front means all others.
    """
    is_excluded, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    is_whole, wanted = wanted.startswith("="), wanted.removeprefix("=")
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return [
        name
        for name in here
        if any(name == one if is_whole else name.startswith(one) for one in names) != is_excluded
    ]


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None for an address of another host."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def is_own(address: str) -> bool:
    """Whether an address is one of this host. All loopback addresses are."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return True
    return interface_of(address) is not None


def addresses_of(name: str) -> list[str]:
    """The addresses of a host name; none where this host cannot resolve it."""
    try:
        return [entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def is_free(port: int) -> bool:
    """Whether a server can take `port` on all addresses of this host."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store sets it
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of this host that nobody uses now. Raises UserError where none is found."""
    for _ in range(TRIES):
        port = random.SystemRandom().randint(LOW_PORT, HIGH_PORT)
        if is_free(port):
            return port
    raise UserError(f"no free port from {LOW_PORT} to {HIGH_PORT} on {socket.gethostname()}")


def await_callers(port: int, token: str, expected: int, timeout_s: float) -> dict[str, Route]:
    """Listen on `port` until `expected` others have called; the route of each caller.

    Callers that do not know the token are disconnected.
    """
    callers: dict[str, Route] = {}
    deadline = time.monotonic() + timeout_s
    try:
        # One socket for both families where the host has IPv6, so that any address answers.
        dual = socket.has_dualstack_ipv6()
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        )
    except OSError as error:
        raise UserError(
            f"port {port} on {socket.gethostname()} is busy ({error.strerror}); choose another one:"
            " MASTER_PORT=29876 make ..."
        ) from None
    with server, selectors.DefaultSelector() as selector:
        server.settimeout(0.2)
        selector.register(server, selectors.EVENT_READ)
        while len(callers) < expected and (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            with contextlib.suppress(OSError, UnicodeDecodeError):
                caller, _ = server.accept()
                with caller:
                    caller.settimeout(2)
                    given, _, who = caller.recv(LONGEST_GREETING).decode().partition(" ")
                    if given == token and who:
                        caller.sendall(token.encode())
                        own = _plain(caller.getsockname()[0])
                        callers[who] = Route(
                            interface_of(own), own, _plain(caller.getpeername()[0])
                        )
    return callers


def call(
    candidates: Iterable[str], port: int, token: str, who: str, timeout_s: float
) -> Route | None:
    """Call each address of another host in turn until one answers with the token; else None."""
    candidates = list(candidates)
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        for address in candidates:
            with contextlib.suppress(OSError):
                wait = max(0.1, min(3.0, left))
                with socket.create_connection((address, port), timeout=wait) as line:
                    line.sendall(f"{token} {who}".encode())
                    if line.recv(LONGEST_GREETING).decode(errors="replace") == token:
                        own = _plain(line.getsockname()[0])
                        return Route(interface_of(own), own, _plain(line.getpeername()[0]))
        time.sleep(0.1)
    return None


def _plain(address: str) -> str:
    """An IPv4 address as such, also where an IPv6 socket took the call."""
    return address.removeprefix("::ffff:").partition("%")[0]
