"""`make chaos`: injects faults into a run on several hosts and checks that it recovers.

    python -m benchmarks.chaos [--find "partition"]

    node1                   the launcher: make pretrain HOSTFILE= SPARES=1
    node2 node3 | node4     the hosts: network namespaces with ssh servers; the last is the spare

A fault is injected some steps after a checkpoint. Rule: after every fault the weights of the last
step are bit-identical to those of a run without faults. The time limit of a row is torchrun's own
time for that fault (measured separately on such hosts), plus the measured time of this start
(imports, rendezvous, first step), plus 5 s. On a busy machine the measured part grows, torchrun's
part does not. Needs root. Units: seconds, steps. Prints a table at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from base.paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "workers"))

import namespaces
from clones import SMALL, make_clone
from ranks import PATIENCE, environment

from base.exits import DO_NOT_RETRY
from checkpoint.format.manifest import committed
from record.attempts import unix_s
from record.records import read_events

STEPS, INTERVAL, STRIKES_AT = 60, 10, 14
LOST_S = 12
RUN = [
    *SMALL, f"steps={STEPS}", f"checkpoint.interval={INTERVAL}", "checkpoint.keep=100",
    "eval_tokens=0", "zero=2", "log.tensorboard=false", f"cluster.lost_s={LOST_S}",
    "cluster.timeout_s=120",
]  # fmt: skip
LIMIT_S = 240.0
# torchrun's own times on such hosts: from the fault to the restarted workers.
KILLED_S, LOST_HOST_S, PARTITION_S, HANG_S = 10.5, 17.0, 26.6, 55.0
LAUNCHER, FIRST, LAST, SPARE = 1, 2, 3, 4
HOSTS = {2, 3, 4}
EVERYBODY = {1, 2, 3, 4}


class FaultyHosts:
    """Hosts of namespaces, a clone of the project, and one run on them."""

    def __init__(self, clone: Path, hosts: namespaces.Hosts, ssh: str, run: Sequence[str]):
        self.clone, self.hosts, self.ssh, self.common = clone, hosts, ssh, run
        (self.clone / "hosts").write_text("".join(f"node{n} slots=1\n" for n in sorted(HOSTS)))
        self.run, self.arguments = Path(), []
        self.launcher: subprocess.Popen | None = None

    def command(self, *arguments: str) -> list[str]:
        """Command of the launcher, on node1."""
        place = ["--hostfile", "hosts", "--ssh", self.ssh, "--spares", "1"]
        python = [sys.executable, "-m", "commands.pretrain", *place, "--", *self.common, *arguments]
        return self.hosts.command(LAUNCHER, *python)

    def start(self, name: str, *arguments: str) -> None:
        """Start a run and return at once."""
        self.run, self.arguments = self.clone / "runs" / name, [f"run={name}", *arguments]
        self.again()

    def again(self) -> None:
        """Give the same command again, as a person would."""
        with open(self.clone / f"{self.run.name}.log", "ab") as log:
            self.launcher = subprocess.Popen(
                self.command(*self.arguments), cwd=self.clone, stdout=log, stderr=log,
                env=environment(PYTHONPATH=str(self.clone)), start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        """Text that the launcher has printed."""
        return (self.clone / f"{self.run.name}.log").read_text(errors="replace")

    def await_steps(self, steps: int) -> None:
        """Wait until `steps` steps are recorded."""
        metrics = self.run / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps)

    def wait(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until `is_so()`. Raises AssertionError past the limit, or when the run has ended."""
        deadline = time.monotonic() + limit_s * PATIENCE
        while not is_so():
            ended = self.launcher.poll()
            assert ended is None or is_so(), f"ended with {ended}:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.output()[-3000:]}"
            time.sleep(0.05)

    def rank_process(self, rank: int) -> int:
        """Process id of a rank, found by its variables: a silent rank has no log yet."""
        for number in range(1, len(EVERYBODY) + 1):
            for pid in self.hosts.processes(number):
                with contextlib.suppress(OSError):
                    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if arguments[1:2] == [b"pretrain.py"] and f"RANK={rank}".encode() in variables:
                        return pid
        raise AssertionError(f"no process of rank {rank}")

    def agent_process(self, number: int) -> int:
        """Process id of the agent that has ranks on a host."""
        for pid in self.hosts.processes(number):
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"launch.hosts.agent" in arguments and arguments[0].endswith(b"python"):
                    return pid
        raise AssertionError(f"no agent on node{number}")

    def end(self) -> int:
        """Wait for the launcher's end."""
        return self.launcher.wait(timeout=LIMIT_S * PATIENCE)

    def stop(self) -> None:
        """End the launcher, and repair the hosts."""
        if self.launcher and self.launcher.poll() is None:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()
        self.hosts.heal()


def killed_rank(rank: int) -> Callable[[FaultyHosts], None]:
    return lambda bed: os.kill(bed.rank_process(rank), signal.SIGKILL)


def frozen_host(bed: FaultyHosts) -> None:
    """Stop every process of a host (SIGSTOP), agent and ranks."""
    for pid in bed.hosts.processes(LAST):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def unheard_host(bed: FaultyHosts) -> None:
    """Cut a host off one way: it can send, and receives nothing."""
    for number in EVERYBODY:
        bed.hosts.lose_way(number, to={LAST})


def late_spare(bed: FaultyHosts) -> float:
    """Let a spare come back that was off at the start, then power another host off.

    Returns the time of the second fault.
    """
    bed.hosts.cable(SPARE, is_in=True)
    bed.hosts.start_server(SPARE)
    bed.await_steps(STRIKES_AT + 4)
    assert len(read_events(bed.run, "began")) == 1, "a late spare started the run again"
    struck = time.time()
    bed.hosts.power_off(LAST)
    return struck


def double_launch(bed: FaultyHosts) -> None:
    """Give the same command a second time while the run works; it has to be refused.

    The ranks are stopped meanwhile, because on a busy machine the refusal may take longer than the
    whole run.
    """
    ranks = [bed.rank_process(rank) for rank in range(2)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    done = subprocess.run(
        bed.command(*bed.arguments), cwd=bed.clone, env=environment(PYTHONPATH=str(bed.clone)),
        capture_output=True, text=True, timeout=LIMIT_S * PATIENCE, check=False,
    )  # fmt: skip
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == DO_NOT_RETRY, done.stdout + done.stderr
    assert "is writing" in done.stderr, done.stderr


def killed_launcher(bed: FaultyHosts) -> None:
    """Kill the launcher. The ranks end by themselves, and the same command continues the run."""
    os.killpg(bed.launcher.pid, signal.SIGKILL)
    bed.launcher.wait()
    left = [n for n in HOSTS for pid in bed.hosts.processes(n) if is_rank(pid)]
    deadline = time.monotonic() + 20 * PATIENCE
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = [n for n in HOSTS for pid in bed.hosts.processes(n) if is_rank(pid)]
    assert not left, f"ranks live on: {left}"
    bed.again()


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"pretrain.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@dataclass(frozen=True)
class Fault:
    """One fault: how it is injected, the cause to be recorded, and the time limit."""

    name: str
    strike: Callable[[FaultyHosts], float | None]
    cause: str | None  # None: the attempt continues
    torchrun_s: float
    host: str | None = None
    before: Callable[[FaultyHosts], None] = lambda bed: None
    arguments: tuple[str, ...] = ()


FAULTS = (
    Fault("rank 0 killed", killed_rank(0), "killed", KILLED_S, "node2"),
    Fault("last rank killed", killed_rank(1), "killed", KILLED_S, "node3"),
    Fault("host lost", lambda bed: bed.hosts.power_off(LAST), "lost_host", LOST_HOST_S, "node3"),
    Fault(
        "host of rank 0 and the store lost",
        lambda bed: bed.hosts.power_off(FIRST),
        "lost_host",
        LOST_HOST_S,
        "node2",
    ),
    Fault(
        "agent of a host killed",
        lambda bed: os.kill(bed.agent_process(LAST), signal.SIGKILL),
        "lost_host",
        LOST_HOST_S,
        "node3",
    ),
    Fault(
        "partition, cable pulled",
        lambda bed: bed.hosts.cable(LAST, is_in=False),
        "lost_host",
        PARTITION_S,
        "node3",
    ),
    Fault(
        "partition of rank 0, one way out",
        lambda bed: bed.hosts.lose_way(FIRST, to=EVERYBODY),
        "lost_host",
        PARTITION_S,
        "node2",
    ),
    Fault(
        "partition, one way in",
        unheard_host,
        "lost_host",
        PARTITION_S,
        "node3",
    ),
    Fault(
        "rank stands still (SIGSTOP)",
        lambda bed: os.kill(bed.rank_process(1), signal.SIGSTOP),
        "hung",
        HANG_S,
        "node3",
        arguments=("watch.step_s=10",),
    ),
    Fault("host stands still (SIGSTOP)", frozen_host, "lost_host", HANG_S, "node3"),
    Fault(
        "late spare, then host lost",
        late_spare,
        "lost_host",
        LOST_HOST_S,
        "node3",
        before=lambda bed: bed.hosts.power_off(SPARE),
    ),
    Fault("double launch", double_launch, None, 0.0),
    # The ranks notice that the launcher is gone, save and end: no step is lost.
    Fault("launcher killed, same command", killed_launcher, "preempted", LOST_HOST_S),
)


@dataclass
class FaultRow:
    """Measurements of one fault."""

    fault: Fault
    cause: str = ""
    to_step_s: float = 0.0
    limit_s: float = 0.0
    lost_steps: int = 0
    is_identical: bool = False
    problem: str = ""

    @property
    def is_late(self) -> bool:
        return self.to_step_s > self.limit_s


def inject(bed: FaultyHosts, fault: Fault, straight: dict[str, bytes]) -> FaultRow:
    """Train one run and inject one fault; `straight` has the final weights without a fault."""
    row = FaultRow(fault)
    try:
        fault.before(bed)
        bed.start(re.sub(r"\W+", "-", fault.name), *fault.arguments)
        bed.await_steps(STRIKES_AT)
        struck = time.time()
        struck = fault.strike(bed) or struck
        status = bed.end()
        assert status == 0, f"exit status {status}:\n{bed.output()[-3000:]}"
        judge(row, bed.run, struck, straight)
    except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
        row.problem = row.problem or str(error)
    finally:
        bed.stop()
    return row


def judge(row: FaultRow, run: Path, struck: float, straight: dict[str, bytes]) -> None:
    """Fill the row from the run's own record. Raises AssertionError where it is not as required."""
    row.is_identical = final_weights(run) == straight
    assert row.is_identical, "the final weights differ from those of the undisturbed run"
    attempts = read_events(run, "attempt")
    assert len(attempts) == (2 if row.fault.cause else 1), attempts
    assert attempts[-1]["cause"] == "finished", attempts
    if row.fault.cause is None:
        return
    first, second = attempts
    row.cause = first["cause"] + (f" on {first['host']}" if first["host"] else "")
    row.lost_steps = first["last_step"] - second["from_step"]
    steps = {event["attempt"]: unix_s(event) for event in read_events(run, "first_step")}
    row.to_step_s = steps[2] - struck
    row.limit_s = (
        row.fault.torchrun_s
        + 5
        + sum(second["seconds"].get(part, 0) for part in ("start", "load", "first_step"))
    )
    assert first["cause"] == row.fault.cause, first
    assert row.fault.host in (None, first["host"]), first
    assert 0 <= row.lost_steps <= INTERVAL, attempts


def final_weights(run: Path) -> dict[str, bytes]:
    """Read the data files of the newest checkpoint: weights and moments of all ranks."""
    step, folder = committed(run / "checkpoints")[-1]
    assert step == STEPS, f"the newest checkpoint is of step {step}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("rank-*.bin"))}


def table(rows: Sequence[FaultRow]) -> list[str]:
    """Lines of the result as a Markdown table."""
    lines = [
        "| fault | recorded cause | s to a new step | limit | steps lost | bit-identical |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = row.problem.splitlines()[0][:100] if row.problem else row.cause or "continues"
        seconds = f"{row.to_step_s:.1f} | {row.limit_s:.1f}" if row.to_step_s else "- | -"
        seconds += " LATE" if row.is_late else ""
        same = "yes" if row.is_identical else "NO"
        lines.append(f"| {row.fault.name} | {shown} | {seconds} | {row.lost_steps} | {same} |")
    return lines


@contextlib.contextmanager
def bed():
    """Make hosts and a clone of the project for the time of a test."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        clone = make_clone(folder / "clone")
        corpus = ROOT / "corpora" / "synthetic"
        if corpus.is_dir():
            shutil.copytree(corpus, clone / "corpora" / "synthetic")
        with namespaces.hosts(folder, len(EVERYBODY), net=(os.getpid() + 50) % 200) as hosts:
            made = FaultyHosts(clone, hosts, f"ssh -F {hosts.serve_ssh()}", RUN)
            try:
                yield made
            finally:
                made.stop()


def undisturbed(made: FaultyHosts) -> dict[str, bytes]:
    """Final weights of the run without a fault."""
    made.start("straight")
    status = made.end()
    assert status == 0, made.output()
    return final_weights(made.run)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--find", default="", help="only faults whose names have all these words")
    options = parser.parse_args(arguments)
    lack = namespaces.why_not() or namespaces.why_no_ssh()
    if lack:
        print(f"refused: {lack}", file=sys.stderr)
        return DO_NOT_RETRY
    faults = [f for f in FAULTS if all(word in f.name for word in options.find.split())]
    rows = []
    with bed() as made:
        straight = undisturbed(made)
        for fault in faults:
            rows.append(inject(made, fault, straight))
            print(table(rows[-1:])[-1], flush=True)
            if rows[-1].problem:
                print(rows[-1].problem, file=sys.stderr, flush=True)
    print("\n".join(["", *table(rows)]))
    return int(any(row.problem or row.is_late for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
