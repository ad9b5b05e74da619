"""One rank's or one host's view of the files is not the truth: disagreement is not damage."""

from __future__ import annotations

import errno
import os
import pickle
import threading

import pytest
from manifests import WORLD, folder
from rank_threads import run_threads
from saves_on_threads import save_on_all, steps, tensors
from small_fragments import blank, cut_flat

from base.errors import Shared, UserError
from checkpoint.format.blocks import Problem
from checkpoint.load import rank_views
from checkpoint.load.choosing import at_step
from checkpoint.load.rank_views import described, disputes, ranks_on_hosts, witnesses
from checkpoint.load.restoring import load


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 90, 100 and 1000."""
    for step in (90, 100, 1000):
        assert save_on_all(tmp_path, step, world=WORLD)[0].ok
    return tmp_path


class Hosts:
    """Ranks as threads, each on a host of its own that may not see, or read wrongly, some files."""

    def __init__(self, monkeypatch):
        self.own = threading.local()
        self.hidden: dict[int, str] = {}  # rank -> part of a path
        self.flipped: set[int] = set()  # ranks that read other bytes from data files
        self.looks = 0  # of hidden files
        self.until = 10**9  # looks after which a hidden file is there
        monkeypatch.setattr(rank_views, "PAUSES_S", (0.01, 0.01))
        monkeypatch.setattr(rank_views, "host_name", lambda: f"node{self.own.rank}")
        for name in ("open", "scandir"):
            monkeypatch.setattr(os, name, self._hiding(getattr(os, name)))
        monkeypatch.setattr(os, "preadv", self._flipping(os.preadv))

    def _hiding(self, call):
        def seen(path, *args, **options):
            part = self.hidden.get(getattr(self.own, "rank", None))
            if part and part in str(path):
                self.looks += 1
                if self.looks <= self.until:
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            return call(path, *args, **options)

        return seen

    def _flipping(self, call):
        def seen(descriptor, buffers, offset):
            count = call(descriptor, buffers, offset)
            if getattr(self.own, "rank", None) in self.flipped and count:
                buffers[0][0] ^= 1
            return count

        return seen

    def load(self, run, step=None, world=WORLD):
        """What `load` returned or raised on each rank."""
        empty = [blank(fragments) for fragments in cut_flat(tensors(0), world)]

        def one(comm):
            self.own.rank = comm.rank
            return load(run, empty[comm.rank], comm, step)

        return run_threads(world, one)


@pytest.fixture
def hosts(monkeypatch):
    return Hosts(monkeypatch)


def refused_alike(results, run):
    """The one message with which all ranks refuse; nothing was renamed."""
    assert all(isinstance(result, Shared) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert steps(run) == [90, 100, 1000]
    assert not list((run / "checkpoints").glob("*.damaged-*"))
    return str(results[0])


@pytest.mark.parametrize("name", ["rank-00001.bin", "rank-00001.json"])
def test_a_file_that_one_host_cannot_see_is_no_damage(name, run, hosts):
    hosts.hidden[1] = f"step-00001000/{name}"
    message = refused_alike(hosts.load(run), run)
    assert f"{name}: rank 1 (host node1) cannot read it (" in message
    assert "No such file or directory" in message
    assert "but rank 0 (host node0) can" in message
    assert "nothing was renamed and no older checkpoint was taken" in message
    hosts.hidden.clear()
    assert {result.step for result in hosts.load(run)} == {1000}


@pytest.mark.parametrize("step", [None, 1000])
def test_what_rank_0_alone_cannot_see_is_no_damage_either(step, run, hosts):
    hosts.hidden[0] = "step-00001000/MANIFEST.json"
    message = refused_alike(hosts.load(run, step), run)
    assert "step-00001000: rank 0 (host node0) cannot read it" in message
    assert "but rank 1 (host node1) can" in message


@pytest.mark.parametrize("blind", [0, 1])
def test_a_host_without_the_folder_is_named_and_the_run_is_not_started_anew(blind, run, hosts):
    """Rank 0 without the mount would begin at step 0; another one would find all damaged."""
    hosts.hidden[blind] = "/checkpoints"
    message = refused_alike(hosts.load(run), run)
    assert f"rank {blind} (host node{blind}) sees no checkpoint" in message
    assert f"rank {1 - blind} (host node{1 - blind}) sees 3 checkpoints, the last one" in message
    assert "is it mounted?" in message


def test_a_host_that_reads_other_bytes_is_named(run, hosts):
    """Its memory, its link or its disk: the file is whole for the others."""
    hosts.flipped.add(1)
    message = refused_alike(hosts.load(run), run)
    assert "rank 1 (host node1) cannot read it" in message
    assert "differs from its digests" in message


def test_a_file_that_appears_late_is_waited_for(run, hosts):
    hosts.hidden[1], hosts.until = "step-00001000/rank-00001.bin", 2
    results = hosts.load(run)
    assert {result.step for result in results} == {1000}
    assert results[0].damaged == []


def test_damage_that_all_see_is_damage_as_before(run, hosts):
    path = folder(run, 1000) / "rank-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    results = hosts.load(run)
    assert {result.step for result in results} == {100}
    assert "rank-00001.bin" in str(results[0].damaged)
    assert hosts.load(run, world=1)[0].step == 100


def test_a_step_asked_for_that_is_damaged_for_all_is_refused_as_damaged(run, hosts):
    (folder(run, 100) / "rank-00000.bin").unlink()

    def one(comm):
        hosts.own.rank = comm.rank
        return at_step(run, 100, comm)

    for result in run_threads(WORLD, one):
        assert isinstance(result, UserError)
        assert not isinstance(result, Shared)
        assert "rank-00000.bin" in str(result)


def test_a_problem_keeps_its_kind_and_file_on_its_way_to_other_ranks():
    problem = pickle.loads(pickle.dumps(Problem("torn", "truncated", "rank-00001.bin")))
    assert (problem, problem.kind, problem.file) == ("torn", "truncated", "rank-00001.bin")


def test_witnesses_are_one_rank_of_each_of_the_first_hosts_that_reported_nothing():
    hosts = ["a", "a", "b", "b", "c", "d", "e", "f"]
    assert witnesses(hosts, "x", {}) == [0, 2, 4, 5]
    assert witnesses(hosts, "x", {0: {"x": ["gone"]}, 2: {"y": ["gone"]}}) == [1, 2, 4, 5]
    assert witnesses(["a", "a"], "x", {0: {"x": ["gone"]}, 1: {"x": ["gone"]}}) == []


def test_a_file_is_disputed_only_where_some_rank_read_it_whole(tmp_path):
    views = [{"x": [], "y": ["gone"]}, {"x": ["torn"]}, {}, {"y": ["gone"]}]
    assert disputes(views) == ["x"]
    lines = described(views, ["a", "b", "b", "c"], tmp_path)
    assert lines[0] == "x: rank 1 (host b) cannot read it (torn), but rank 0 (host a) can"
    assert "Check on b that" in lines[-1]
    assert ranks_on_hosts([0, 1, 2, 3, 4, 5], ["a"] * 5 + ["b"]) == (
        "ranks 0, 1, 2, 3 and 1 more (host a), rank 5 (host b)"
    )
