"""launch/hosts/fleet.py and launch/hosts/spares.py: which hosts train, which wait, and who takes
over.

Pure of processes: the look at hosts is replaced by a list of those that are not fit.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from base.errors import UserError
from launch.hosts import fleet as module
from launch.hosts.cluster import AgentCluster
from launch.hosts.fleet import Fleet, blamed
from launch.hosts.hostfile import Host, parse, part
from launch.hosts.judge import Need
from launch.hosts.place import Place
from launch.hosts.preflight import Inspection, StartPlan
from launch.hosts.spares import SpareWatch
from recipes.schema import Restart
from record.attempts import Attempt

NAMES = ["a", "b", "c", "d"]


class World:
    """Four hosts, two of which train; `unfit` are those that the look finds so."""

    def __init__(self, monkeypatch, spares: int = 2, **rules):
        self.unfit: set[str] = set()
        self.failed: list[tuple[str, str, float]] = []
        self.notes: list[tuple] = []
        self.said: list[str] = []
        self.told: list[str] = []
        self.waits = 0
        self.most_hosts = 4
        train, wait = part([Host(name, 1) for name in NAMES[: 2 + spares]], spares)
        self.fleet = Fleet(
            Place(AgentCluster(train, Path()), (), tuple(wait)),
            Inspection(Need(), {}),
            Restart(**rules),
            self,
            self.resize,
            self.said.append,
            self.pause,
            lambda kind, text: self.told.append(kind),
        )
        monkeypatch.setattr(module, "preflight", self.look)
        self.looks = 0

    def failures(self):
        return self.failed

    def note(self, host, state, **facts):
        self.notes.append((host, state, facts.get("by")))

    def look(self, cluster, inspection, log, known):
        self.looks += 1
        self.asked = [host.name for host in cluster.hosts if host.name not in known]
        wrong = [host.name for host in cluster.hosts if host.name in self.unfit]
        if wrong:
            raise UserError(*(f"{name}: clock is 120 s ahead" for name in wrong))
        plan = StartPlan(1, [{"name": host.name} for host in cluster.hosts], [])
        return plan, {host.name: {} for host in cluster.hosts}

    def pause(self, seconds):
        self.waits += 1

    def resize(self, hosts):
        if hosts < 2 and self.most_hosts == 4:
            raise UserError("batch_tokens does not divide")

    def prepare(self, cause: str | None, *lost: str) -> list[str]:
        attempt = cause and Attempt(0.0, 1.0, cause=cause, status=1, from_step=0)
        plan = self.fleet.prepare(attempt, lost)
        return [host["name"] for host in plan.hosts]


def test_a_spare_takes_the_slot_of_a_lost_host_and_the_lost_one_waits(monkeypatch):
    world = World(monkeypatch)
    assert world.prepare(None) == ["a", "b"]
    assert world.prepare("lost_host", "a") == ["c", "b"]
    assert [host.name for host in world.fleet.spares] == ["d", "a"]
    assert world.notes == [("a", "replaced", "c")]
    assert any("spare c takes the place of a (lost)" in line for line in world.said)
    assert world.prepare("lost_host", "b") == ["c", "d"]
    assert world.prepare("lost_host", "c") == ["a", "d"]  # which has come back


def test_healthy_hosts_are_not_looked_at_again_after_a_killed_rank(monkeypatch):
    world = World(monkeypatch)
    world.prepare(None)
    assert world.prepare("killed") == ["a", "b"]
    assert world.looks == 1
    assert world.prepare("hung") == ["a", "b"]
    assert (world.looks, world.asked) == (2, ["a", "b"])
    assert world.prepare("lost_host", "a") == ["c", "b"]
    assert world.asked == ["c"]


def test_an_unfit_host_is_replaced_also_at_the_start_and_unfit_spares_are_passed_over(monkeypatch):
    world = World(monkeypatch)
    world.unfit = {"b", "c"}
    assert world.prepare(None) == ["a", "d"]
    assert ("b", "replaced", "c") in world.notes


def test_without_spares_an_unfit_host_is_refused_at_the_start(monkeypatch):
    world = World(monkeypatch, spares=0)
    world.unfit = {"b"}
    with pytest.raises(UserError, match="b: clock is 120 s ahead"):
        world.prepare(None)


def test_without_spares_a_lost_host_is_waited_for(monkeypatch):
    world = World(monkeypatch, spares=0)
    world.prepare(None)
    world.unfit = {"b"}

    def comes_back(seconds):
        world.waits += 1
        if world.waits == 3:
            world.unfit.clear()

    world.fleet.pause = comes_back
    assert world.prepare("lost_host", "b") == ["a", "b"]
    assert world.waits == 3
    assert any("b: not fit, and no spare is left; trying again" in line for line in world.said)
    assert world.told == ["waiting"]  # once


def test_trouble_of_the_launching_machine_is_waited_for_as_well(monkeypatch):
    world = World(monkeypatch)
    world.prepare(None)
    troubles, look = ["ssh: Resource temporarily unavailable"], world.look

    def troubled(*arguments):
        if troubles:
            raise UserError(troubles.pop())
        return look(*arguments)

    monkeypatch.setattr(module, "preflight", troubled)
    assert world.prepare("lost_host", "b") == ["a", "c"]
    assert "temporarily unavailable; trying again" in world.said[-1]


def test_where_it_does_not_come_back_the_run_stops_or_shrinks(monkeypatch):
    world = World(monkeypatch, spares=0, wait_s=0)
    world.prepare(None)
    world.unfit = {"b"}
    with pytest.raises(UserError, match=r"did not come back within 0 s .*restart.shrink=true"):
        world.prepare("lost_host", "b")
    world = World(monkeypatch, spares=0, wait_s=0, shrink=True)
    world.prepare(None)
    world.unfit = {"b"}
    with pytest.raises(UserError, match=r"1 host: no way out\nbatch_tokens does not divide"):
        world.prepare("lost_host", "b")
    world.most_hosts = 1
    assert world.prepare("lost_host", "b") == ["a"]
    assert world.notes[-1][:2] == ("b", "left_out")


def test_repeat_offenders_are_barred_unless_they_are_included(monkeypatch):
    now = time.time()
    world = World(monkeypatch)
    world.failed = [("b", "killed", now - n) for n in range(3)]
    world.failed += [("a", "failed", now)] * 9 + [("c", "hung", now - 90_000)] * 9
    assert world.fleet.barred() == {"b": 3}
    assert world.prepare(None) == ["a", "c"]
    assert any("barred: it failed 3 times within a day" in line for line in world.said)
    world.fleet.included = ("b",)
    assert world.fleet.barred() == {}
    world = World(monkeypatch, spares=0)
    world.failed = [("b", "hung", now)] * 3
    assert world.prepare(None) == ["a", "b"]
    assert any("no spare is left" in line for line in world.said)


def test_problems_are_attributed_to_the_hosts_they_name():
    hosts = [Host("a", 1), Host("b", 1)]
    assert blamed(["b: clock", "corpus x: odd"], hosts) == [hosts[1]]


def test_the_hostfile_marks_spares_and_the_last_ones_wait():
    hosts = parse("a slots=1\nb slots=1 spare # old\nc slots=1\nd slots = 1\n", "hosts")
    assert [(host.name, host.is_spare) for host in hosts] == [
        ("a", False),
        ("b", True),
        ("c", False),
        ("d", False),
    ]
    train, wait = part(hosts, 1)
    assert ([h.name for h in train], [h.name for h in wait]) == (["a", "c"], ["b", "d"])
    with pytest.raises(UserError, match="SPARES=3 leaves no host to train, of 3 hosts"):
        part(hosts, 3)


def test_a_spare_is_reported_when_it_comes_or_goes(monkeypatch):
    said, state = [], {"wrong": "no answer"}
    inspection, place = Inspection(Need(), {}), Place(AgentCluster([], Path()), ())
    watch = SpareWatch(
        Fleet(place, inspection, Restart(), World(monkeypatch), lambda hosts: None, said.append)
    )
    monkeypatch.setattr(watch, "look", lambda host: state["wrong"])
    for wrong in ("no answer", "no answer", "", "", "clock"):
        state["wrong"] = wrong
        watch._report(Host("c", 1), watch.look(Host("c", 1)))
    assert said == ["spare c: not fit: no answer", "spare c: ready", "spare c: not fit: clock"]


def test_one_outage_of_several_hosts_counts_once_against_each(monkeypatch):
    """They take each other's place in vain until they are back; none is barred by that."""
    world, causes = World(monkeypatch, spares=1, wait_s=600), []
    world.fleet.prepare(None)
    world.note = lambda host, state, **facts: causes.append((host, facts.get("cause")))
    world.unfit = {"b", "c"}

    def pause(seconds: float) -> None:
        world.waits += 1
        if world.waits == 5:
            world.unfit.clear()

    world.fleet.pause = pause
    world.fleet.prepare(Attempt("lost_host", 1, (0, 5, 0), True, host="b"), {"b"})
    assert world.waits == 5
    assert len(causes) > 2
    assert [host for host, cause in causes if cause == "unfit"] == ["c"]
