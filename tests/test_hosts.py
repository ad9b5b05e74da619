"""Real runs on several hosts: network namespaces with names and ssh servers of their own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest
from clones import SMALL, make_clone, start
from namespaces import Hosts, processes_in
from ranks import PATIENCE, environment, run_command

from runtime.records import read_metrics

pytestmark = [
    pytest.mark.skipif(bool(namespaces.why_not()), reason=str(namespaces.why_not())),
    pytest.mark.skipif(bool(namespaces.why_no_ssh()), reason=str(namespaces.why_no_ssh())),
]
# 12 sequences a step divide over one, two and three hosts.
RUN = ["batch_tokens=768", "steps=5", "cluster.timeout_s=60"]
FINISHED, REFUSED = 0, 93


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("a shared folder"))
    done = start(clone, "run=one", *RUN)
    assert done.returncode == FINISHED, done.stdout
    return clone


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three hosts, and the ssh command that reaches them from the first."""
    with namespaces.hosts(tmp_path_factory.mktemp("hosts"), 3, net=os.getpid() % 200) as made:
        yield made, f"ssh -F {made.serve_ssh()}"


def launcher(hosts: Hosts, clone: Path, ssh: str, count: int, *words: str, module="launch.local"):
    """The command that starts a run from the first host on the first `count` of them."""
    (clone / f"hosts{count}").write_text("".join(f"node{n} slots=1\n" for n in range(1, count + 1)))
    place = ["--hostfile", f"hosts{count}", "--ssh", ssh]
    rest = ["--", *SMALL, *RUN, *words] if module == "launch.local" else []
    return hosts.command(1, sys.executable, "-m", module, *place, *rest)


def run_on(hosts, clone, ssh, count, *words, module="launch.local", timeout_s=150):
    command = launcher(hosts, clone, ssh, count, *words, module=module)
    return run_command(command, timeout_s, cwd=clone, PYTHONPATH=str(clone))


def nothing_stays(clone: Path, within_s: float = 15) -> bool:
    deadline = time.monotonic() + within_s * PATIENCE
    while processes_in(clone) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes_in(clone)


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_joined_by_a_network_train_as_one_machine_does(clone, three, count):
    hosts, ssh = three
    done = run_on(hosts, clone, ssh, count, f"run=on{count}", "zero=2")
    assert done.returncode == FINISHED, done.stdout
    assert f"interface pt{hosts.net}i2 on node2: it carries the connection to node1" in done.stdout
    assert "step 5/5" in done.stdout
    one, many = (
        read_metrics(clone / "runs" / run / "metrics.jsonl") for run in ("one", f"on{count}")
    )
    assert [line["step"] for line in many] == [line["step"] for line in one] == [1, 2, 3, 4, 5]
    for a, b in zip(one, many, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    for rank in range(count):
        log = (clone / "runs" / f"on{count}" / "logs" / f"rank-{rank:05d}.log").read_text()
        assert f"on node{rank + 1}" in log
    assert nothing_stays(clone)


def test_a_killed_rank_of_another_host_ends_the_run_and_is_named(clone, three):
    hosts, ssh = three
    command = launcher(hosts, clone, ssh, 2, "run=killed", "steps=100000", "eval_tokens=0")
    process = subprocess.Popen(
        command,
        cwd=clone,
        env=environment(PYTHONPATH=str(clone)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = clone / "runs" / "killed" / "logs" / "rank-00001.log"
    metrics = clone / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 90 * PATIENCE
    try:
        while not (metrics.exists() and metrics.stat().st_size and log.exists()):
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.2)
        pid = int(re.search(r"process (\d+)", log.read_text()).group(1))
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60 * PATIENCE)
    finally:
        process.terminate()
    assert process.returncode == 128 + signal.SIGKILL, output
    told = output[output.index("failed:") :].splitlines()
    assert "rank 1 of 2 on node2 was killed by SIGKILL" in told[0]
    assert "Traceback" not in output
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
        done = run_on(hosts, clone, f"ssh -F {config}", 3, module="launch.doctor")
    assert done.returncode == REFUSED, done.stdout
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 1, done.stdout
    assert refused[0].startswith("refused: node3: every link to it is slow"), done.stdout
    assert "all-reduce over 3 ranks (cpu): right" in done.stdout
    assert nothing_stays(clone)
