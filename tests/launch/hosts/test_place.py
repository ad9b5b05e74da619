"""launch/hosts/place.py: NPROC, WORLD and HOSTFILE are one idea."""

from __future__ import annotations

import argparse

import pytest

from base.errors import UserError
from launch.hosts.place import (
    add_place,
    place_variables,
    planned_world,
    ranks_on_each,
    read_place,
    start_options,
)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_place(parser)
    return parser.parse_args(words)


@pytest.fixture
def hosts(tmp_path) -> str:
    path = tmp_path / "hosts"
    path.write_text("a slots=8\nb slots=8\nc slots=8\n")
    return f"--hostfile={path}"


@pytest.mark.parametrize(
    ("words", "per_host", "world"),
    [
        ([], None, None),
        (["--nproc=2"], 2, 2),
        (["--world=2"], 2, 2),
        (["--nproc=2", "--world=2"], 2, 2),
    ],
)
def test_on_this_machine_nproc_and_world_are_the_same(words, per_host, world):
    given = options(*words)
    assert (ranks_on_each(given, read_place(given)), planned_world(given)) == (per_host, world)


@pytest.mark.parametrize(
    ("words", "per_host"),
    [
        ([], 8),
        (["--nproc=4"], 4),
        (["--world=12"], 4),
        (["--world=12", "--nproc=4"], 4),
    ],
)
def test_on_hosts_each_gives_the_other(hosts, words, per_host):
    given = options(hosts, *words)
    assert ranks_on_each(given, read_place(given)) == per_host
    assert planned_world(given) == 3 * per_host


def test_spares_carry_no_ranks(hosts):
    given = options(hosts, "--spares=1", "--world=16")
    assert (ranks_on_each(given, read_place(given)), planned_world(given)) == (8, 16)


def test_hosts_of_a_plan_need_no_names():
    assert planned_world(options("--world=64", "--nproc=8")) == 64


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--world=16"], "WORLD=16 ranks on 3 hosts are not the same number on each"),
        (["--world=12", "--nproc=3"], "WORLD=12 ranks on 3 hosts are 4 on each, and NPROC=3"),
        (["--world=48"], "NPROC=16 is more than the slots=8 of a"),
        (["--world=x"], "WORLD='x' is not a number of ranks"),
    ],
)
def test_contradictions_are_refused(hosts, words, part):
    given = options(hosts, *words)
    with pytest.raises(UserError, match=part):
        ranks_on_each(given, read_place(given))


def test_more_ranks_than_this_machine_is_to_have_need_named_hosts():
    given = options("--world=16", "--nproc=8")
    with pytest.raises(UserError, match="are 2 hosts; name them"):
        ranks_on_each(given, None)
    with pytest.raises(UserError, match="WORLD=10 is not a multiple of NPROC=4"):
        planned_world(options("--world=10", "--nproc=4"))


def test_the_place_is_handed_on_to_the_command_that_starts_a_run(hosts):
    given = options(hosts, "--exclude=c", "--nproc=4", "--ssh=ssh -p 22")
    variables = place_variables(given)
    assert variables == (hosts.replace("--hostfile", "HOSTFILE"), "EXCLUDE=c", "SSH=ssh -p 22")
    again = options(*start_options(variables, planned_world(given)))
    assert ranks_on_each(again, read_place(again)) == 4
    assert planned_world(again) == 8
