"""runtime/process/rendezvous.py: ranks find rank 0's store, or report what prevents it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch.distributed as dist

from base.errors import UserError
from launch.hosts.network import free_port
from runtime.process import rendezvous


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.5)
    monkeypatch.setattr(rendezvous, "STRANGER_S", 1.5)


def meet_all(candidates, world: int, ranks, timeout_s: float = 20, name: str = "mine") -> dict:
    """What each rank got, a store or an exception, from threads."""
    got = {}

    def one(rank: int) -> None:
        try:
            got[rank] = rendezvous.join("127.0.0.1", candidates, name, rank, world, timeout_s)
        except (UserError, OSError) as error:
            got[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 20)
    return got


@contextlib.contextmanager
def silent_server():
    """A program that takes calls and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


def test_all_ranks_meet_at_a_free_port():
    got = meet_all([free_port()], 3, range(3))
    got[0].set("x", "1")
    assert all(store.get("x") == b"1" for store in got.values())


def test_a_busy_port_is_passed_over_by_all_ranks_alike():
    with silent_server() as busy:
        got = meet_all([busy, free_port()], 2, range(2))
    assert not [one for one in got.values() if isinstance(one, Exception)], got


def test_another_run_at_the_port_is_not_taken_for_ours():
    ports = [free_port(), free_port()]
    with rendezvous._Greeting("127.0.0.1", ports, "theirs") as theirs:
        theirs.start()
        got = meet_all(ports, 2, range(2))
    got[0].set("x", "1")
    assert got[1].get("x") == b"1"


def test_a_plain_store_of_torch_at_the_port_is_passed_over():
    ports = [free_port(), free_port()]
    theirs = dist.TCPStore("127.0.0.1", ports[0], is_master=True, wait_for_workers=False)
    got = meet_all(ports, 2, range(2))
    got[0].set("x", "1")
    assert got[1].get("x") == b"1"
    assert not theirs.check(["x"])


def test_a_busy_port_that_was_asked_for_is_one_message_on_every_rank_before_the_time_limit():
    with silent_server() as busy:
        got = meet_all([busy], 3, range(3), timeout_s=60)
    for error in got.values():
        assert isinstance(error, UserError)
        assert f"port {busy} of 127.0.0.1 (MASTER_PORT) is in use" in str(error)


def test_ranks_that_do_not_come_are_named():
    got = meet_all([free_port()], 4, [0, 2], timeout_s=2)
    for error in got.values():
        assert "2 of 4 ranks did not come within 2 s" in str(error)
        assert "rank 1, 3" in str(error)


def test_a_store_that_never_opens_is_named():
    port = free_port()
    (error,) = meet_all([port], 2, [1], timeout_s=1).values()
    assert f"rank 0 did not answer at port {port} of 127.0.0.1" in str(error)


def test_the_store_listens_where_the_ranks_meet_and_nowhere_else():
    port = free_port()
    got = meet_all([port], 2, range(2))
    others = [
        address
        for _, _, _, _, (address, *_) in socket.getaddrinfo(socket.gethostname(), None)
        if not address.startswith(("127.", "::1"))
    ]
    for address in others:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=2)
    assert len(got) == 2


def test_two_jobs_of_slurm_try_other_ports():
    one, two = (rendezvous.ports({"SLURM_JOB_ID": job}) for job in ("4711", "4712"))
    assert len(set(one)) == rendezvous.TRIES
    assert not set(one) & set(two)
    assert rendezvous.ports({"SLURM_JOB_ID": "4711", "MASTER_PORT": "29111"}) == [29111]
    with pytest.raises(UserError, match="MASTER_PORT="):
        rendezvous.ports({"MASTER_PORT": "http"})
