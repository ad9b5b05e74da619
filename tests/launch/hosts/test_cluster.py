"""launch/: agents and ranks without torch - what arrives, how it ends, that nothing stays.

Hosts are this machine under other names, behind a recording fake of ssh that does what a login
does: a bare environment, and one line of text for a shell.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import processes_in
from ranks import PATIENCE, ROOT

from base.errors import UserError
from launch.hosts import network
from launch.hosts.agent import among
from launch.hosts.carriers import carriers, is_here
from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import Host
from launch.hosts.judge import Need
from launch.hosts.preflight import Inspection, StartPlan, preflight

LOST_S = math.ceil(3 * PATIENCE)  # silence of an agent that is busy, not lost
WORKER = "tests/workers/launch_worker.py"
HARD = [
    "a b",
    "it's",
    'say "x"',
    "run=x;id",
    "$(id)",
    "`id`",
    "*",
    "a=b=c",
    "é",
    "-oProxyCommand=x",
    "%h %n",
    "\n",
]

FAKE_SSH = """#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
host, line = sys.argv[-2:]
assert sys.argv[-3] == "--"
kept = {{name: os.environ[name] for name in ("HOME", "PATH", "COVERAGE_RUN") if name in os.environ}}
os.execve("/bin/sh", ["sh", "-c", line], kept | {{"PYTHONDONTWRITEBYTECODE": "1"}})
"""


@pytest.fixture
def ssh(tmp_path) -> Path:
    path = tmp_path / "fake ssh"
    path.write_text(FAKE_SSH.format(python=sys.executable, record=str(tmp_path / "argv.jsonl")))
    path.chmod(0o755)
    return path


@pytest.fixture
def cluster(ssh) -> AgentCluster:
    hosts = [Host("host-a", 2), Host("host-b.example", 2)]
    return AgentCluster(hosts, ROOT, "ssh", f"{shlex.quote(str(ssh))} -p 2222 -o User=me")


def plan(port: int = 29_123) -> StartPlan:
    hosts = [
        {"name": name, "address": "127.0.0.1", "interface": "lo", "devices": None}
        for name in ("host-a", "host-b.example")
    ]
    return StartPlan(port, hosts, [])


# A launcher in a process of its own, as `make pretrain` has one.
LAUNCH = """
import functools, json, sys
from pathlib import Path
from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import Host
from launch.hosts.preflight import StartPlan
from launch.ranks import start
from launch.ranks.screen import Screen
told = json.loads(sys.argv[1])
arguments = ["tests/workers/launch_worker.py", told["out"], told["action"], *told["arguments"]]
if told["ssh"] is None:
    root, runs, screen = Path.cwd(), Path(told["runs"]) if told["runs"] else None, Screen(2)
    with start.catch_signals() as signals:
        attempt = start.live_here(arguments, 2, root, runs, 29123, screen, signals)
    sys.exit(screen.finish(attempt.ends, signals.first))
hosts = [Host("host-a", 2), Host("host-b.example", 2)]
here = {"address": "127.0.0.1", "interface": "lo", "devices": None}
plans = [{"name": host.name} | here for host in hosts]
cluster = AgentCluster(hosts, Path.cwd(), told["via"], told["ssh"])
start.order_of = functools.partial(start.order_of, lost_s=told["lost_s"])
start_it = functools.partial(start.across, cluster, StartPlan(29123, plans, []), arguments, 1)
sys.exit(start_it(told["environment"], told["runs"]))
"""


class Launch:
    """A running launcher; two ranks, on one host or on two."""

    def __init__(self, out: Path, action: str, ssh: Path | None, *arguments: str, **told):
        out.mkdir(exist_ok=True)
        self.out = out
        told = {"via": "ssh", "environment": {}, "runs": None, "lost_s": 20 * LOST_S, **told}
        told |= {
            "out": str(out),
            "action": action,
            "arguments": arguments,
            "ssh": shlex.quote(str(ssh)) if ssh else None,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, json.dumps(told)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def started(self) -> list[dict]:
        """What both ranks were given, as soon as they run."""
        deadline = time.monotonic() + 30 * PATIENCE
        files = [self.out / f"{rank}.json" for rank in range(2)]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        return [json.loads(file.read_text()) for file in files]

    def end(self, timeout_s: float = 40) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s * PATIENCE)
        return self.process.returncode, output


def left_behind(out: Path) -> list:
    return [p for p in processes_in(ROOT) if str(out) in p[1] or "launch.hosts.agent" in p[1]]


def nothing_stays(out: Path, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s * PATIENCE
    while left_behind(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left_behind(out)


def test_ranks_get_the_same_words_and_variables_on_one_host_and_on_two(tmp_path, ssh):
    environment = {"NCCL_DEBUG": "a b'c\"$(id);é\nline", "EMPTY": ""}
    one = Launch(tmp_path / "one", "end", None, *HARD)
    two = Launch(tmp_path / "two", "end", ssh, *HARD, environment=environment)
    given = {"one": one.started(), "two": two.started()}
    for launch in (one, two):
        status, output = launch.end()
        assert (status, output) == (0, "rank 0 speaks\n")
    for ranks in given.values():
        for rank, content in enumerate(ranks):
            assert content["argv"] == HARD
            assert content["cwd"] == str(ROOT)
            assert content["env"]["RANK"] == str(rank)
            assert content["env"]["WORLD_SIZE"] == "2"
            assert content["env"]["MASTER_PORT"] == "29123"
    for rank, content in enumerate(given["two"]):
        assert content["env"]["LOCAL_RANK"] == "0"
        assert content["env"]["GROUP_RANK"] == str(rank)
        assert content["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        for name, value in environment.items():
            assert content["env"][name] == value
    # Nothing of it was ever text for a shell: every remote line is the same but for the number.
    argv = [json.loads(line) for line in (tmp_path / "argv.jsonl").read_text().splitlines()]
    assert sorted(words[-2] for words in argv) == ["host-a", "host-b.example"]
    for words in argv:
        number = ["host-a", "host-b.example"].index(words[-2])
        agent = f"{sys.executable} -m launch.hosts.agent --node {number}"
        line = f"cd {shlex.quote(str(ROOT))} && exec {agent}"
        assert words[-1] == line


def test_slots_are_numbers_within_what_a_host_shows():
    assert among([0, 2], None) == ["0", "2"]
    assert among([0, 2], "4, 5,GPU-6f") == ["4", "GPU-6f"]
    assert among([0, 2], "") == [""]
    with pytest.raises(
        UserError, match=r"slot 2 .* does not exist: 2 GPUs in CUDA_VISIBLE_DEVICES=4,5"
    ):
        among([0, 2], "4,5")


def test_options_of_the_user_come_first_so_that_they_win(tmp_path, cluster):
    (way, _) = carriers("ssh", cluster.hosts, ROOT, {}, cluster.ssh)
    assert way.command[1:5] == ("-p", "2222", "-o", "User=me")
    assert "BatchMode=yes" in way.command
    assert way.command[-3:-1] == ("--", "host-a")


def test_a_folder_and_an_interpreter_with_blanks_and_quotes_are_quoted(
    tmp_path, cluster, monkeypatch
):
    folder = tmp_path / "a b's $(id);x"
    folder.mkdir()
    python = folder / 'my "python"'
    python.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$0" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (way, _) = carriers("ssh", cluster.hosts, folder, {}, cluster.ssh)
    done = subprocess.run(["sh", "-c", way.command[-1]], capture_output=True, text=True, check=True)
    words = [str(folder), str(python), "-m", "launch.hosts.agent", "--node", "0"]
    assert done.stdout.splitlines() == words


def test_rendered_commands_name_no_interface(cluster):
    for via in ("ssh", "srun"):
        for way in carriers(via, cluster.hosts, ROOT, {"environment": {}}, cluster.ssh):
            assert "IFNAME" not in " ".join(way.command)


def test_a_secret_never_goes_through_pdsh(cluster):
    for name, value in (("WANDB_API_KEY", "x"), ("HF_ENDPOINT", "https://me:hunter2@mirror/x")):
        with pytest.raises(UserError, match=f"{name} would be visible"):
            carriers("pdsh", cluster.hosts, ROOT, {"environment": {name: value}})


@pytest.mark.parametrize(("ssh_command", "match"), [("nossh-here", "no such"), ("ssh 'x", "quot")])
def test_an_ssh_that_is_not_there_is_refused(cluster, ssh_command, match):
    with pytest.raises(UserError, match=f"SSH=.*{match}"):
        carriers("ssh", cluster.hosts, ROOT, {}, ssh_command)


def test_an_unknown_way_is_refused(cluster):
    with pytest.raises(UserError, match="VIA=telnet is not one of ssh, pdsh, srun"):
        carriers("telnet", cluster.hosts, ROOT, {})


def test_this_machine_needs_no_ssh_under_any_of_its_names(monkeypatch):
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert not is_here("host-a")
    assert is_here("LocalHost")
    assert is_here("127.0.1.1")  # Debian's address for a host's own name
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1")
    monkeypatch.setattr(network, "addresses_of", lambda name: ["127.0.0.1"])
    assert is_here("node1.cluster.local.")
    assert not is_here("node2.cluster.local")
    monkeypatch.setattr(network, "addresses_of", lambda name: ["192.0.2.7"])
    assert not is_here("node1.elsewhere.org")
    monkeypatch.setattr(socket, "gethostname", lambda: "node1.cluster.local")
    assert is_here("NODE1")
    assert is_here("node1.cluster.local")
    (way,) = carriers("ssh", [Host("localhost", 1)], ROOT, {}, "nossh-here")
    assert way.command[0] == sys.executable


@pytest.mark.skipif(not shutil.which("pdsh"), reason="no pdsh on this machine (Debian: pdsh)")
def test_pdsh_brings_the_same_words(tmp_path, ssh):
    launch = Launch(tmp_path / "out", "end", ssh, *HARD, via="pdsh", environment={"A": "%h $(id)"})
    for content in launch.started():
        assert content["argv"] == HARD
        assert content["env"]["A"] == "%h $(id)"
    assert launch.end() == (0, "rank 0 speaks\n")


# action -> exit status, what is told
ENDS = {
    "3@1+wait": (3, ["rank 1 of 2", "exit status 3"]),
    "say@1+3@1+wait": (3, ["rank 1 of 2", "ValueError: mine"]),
    "kill@1+wait": (137, ["rank 1 of 2", "SIGKILL"]),
    "refuse@1+wait": (93, ["refused: rank 1: not like this"]),
    "93": (93, []),
}


@pytest.mark.parametrize("where", ["here", "across"])
def test_the_status_of_the_failing_rank_reaches_the_caller_and_its_words_are_shown(
    tmp_path, ssh, where
):
    launches = {}
    for number, action in enumerate(ENDS):
        out = tmp_path / str(number)
        launches[action] = Launch(out, action, ssh if where == "across" else None)
    for action, (status, parts) in ENDS.items():
        got, output = launches[action].end()
        assert got == status, (action, output)
        for part in parts:
            assert part in output, (action, output)
        if action == "say@1+3@1+wait" and where == "across":
            assert "on host-b.example" in output
        assert nothing_stays(launches[action].out), action


@pytest.mark.parametrize("where", ["here", "across"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_process_behind(tmp_path, ssh, where, number):
    launch = Launch(tmp_path / "out", "child+wait", ssh if where == "across" else None)
    launch.started()
    launch.process.send_signal(number)
    status, output = launch.end()
    assert nothing_stays(launch.out)
    if number != signal.SIGKILL:
        assert status == 128 + number
        assert output.endswith("interrupted; the same command goes on from the newest checkpoint\n")
        assert "Traceback" not in output


@pytest.mark.skipif(not shutil.which("pdsh"), reason="no pdsh on this machine (Debian: pdsh)")
def test_a_signal_leaves_no_process_behind_pdsh(tmp_path, ssh):
    launch = Launch(tmp_path / "out", "child+wait", ssh, via="pdsh")
    launch.started()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 128 + signal.SIGTERM
    assert nothing_stays(launch.out)


@pytest.mark.skipif(not shutil.which("pdsh"), reason="no pdsh on this machine (Debian: pdsh)")
def test_a_host_that_falls_silent_behind_pdsh_is_lost(tmp_path, ssh):
    launch = Launch(tmp_path / "out", "wait", ssh, via="pdsh", lost_s=LOST_S)
    agents = [content["parent"] for content in launch.started()]
    os.kill(agents[1], signal.SIGSTOP)
    try:
        status, output = launch.end()
    finally:
        os.kill(agents[1], signal.SIGKILL)
    assert status != 0
    assert f"nothing was heard of it for {LOST_S} s" in output
    assert nothing_stays(launch.out)


def test_srun_brings_words_status_and_signals_as_ssh_does(tmp_path, ssh, monkeypatch):
    tool = tmp_path / "srun"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/workers/fake_srun.py "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ALLOCATION", "host-a,host-b.example")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    failing = Launch(tmp_path / "failing", "3@1+wait", ssh, *HARD, via="srun")
    waiting = Launch(tmp_path / "waiting", "child+wait", ssh, via="srun")
    for rank, content in enumerate(failing.started()):
        assert content["argv"] == HARD
        assert content["env"]["RANK"] == str(rank)
    waiting.started()
    waiting.process.send_signal(signal.SIGTERM)
    assert waiting.end()[0] == 128 + signal.SIGTERM
    status, output = failing.end()
    assert status == 3
    assert "rank 1 of 2 on host-b.example ended with exit status 3" in output
    assert nothing_stays(tmp_path)


def test_asked_twice_deaf_ranks_are_killed_at_once(tmp_path, ssh):
    launch = Launch(tmp_path / "out", "deaf+wait", ssh)
    launch.started()
    time.sleep(0.3)
    launch.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end(15)[0] == 130
    assert nothing_stays(launch.out)


def test_a_lost_connection_stops_both_hosts_and_names_the_lost_one(tmp_path, ssh):
    launch = Launch(tmp_path / "out", "wait", ssh)
    launch.started()
    agents = [
        pid for pid, words in left_behind(launch.out) if "launch.hosts.agent --node 1" in words
    ]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    status, output = launch.end()
    assert status == 1
    assert "failed: host-b.example: the connection ended with status" in output
    assert nothing_stays(launch.out)


def test_a_host_that_cannot_be_reached_is_named(tmp_path):
    path = tmp_path / "ssh"
    path.write_text("#!/bin/sh\necho 'ssh: connect to host: No route' >&2\nexit 255\n")
    path.chmod(0o755)
    cluster = AgentCluster([Host("host-a", 1), Host("host-b", 1)], ROOT, "ssh", str(path))
    with pytest.raises(UserError) as caught:
        preflight(cluster, Inspection(Need(), {}), print)
    assert len(caught.value.problems) == 2
    assert caught.value.problems[1].startswith("host-b: the connection ended with status 255")
    assert "No route" in caught.value.problems[1]
    assert "same path" not in caught.value.problems[1]
    path.write_text("#!/bin/sh\necho 'sh: 1: cd: cannot cd to /p' >&2\nexit 2\n")
    with pytest.raises(UserError, match=r"cannot cd to /p; every host needs .* the same path"):
        preflight(cluster, Inspection(Need(), {}), print)


def test_preflight_finds_the_way_and_leaves_nothing(cluster, ssh):
    # A login that sets a terminal's title and ends no line must not swallow a message.
    script = ssh.read_text()
    ssh.write_text(script.replace("os.execve(", "os.write(1, b'\\33]0;title\\7'); os.execve("))
    said = []
    got, facts = preflight(cluster, Inspection(Need(1, "cpu"), {}, port=None), said.append)
    assert [host["name"] for host in got.hosts] == ["host-a", "host-b.example"]
    assert all(host["interface"] and host["address"] for host in got.hosts)
    assert any("it carries the connection to host-a" in line for line in said)
    assert any("are one machine" in line for line in said)
    assert not list((ROOT / "runs").glob(".doctor-*"))
    assert len(facts) == 2


def test_each_rank_has_a_log_in_the_run_folder_as_soon_as_the_run_has_made_it(tmp_path, ssh):
    for name, made, expected in (
        ("refused", None, set()),
        ("new", "recipe.yaml", {"rank-00000.log", "rank-00001.log"}),
    ):
        runs = tmp_path / name
        action = f"make={runs}/{made}@0+nap+end" if made else "refuse"
        launch = Launch(tmp_path / f"out-{name}", action, ssh, runs=str(runs))
        launch.end()
        assert {path.name for path in (runs / "logs").glob("*")} == expected
        assert runs.exists() == bool(made)
        if made:
            assert "rank 1 speaks" in (runs / "logs" / "rank-00001.log").read_text()
