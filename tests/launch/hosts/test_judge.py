"""launch/hosts/judge.py and launch/hosts/link_speeds.py: the odd host is named, with the key."""

from __future__ import annotations

import copy

import pytest

from launch.hosts.judge import Need, ailing, judge
from launch.hosts.link_speeds import slow_links
from runtime.monitor.device_table import ailments

CARD = {
    "index": 0,
    "name": "H200",
    "driver": "570.1",
    "memory_total_gib": 140.4,
    "memory_used_gib": 0.1,
    "temperature_c": 33,
    "slowdown_c": 87,
    "ailments": [],
}
GOOD = {
    "machine": "",
    "python": "3.11.7",
    "system": "Linux x86_64",
    "packages": {"torch": "2.13.0", "numpy": "2.4"},
    "code": {"pretrain.py": "aa", "runtime/engine/engine.py": "bb"},
    "environment": {"NCCL_ALGO": "Ring"},
    "disk": {"runs/": 100.0, "temporary files": 50.0, "/dev/shm": 10.0},
    "disk_mib_per_s": {"runs/": 900.0, "temporary files": 800.0},
    "shared": None,
    "missing_interfaces": [],
    "folders": {"corpora/x": "cc"},
    "port": {"number": 29001, "is_free": True},
    "gpus": {"cards": [CARD, CARD | {"index": 1}]},
}


def ail(facts: dict, **states) -> None:
    """Make the second card ill, as runtime.monitor.device_reader would tell it."""
    card = facts["gpus"]["cards"][1]
    card |= states
    card["ailments"] = [list(each) for each in ailments(card)]


def hosts(count: int = 3) -> dict[str, dict]:
    return {f"n{n}": copy.deepcopy(GOOD) | {"machine": f"n{n} x"} for n in range(1, count + 1)}


def test_on_one_machine_only_cards_that_the_ranks_use_are_judged():
    cards = [CARD | {"index": index, "ailments": []} for index in range(4)]
    cards[2]["ailments"] = [list(each) for each in ailments({"is_lost": True})]
    for ranks, visible, is_refused in (
        (2, None, False),
        (3, None, True),
        (3, "3,1,0", False),
        (2, "3, 2", True),
        (1, "3,2", False),
        (1, "GPU-5fc1", True),  # which of them is not known
        (1, "", False),
        (1, "-1", False),
    ):
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        found = ailing(cards, ranks, environ)
        assert bool(found) == is_refused, (ranks, visible)
        assert all("GPU 2: the GPU is lost" in line for line in found)
    assert ailing([], 1, {}) == []


def problems(facts, skews=None, need=Need(2)):  # noqa: B008
    return judge(facts, skews or {}, need).problems


def test_hosts_that_are_alike_are_fit():
    found = judge(hosts(), {"n1": 0.01, "n2": -0.3, "n3": 0.2}, Need(2))
    assert (found.problems, found.warnings) == ([], [])


# What is odd about n2 -> what the one line about it must say.
ODD = {
    "a version": (lambda f: f["packages"].update(torch="2.12.1"), ["torch 2.12.1", "2.13.0 on n1"]),
    "a package that lacks": (lambda f: f["packages"].pop("numpy"), ["numpy is not installed"]),
    "python": (lambda f: f.update(python="3.12.1"), ["python 3.12.1"]),
    "code": (lambda f: f["code"].update({"pretrain.py": "zz"}), ["code", "1 file (pretrain.py)"]),
    "a variable": (
        lambda f: f["environment"].update(NCCL_ALGO="Tree"),
        ["variable NCCL_ALGO Tree", "Ring"],
    ),
    "a variable of its own": (
        lambda f: f["environment"].update(NCCL_P2P_DISABLE="1"),
        ["variable NCCL_P2P_DISABLE 1", "is not set on n1"],
    ),
    "an interface": (
        lambda f: f["missing_interfaces"].append("GLOO_SOCKET_IFNAME=eth9, but the ..."),
        ["GLOO_SOCKET_IFNAME=eth9", "unset it"],
    ),
    "a missing folder": (lambda f: f.update(shared="/p/runs: No such file"), ["not shared", "/p"]),
    "a missing corpus": (lambda f: f["folders"].update({"corpora/x": None}), ["corpora/x"]),
    "another corpus": (lambda f: f["folders"].update({"corpora/x": "dd"}), ["corpus corpora/x dd"]),
    "a full disk": (lambda f: f["disk"].update({"runs/": 3.0}), ["runs/ has 3.00 GiB", "20.00"]),
    "no shared memory": (lambda f: f["disk"].update({"/dev/shm": 0.01}), ["/dev/shm"]),
    "a lost card": (lambda f: f["gpus"]["cards"].pop(), ["GPUs 1, but NPROC=2"]),
    "a hanging driver": (lambda f: f.update(gpus={"problem": "no answer"}), ["GPUs: no answer"]),
    "another driver": (
        lambda f: f["gpus"].update(cards=[c | {"driver": "1"} for c in f["gpus"]["cards"]]),
        ["GPU driver 1", "570.1"],
    ),
    "memory errors": (
        lambda f: ail(f, ecc_uncorrected=2),
        ["GPU 1: 2 uncorrected memory errors", "reset the GPU, or leave the host out"],
    ),
    "a row that waits to be remapped": (
        lambda f: ail(f, remap_pending=True),
        ["GPU 1: a memory row waits for a reset", "reset the GPU"],
    ),
    "a row that cannot be": (lambda f: ail(f, remap_failed=True), ["GPU 1", "replace the card"]),
    "a card off the bus": (lambda f: ail(f, is_lost=True), ["GPU 1: the GPU is lost", "drain"]),
    "what the driver asks for": (lambda f: ail(f, recovery_action=2), ["reboot of the host"]),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("count", [2, 3])
def test_the_odd_host_is_named_with_the_key(what, count):
    change, parts = ODD[what]
    facts = hosts(count)
    change(facts["n2"])
    found = problems(facts, need=Need(2, "auto", 20.0))
    assert len(found) == 1
    assert found[0].startswith("n2: ")
    for part in parts:
        assert part in found[0]


def test_among_three_the_majority_is_right_also_against_the_first():
    facts = hosts()
    facts["n1"]["packages"]["torch"] = "2.12.1"
    assert [line.split(":")[0] for line in problems(facts)] == ["n1"]


def test_a_clock_that_is_off_is_named():
    (line,) = problems(hosts(2), {"n1": 0.0, "n2": 120.0})
    assert line.startswith("n2: clock is 120 s ahead")
    (line,) = problems(hosts(3), {"n1": -7.0, "n2": 0.1, "n3": 0.0})
    assert line.startswith("n1: clock is 7 s behind")


def test_two_names_of_one_machine_are_told():
    facts = hosts(2)
    facts["n2"]["machine"] = facts["n1"]["machine"]
    found = judge(facts, {}, Need(2))
    assert found.warnings == ["n1 and n2 are one machine (n1) and share its GPUs and cores"]


def test_a_busy_port_is_named():
    facts = hosts(2)
    facts["n1"]["port"] = {"number": 29001, "is_free": False}
    assert "n1: port 29001" in problems(facts)[0]


def test_cards_do_not_matter_to_a_run_on_the_cpu():
    facts = hosts(2)
    facts["n2"]["gpus"] = {"cards": []}
    assert problems(facts, need=Need(2, "cpu")) == []
    assert len(problems(facts, need=Need(2, "auto"))) == 1


def test_what_slows_is_a_warning():
    facts = hosts()
    facts["n3"]["disk_mib_per_s"]["runs/"] = 20.0
    facts["n3"]["gpus"]["cards"][0]["memory_used_gib"] = 88.0
    facts["n3"]["gpus"]["cards"][0]["temperature_c"] = 80
    facts["n3"]["gpus"]["cards"].append(CARD | {"index": 2})
    found = judge(facts, {}, Need(2))
    assert found.problems == []
    assert [line.split(" ")[0] for line in found.warnings] == ["n3:"] * 4


def test_a_password_in_a_value_is_not_printed():
    facts = hosts(2)
    facts["n2"]["environment"]["HF_ENDPOINT"] = "https://me:hunter2@mirror/x"
    (line,) = problems(facts)
    assert "hunter2" not in line
    assert "mirror" in line


NAMES = ["n1", "n2", "n3", "n4"]


def speeds(slow: dict[tuple[int, int], float], count: int = 4) -> dict[tuple[int, int], float]:
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return {pair: slow.get(pair, 1000.0 + 10 * sum(pair)) for pair in pairs}


def test_equal_links_and_a_single_one_are_not_judged():
    assert slow_links(speeds({}), NAMES) == []
    assert slow_links({(0, 1): 3.0}, NAMES[:2]) == []


def test_one_slow_link_is_named_by_its_ends():
    (line,) = slow_links(speeds({(1, 3): 100.0}), NAMES)
    assert line.startswith("n2 - n4: slow link, 100.0 MiB/s")
    (line,) = slow_links(speeds({(0, 2): 5.0}, 3), NAMES[:3])
    assert line.startswith("n1 - n3: slow link")


@pytest.mark.parametrize("count", [3, 4])
def test_a_host_whose_links_are_all_slow_is_named(count):
    slow = {(a, b): 50.0 for a in range(count) for b in range(a + 1, count) if 1 in (a, b)}
    (line,) = slow_links(speeds(slow, count), NAMES[:count])
    assert line.startswith("n2: every link to it is slow (50.0 MiB/s")
