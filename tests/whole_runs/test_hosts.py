"""Runs on several hosts: network namespaces, each with its own name and ssh server."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from pathlib import Path

import namespaces
import pytest
from clones import SMALL, make_clone, start
from namespaces import Hosts, processes_in
from ranks import PATIENCE, run_command

from benchmarks import chaos
from record.records import read_events, read_metrics

pytestmark = [
    pytest.mark.skipif(bool(namespaces.why_not()), reason=str(namespaces.why_not())),
    pytest.mark.skipif(bool(namespaces.why_no_ssh()), reason=str(namespaces.why_no_ssh())),
]
# 12 sequences a step divide over one, two and three hosts.
STEPS = chaos.STEPS
RUN = ["batch_tokens=768", f"steps={STEPS}", "cluster.timeout_s=60"]
FINISHED, REFUSED = 0, 93


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("a shared folder"))
    done = start(clone, "run=one", *RUN)
    assert done.returncode == FINISHED, done.stdout
    return clone


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Four hosts, and the ssh command that reaches them from the first."""
    with namespaces.hosts(tmp_path_factory.mktemp("hosts"), 4, net=os.getpid() % 200) as made:
        yield made, f"ssh -F {made.serve_ssh()}"


def launcher(
    hosts: Hosts, clone: Path, ssh: str, count: int, *words: str, module="commands.pretrain"
):
    """Command that starts a run from the first host on the first `count` hosts."""
    (clone / f"hosts{count}").write_text("".join(f"node{n} slots=1\n" for n in range(1, count + 1)))
    place = ["--hostfile", f"hosts{count}", "--ssh", ssh]
    rest = ["--", *SMALL, *RUN, *words] if module == "commands.pretrain" else []
    return hosts.command(1, sys.executable, "-m", module, *place, *rest)


def run_on(hosts, clone, ssh, count, *words, module="commands.pretrain", timeout_s=150):
    command = launcher(hosts, clone, ssh, count, *words, module=module)
    return run_command(command, timeout_s, cwd=clone, PYTHONPATH=str(clone))


def nothing_stays(clone: Path, within_s: float = 15) -> bool:
    deadline = time.monotonic() + within_s * PATIENCE
    while processes_in(clone) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes_in(clone)


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_joined_by_a_network_train_as_one_machine_does(clone, hosts, count):
    made, ssh = hosts
    done = run_on(made, clone, ssh, count, f"run=on{count}", "zero=2")
    assert done.returncode == FINISHED, done.stdout
    assert f"interface pt{made.net}i2 on node2: it carries the connection to node1" in done.stdout
    assert f"step {STEPS}/{STEPS}" in done.stdout
    one, many = (
        read_metrics(clone / "runs" / run / "metrics.jsonl") for run in ("one", f"on{count}")
    )
    steps = [line["step"] for line in many]
    assert steps == [line["step"] for line in one] == list(range(1, STEPS + 1))
    for a, b in zip(one[:5], many, strict=False):  # later, rounding grows with the learning
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    for rank in range(count):
        log = (clone / "runs" / f"on{count}" / "logs" / f"rank-{rank:05d}.log").read_text()
        assert f"on node{rank + 1}" in log
    assert nothing_stays(clone)


def test_a_killed_rank_and_a_lost_host_of_the_store_cost_a_life_each_and_no_bit(clone, hosts):
    """The launcher on node1, ranks on node2 and node3, node4 waits."""
    made, ssh = hosts
    words = [*SMALL, *RUN, "zero=2", "checkpoint.interval=10", "cluster.lost_s=20"]
    bed = chaos.FaultyHosts(clone, made, ssh, words)
    try:
        bed.start("struck")
        bed.await_steps(12)
        chaos.killed_rank(1)(bed)
        bed.wait(lambda: len(read_events(bed.run, "first_step")) == 2)
        bed.await_steps(24)
        made.power_off(2)
        assert bed.end() == FINISHED, bed.output()
    finally:
        bed.stop()
    said = bed.output()
    assert "failed: rank 1 of 2 on node3 was killed by SIGKILL" in said
    assert "spare node4 takes the place of node2 (lost)" in said
    assert "Traceback" not in said
    attempts = read_events(bed.run, "attempt")
    assert [(line["attempt"], line["cause"], line["host"]) for line in attempts] == [
        (1, "killed", "node3"),
        (2, "lost_host", "node2"),
        (3, "finished", None),
    ]
    for line, after in itertools.pairwise(attempts):
        assert 0 <= line["last_step"] - after["from_step"] <= 10
        assert after["from_step"] == line["saved_step"]
    assert chaos.final_weights(bed.run) == chaos.final_weights(clone / "runs" / "on2")
    steps = [line["step"] for line in read_metrics(bed.run / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    assert nothing_stays(clone)


SHIFTED = "import time\n_now = time.time\ntime.time = lambda: _now() + 120\n"


def test_what_is_wrong_on_one_host_is_refused_before_step_0_by_host_and_key(
    clone, tmp_path, tmp_path_factory
):
    odd = tmp_path / "odd"
    (odd / "numpy-0.1.dist-info").mkdir(parents=True)
    (odd / "numpy-0.1.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 0.1\n")
    (odd / "sitecustomize.py").write_text(SHIFTED)
    hidden = f"mount -t tmpfs none {shlex.quote(str(clone / 'runs'))}"
    net = (os.getpid() + 1) % 200
    with namespaces.hosts(tmp_path_factory.mktemp("odd"), 3, net) as hosts:
        config = hosts.serve_ssh(
            variables={2: {"PYTHONPATH": str(odd), "NCCL_ALGO": "Tree"}}, prepare={3: hidden}
        )
        done = run_on(hosts, clone, f"ssh -F {config}", 3, "run=odd")
    assert done.returncode == REFUSED
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 4, done.stdout
    for part in (
        "refused: node2: numpy 0.1, but ",
        "refused: node2: variable NCCL_ALGO Tree, but is not set on node1",
        "refused: node2: clock is 120 s ahead",
        "refused: node3: folder is not shared: ",
    ):
        assert any(line.startswith(part) for line in refused), (part, done.stdout)
    assert not (clone / "runs" / "odd").exists()
    assert not list((clone / "runs").glob(".doctor*"))
    assert nothing_stays(clone)


@pytest.mark.skipif(bool(namespaces.why_no_taps()), reason=str(namespaces.why_no_taps()))
def test_the_doctor_names_the_host_behind_a_slow_cable(clone, tmp_path_factory):
    net = (os.getpid() + 2) % 200
    with namespaces.hosts(tmp_path_factory.mktemp("slow"), 3, net) as hosts:
        hosts.slow_down(3, mib_per_s=4)
        config = hosts.serve_ssh()
        done = run_on(hosts, clone, f"ssh -F {config}", 3, module="commands.doctor")
    assert done.returncode == REFUSED, done.stdout
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 1, done.stdout
    assert refused[0].startswith("refused: node3: every link to it is slow"), done.stdout
    assert "all-reduce over 3 ranks (cpu): right" in done.stdout
    assert nothing_stays(clone)
