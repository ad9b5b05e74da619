"""Rendezvous: the ranks of a run find rank 0's key-value store through a greeting at a known port.

    rank 0         listens at the first free port of the list, and gives the store's port to
                   every caller that knows the job's name
    other ranks    call the ports of the list until one answers with that name
    all ranks      wait at the store until every rank is there

Rule: a busy port, a foreign program at the port, or a missing rank gives one readable message on
every rank, within seconds where it can be known. A TCPStore client that connects to a foreign
program waits without a limit; the greeting prevents that. torchrun brings a store of its own, which
is used as it is. Units: seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time

import torch.distributed as dist

from base.errors import UserError

# torchrun's default port; the job number is added so that two jobs on one host use other ports.
BASE_PORT = 29500
PORTS = 10_000  # the job number is taken modulo this
# Further ports of a job whose first port is busy; the stride is a prime, so jobs share few ports.
STRIDE, TRIES = 1009, 8
ANSWER_S = 3.0  # time limit for the answer to one call
# How long foreign programs may answer at every port before that is an error: rank 0 may start a
# little later, and then reports the busy ports itself.
STRANGER_S = 10.0
STRANGER = 0
ALL_KEY = "all"


def has_agent_store() -> bool:
    """True where torchrun started this rank and provides the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ports(environ) -> list[int]:
    """Ports of the rendezvous, in this order: MASTER_PORT alone, or those of the job number."""
    chosen = environ.get("MASTER_PORT")
    if chosen:
        if not chosen.isdigit() or not 0 < int(chosen) < 65536:
            raise UserError(f"MASTER_PORT={chosen[:40]!r} is not a port from 1 to 65535")
        return [int(chosen)]
    job = environ.get("SLURM_JOB_ID", "0")
    start = int(job) % PORTS if job.isdigit() else 0
    return [BASE_PORT + (start + STRIDE * n) % PORTS for n in range(TRIES)]


def job_name(environ, world: int) -> str:
    """The name by which ranks recognize the store of their own job."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return f"pretrain/{job}.{step}/{world}"


def join(
    address: str, candidates: list[int], name: str, rank: int, world: int, timeout_s: float
) -> dist.Store:
    """The key-value store of this run, once all ranks have joined.

    Raises UserError where all ports are taken, and TimeoutError where a rank did not join.
    """
    if rank:
        port = _ask_around(address, candidates, name, timeout_s)
        return _gather(_client(address, port, timeout_s), address, rank, world, timeout_s)
    with _Greeting(address, candidates, name) as greeting:
        store = dist.TCPStore(
            address,
            greeting.store_port,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=greeting.store_socket.detach(),
        )
        greeting.start()
        return _gather(store, address, rank, world, timeout_s)


def _client(address: str, port: int, timeout_s: float) -> dist.Store:
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(address, port, timeout=limit, wait_for_workers=False)
    except dist.DistError:
        raise TimeoutError(
            f"port {port} of {address} cannot be reached, where rank 0's store is; the ports"
            " between the hosts of a run must be open"
        ) from None


def _gather(store: dist.Store, address: str, rank: int, world: int, timeout_s: float) -> dist.Store:
    """Wait at the store until all ranks are there. Raises TimeoutError with the missing ranks."""
    store.set(f"here/{rank}", socket.gethostname())
    if store.add("count", 1) == world:
        store.set(ALL_KEY, "1")
    try:
        store.wait([ALL_KEY], datetime.timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        missing = [n for n in range(world) if not store.check([f"here/{n}"])]
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise TimeoutError(
            f"{len(missing)} of {world} ranks did not come within {timeout_s:.0f} s"
            f" (cluster.timeout_s): rank {shown}; look at their hosts and logs"
        ) from None
    except dist.DistNetworkError:
        raise TimeoutError(f"rank 0 at {address} ended during the rendezvous") from None
    return store


class _Greeting:
    """Rank 0's server that gives the store's port to ranks of this job, until all have joined."""

    def __init__(self, address: str, candidates: list[int], name: str):
        self._name = name
        found = (_listen(address, port) for port in candidates)
        self._server = next(filter(None, found), None)
        if self._server is None:
            raise UserError(_busy(address, candidates))
        self.store_socket = _listen(address, 0)
        self.store_port = self.store_socket.getsockname()[1]

    def start(self) -> None:
        """Answer calls from now on."""
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return  # closed: all ranks are here
            with caller, contextlib.suppress(OSError):
                caller.settimeout(ANSWER_S)
                if caller.recv(256) == f"{self._name}\n".encode():
                    caller.sendall(f"{self._name} {self.store_port}\n".encode())

    def __enter__(self) -> _Greeting:
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close does not
        self._server.close()
        self.store_socket.close()


def _listen(address: str, port: int) -> socket.socket | None:
    """A listening socket on the address of the rendezvous and on no other; None = busy.

    Where the address does not belong to this host (it may be translated), it listens on all.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        is_own = _binds(family, (place[0], 0))
    except OSError:
        is_own = False
    if not is_own:
        family, place = socket.AF_INET, ("", port)
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(place)
        server.listen(2048)
    except OSError:
        server.close()
        return None
    return server


def _binds(family: int, place: tuple) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def _ask_around(address: str, candidates: list[int], name: str, timeout_s: float) -> int:
    """The port of the store, from the first program that answers with the name of the job.

    Raises UserError where foreign programs hold all ports, and TimeoutError where nobody answers.
    """
    began = time.monotonic()
    stranger_since: float | None = None
    while (now := time.monotonic()) - began < timeout_s:
        answers = [_ask(address, port, name) for port in candidates]
        found = [port for port in answers if port]
        if found:
            return found[0]
        is_taken = all(port == STRANGER for port in answers)
        stranger_since = (stranger_since or now) if is_taken else None
        if stranger_since and time.monotonic() - stranger_since > STRANGER_S:
            raise UserError(_busy(address, candidates))
        time.sleep(0.1)
    raise TimeoutError(
        f"rank 0 did not answer at port {', '.join(map(str, candidates))} of {address} within"
        f" {timeout_s:.0f} s (cluster.timeout_s); look at its log, and at the firewall"
    )


def _ask(address: str, port: int, name: str) -> int | None:
    """The store's port as the program at `port` gives it.

    STRANGER where that program is not this job's rank 0, None where there is no program.
    """
    try:
        line = socket.create_connection((address, port), timeout=ANSWER_S)
    except OSError:
        return None
    with line:
        try:
            line.sendall(f"{name}\n".encode())
            answer = line.recv(256).decode(errors="replace").split()
        except OSError:
            return STRANGER
    return int(answer[1]) if answer[:1] == [name] and len(answer) == 2 else STRANGER


def _busy(address: str, candidates: list[int]) -> str:
    if len(candidates) > 1:
        return (
            f"ports {', '.join(map(str, candidates))} of {address} are all busy; name a free one"
            " for all ranks: export MASTER_PORT=..."
        )
    return (
        f"port {candidates[0]} of {address} (MASTER_PORT) is in use by another program; name a free"
        " one for all ranks, or unset MASTER_PORT where the launcher can choose"
    )
