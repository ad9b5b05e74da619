"""launch/hosts/hostfile.py: which names are hosts, what a hostfile and SLURM's lists say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.errors import UserError
from launch.hosts.hostfile import (
    Host,
    choose,
    expand,
    is_host_name,
    parse,
    ranks_per_host,
    read_hosts,
)

NOT_NAMES = [
    "", "-oProxyCommand=x", "a b", "a;b", "$(id)", "`id`", "a'b", 'a"b', "a|b", "a&b", "a>b", "*",
    "user@host", "host:22", "../x", "a\\b", "a\nb", "é", "-a", "a-", ".a", "a..b", "10.0.0",
    "1.2.3.4.5", "fe80::1%eth0", "x" * 64, ".".join(["a" * 60] * 5), "%h", "!x", "~", "a,b", "[a]",
]  # fmt: skip


@pytest.mark.parametrize("name", NOT_NAMES)
def test_what_could_mean_something_to_a_shell_or_to_ssh_is_no_host_name(name):
    assert not is_host_name(name)


@pytest.mark.parametrize("name", ["worker-1", "a", "gpu01.cluster.local", "10.0.0.7", "fd00::2"])
def test_host_names_and_addresses_are(name):
    assert is_host_name(name)


@given(st.text(max_size=20))
def test_a_host_name_has_plain_characters_only(text):
    if is_host_name(text):
        assert text.isascii()
        assert not set(text) - set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-:"
        )
        assert not text.startswith("-")


def test_a_hostfile_with_comments_tabs_and_windows_lines_is_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(
        b"\xef\xbb\xbf# all\r\n\r\nworker-1\tslots=4  # the first\r\n"
        b"  worker-2 slots = 2\r\n#w3 slots=1\r\n"
    )
    assert read_hosts(path) == [Host("worker-1", 4), Host("worker-2", 2)]


def test_every_bad_line_is_named_with_its_number():
    text = (
        "a slots=4\nb\nc slots=x\na slots=2\n-oProxyCommand=sh slots=1\nd slots=0\ne slots=1 more\n"
    )
    with pytest.raises(UserError) as caught:
        parse(text, "hosts")
    problems = caught.value.problems
    assert len(problems) == 6
    for number, problem in enumerate(problems, start=2):
        assert problem.startswith(f"hosts, line {number}: ")
    assert "'b' is not NAME slots=N" in problems[0]
    assert "a is in line 1 already" in problems[2]
    assert "not a host name" in problems[3]


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_hostfile_without_hosts_is_refused(text):
    with pytest.raises(UserError, match="names no host"):
        parse(text, "hosts")


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(UserError, match=r"HOSTFILE=.*nowhere.*No such file"):
        read_hosts(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text"):
        read_hosts(tmp_path / "binary")


def test_include_and_exclude_choose_hosts_and_slots():
    hosts = [Host("a", 4), Host("b", 4), Host("c", 4)]
    assert choose(hosts, include="b@c:0,2") == [Host("b", 4), Host("c", 2, (0, 2))]
    assert choose(hosts, exclude="a@c:1") == [Host("b", 4), Host("c", 3, (0, 2, 3))]
    for include, exclude, match in (
        ("x", "", "'x' is not one of the hosts"),
        ("a:9", "", "slots 0 to 3, not 9"),
        ("a:x", "", "NAME:SLOT"),
        ("a", "b", "give one of them"),
        ("", "a@b@c", r"EXCLUDE=a@b@c leaves none of the hosts \(a, b, c\)"),
    ):
        with pytest.raises(UserError, match=match):
            choose(hosts, include, exclude)


def test_names_are_compared_as_dns_does_and_ipv6_addresses_have_colons():
    with pytest.raises(UserError, match=r"NODE1\.Here\. is in line 1 already"):
        parse("node1.here slots=1\nNODE1.Here. slots=1\n", "hosts")
    hosts = [Host("Node1", 2), Host("fd00::2", 4), Host("fd00::2:1", 4)]
    two = [Host("Node1", 2), Host("fd00::2", 2, (1, 3))]
    assert choose(hosts, include="node1@FD00::2:1,3") == two
    assert choose(hosts, include="fd00::2:1") == [Host("fd00::2:1", 4)]
    with pytest.raises(UserError, match=r"'fd00::3' is not one of the hosts \(Node1, fd00::2"):
        choose(hosts, include="fd00::3")


def test_every_host_takes_the_same_number_of_ranks():
    hosts = [Host("a", 8), Host("b", 4)]
    assert ranks_per_host(hosts, 4) == 4
    assert ranks_per_host(hosts[:1], None) == 8
    with pytest.raises(UserError, match=r"slots differ \(b: 4, a: 8\).*NPROC=4"):
        ranks_per_host(hosts, None)
    with pytest.raises(UserError, match=r"NPROC=8 is more than the slots=4 of b"):
        ranks_per_host(hosts, 8)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu[01-04,9]", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu9"]),
        ("gpu[03-04,9]-ib", ["gpu03-ib", "gpu04-ib", "gpu9-ib"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("r[1-2]n[08-10]", [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("one", ["one"]),
    ],
)
def test_slurms_node_lists_expand_as_scontrol_does(nodes, names):
    assert expand(nodes) == names


@pytest.mark.parametrize(
    "nodes", ["", "a[1-", "a]", "a[2-1]", "a[x]", "a[]", "a[1-999999999]", "$(id)[1-2]", "a[[1]]"]
)
def test_a_node_list_that_makes_no_sense_is_refused(nodes):
    with pytest.raises(UserError):
        expand(nodes)
