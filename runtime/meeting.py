"""How the ranks of a run find each other: one store on rank 0's host, at a port that is really ours.

    rank 0         first free port of the list -> store, with the name of the job in it
    other ranks    try the list until a store answers with that name
    all            wait until every rank is there

The one rule: a busy port, somebody else's store or a rank that never comes is one readable message
on every rank, within seconds where it can be known. torchrun brings a store of its own, which is
used as it is. Units: seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time

import torch.distributed as dist

from recipes.schema import UserError

# torchrun's default port, with the job number added so that two jobs on one host do not meet.
BASE_PORT = 29500
PORTS = 10_000  # the job number is taken modulo this
STRIDE, TRIES = 1009, 8  # further ports of a job whose first one is busy; no two jobs share many
ANSWER_S = 3.0  # for a store on another host to say whose it is
STRANGER_S = 12.0  # so long may somebody else answer at the only port before that is an error
JOB_KEY, ALL_KEY = "job", "all"


def has_agent_store() -> bool:
    """Whether torchrun started this rank and brings the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ports(environ) -> list[int]:
    """Where to meet, in this order: MASTER_PORT alone, or what the job number gives."""
    chosen = environ.get("MASTER_PORT")
    if chosen:
        if not chosen.isdigit() or not 0 < int(chosen) < 65536:
            raise UserError(f"MASTER_PORT={chosen[:40]!r} is not a port from 1 to 65535")
        return [int(chosen)]
    job = environ.get("SLURM_JOB_ID", "0")
    start = int(job) % PORTS if job.isdigit() else 0
    return [BASE_PORT + (start + STRIDE * n) % PORTS for n in range(TRIES)]


def job_name(environ, world: int) -> str:
    """What tells this run's store from others'."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return f"pretrain/{job}.{step}/{world}"


def meet(
    address: str, candidates: list[int], name: str, rank: int, world: int, timeout_s: float
) -> dist.Store:
    """The store of this run, once all ranks have come.

    Raises UserError (the only port is taken) and TimeoutError (somebody did not come).
    """
    if rank == 0:
        store = _open(address, candidates, name, timeout_s)
    else:
        store = _find(address, candidates, name, rank, timeout_s)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
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
        raise TimeoutError(f"rank 0 at {address} went away while the ranks met") from None
    return store


def _open(address: str, candidates: list[int], name: str, timeout_s: float) -> dist.Store:
    """Rank 0's store at the first port that is free."""
    for port in candidates:
        server = _listen(address, port)
        if server is None:
            continue
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
        store.set(JOB_KEY, name)
        os.environ["MASTER_PORT"] = str(port)
        return store
    raise UserError(_busy(address, candidates))


def _listen(address: str, port: int) -> socket.socket | None:
    """A listening socket on the address where the ranks meet and on no other; None = busy."""
    with contextlib.suppress(OSError):
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            server.bind(place)
            server.listen(2048)
            return server
        server.close()
        probe = socket.socket(family)
        with probe, contextlib.suppress(OSError):
            probe.bind((place[0], 0))
            return None  # the address is ours, so it is the port that is taken
    # The name is not an address of this host: a translated one, or none is known here.
    try:
        return socket.create_server(("", port), backlog=2048)
    except OSError:
        return None


def _find(
    address: str, candidates: list[int], name: str, rank: int, timeout_s: float
) -> dist.Store:
    """The store that says it is this run's."""
    began = time.monotonic()
    stranger_since: float | None = None
    while time.monotonic() - began < timeout_s:
        answers = False
        for port in candidates:
            if _answers(address, port):
                answers = True
                if store := _ask(address, port, name):
                    os.environ["MASTER_PORT"] = str(port)
                    return store
        now = time.monotonic()
        stranger_since = (stranger_since or now) if answers else None
        if stranger_since and len(candidates) == 1 and now - stranger_since > STRANGER_S:
            raise UserError(_busy(address, candidates))
        time.sleep(0.2)
    raise TimeoutError(
        f"rank 0 did not open port {', '.join(map(str, candidates))} of {address} within"
        f" {timeout_s:.0f} s (cluster.timeout_s); look at its log, and at the firewall"
    )


def _answers(address: str, port: int) -> bool:
    """Whether anybody listens there: a quick look before the store's own long one."""
    try:
        socket.create_connection((address, port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _ask(address: str, port: int, name: str) -> dist.Store | None:
    """The store at a port if it is this run's."""
    limit = datetime.timedelta(seconds=ANSWER_S)
    try:
        store = dist.TCPStore(
            address, port, is_master=False, timeout=limit, wait_for_workers=False
        )
        store.wait([JOB_KEY], limit)
        return store if store.get(JOB_KEY).decode() == name else None
    except (dist.DistError, RuntimeError):
        return None


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
