"""`make chaos`: things go wrong with a run on several hosts, and it goes on; a table at the end.

    python -m benchmarks.chaos [--find "partition"]

    node1                   the launcher: make pretrain HOSTFILE= SPARES=1
    node2 node3 | node4     the hosts: network namespaces with ssh servers; the last is the spare

A fault strikes once the run has done some steps past a checkpoint. The one rule: after every fault
the weights of the last step are those of the run that nothing disturbed, bit for bit. The limit of
a row is torchrun's own time for that fault, measured apart on such a bed, plus what this very start
took (imports, joining, the first step) and 5 s; on a busy machine all but torchrun's time stretch.
Needs root. Units: seconds, steps.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "workers"))

import namespaces  # noqa: E402
from clones import SMALL, make_clone  # noqa: E402
from ranks import PATIENCE, environment  # noqa: E402

from base.exits import DO_NOT_RETRY  # noqa: E402
from checkpoint.format.manifest import committed  # noqa: E402
from record.attempts import unix_s  # noqa: E402
from record.records import read_events  # noqa: E402

STEPS, INTERVAL, STRIKES_AT = 60, 10, 14
LOST_S = 12
RUN = [
    *SMALL, f"steps={STEPS}", f"checkpoint.interval={INTERVAL}", "checkpoint.keep=100",
    "eval_tokens=0", "zero=2", "log.tensorboard=false", f"cluster.lost_s={LOST_S}",
    "cluster.timeout_s=120",
]  # fmt: skip
LIMIT_S = 240.0
# torchrun's own times on such a bed: from the fault to the restarted workers.
KILLED_S, LOST_HOST_S, PARTITION_S, HANG_S = 10.5, 17.0, 26.6, 55.0
LAUNCHER, FIRST, LAST, SPARE = 1, 2, 3, 4
HOSTS = {2, 3, 4}
EVERYBODY = {1, 2, 3, 4}


class Bed:
    """The hosts, a clone of the project, and one run on them."""

    def __init__(self, clone: Path, hosts: namespaces.Hosts, ssh: str, run: Sequence[str]):
        self.clone, self.hosts, self.ssh, self.common = clone, hosts, ssh, run
        (self.clone / "hosts").write_text("".join(f"node{n} slots=1\n" for n in sorted(HOSTS)))
        self.run, self.arguments = Path(), []
        self.launcher: subprocess.Popen | None = None

    def command(self, *arguments: str) -> list[str]:
        """The launcher's, on node1."""
        place = ["--hostfile", "hosts", "--ssh", self.ssh, "--spares", "1"]
        python = [sys.executable, "-m", "commands.pretrain", *place, "--", *self.common, *arguments]
        return self.hosts.command(LAUNCHER, *python)

    def start(self, name: str, *arguments: str) -> None:
        """Start a run and let it go."""
        self.run, self.arguments = self.clone / "runs" / name, [f"run={name}", *arguments]
        self.again()

    def again(self) -> None:
        """Give the same command, as a person would."""
        with open(self.clone / f"{self.run.name}.log", "ab") as log:
            self.launcher = subprocess.Popen(
                self.command(*self.arguments), cwd=self.clone, stdout=log, stderr=log,
                env=environment(PYTHONPATH=str(self.clone)), start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        """What the launcher has printed."""
        return (self.clone / f"{self.run.name}.log").read_text(errors="replace")

    def await_steps(self, steps: int) -> None:
        """Until so many steps are on record."""
        metrics = self.run / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps)

    def wait(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for something. AssertionError: it does not come, or the run has ended."""
        deadline = time.monotonic() + limit_s * PATIENCE
        while not is_so():
            ended = self.launcher.poll()
            assert ended is None or is_so(), f"ended with {ended}:\n{self.said()[-3000:]}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.said()[-3000:]}"
            time.sleep(0.05)

    def rank_process(self, rank: int) -> int:
        """Process of a rank. (A rank that says nothing has no log yet to look it up in.)"""
        for number in range(1, len(EVERYBODY) + 1):
            for pid in self.hosts.processes(number):
                with contextlib.suppress(OSError):
                    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if arguments[1:2] == [b"pretrain.py"] and f"RANK={rank}".encode() in variables:
                        return pid
        raise AssertionError(f"no process of rank {rank}")

    def agent_process(self, number: int) -> int:
        """The agent with ranks on a host."""
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
        """Leave nothing behind."""
        if self.launcher and self.launcher.poll() is None:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()
        self.hosts.heal()


def killed_rank(rank: int) -> Callable[[Bed], None]:
    return lambda bed: os.kill(bed.rank_process(rank), signal.SIGKILL)


def frozen_host(bed: Bed) -> None:
    """A host stands still: agent and ranks."""
    for pid in bed.hosts.processes(LAST):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def unheard_host(bed: Bed) -> None:
    """A host can speak and hears nobody."""
    for number in EVERYBODY:
        bed.hosts.lose_way(number, to={LAST})


def late_spare(bed: Bed) -> float:
    """The spare was away at the start; it comes, and later another host goes: when."""
    bed.hosts.cable(SPARE, is_in=True)
    bed.hosts.start_server(SPARE)
    bed.await_steps(STRIKES_AT + 4)
    assert len(read_events(bed.run, "began")) == 1, "a late spare started the run again"
    struck = time.time()
    bed.hosts.power_off(LAST)
    return struck


def double_launch(bed: Bed) -> None:
    """The same command a second time, while the run goes on: it stands still meanwhile, because a
    busy machine needs longer to refuse than the run has steps."""
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


def killed_launcher(bed: Bed) -> None:
    """Nobody is left to start anything; the same command goes on, and finds nobody in its way."""
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
    """What strikes, what must be on record of it, and how soon there must be a new step."""

    name: str
    strike: Callable[[Bed], float | None]
    cause: str | None  # None = the attempt goes on
    torchrun_s: float
    host: str | None = None
    before: Callable[[Bed], None] = lambda bed: None
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
    # The ranks hear that nobody is left, save and end: no step is lost.
    Fault("launcher killed, same command", killed_launcher, "preempted", LOST_HOST_S),
)


@dataclass
class Row:
    """What was seen of one fault."""

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


def suffer(bed: Bed, fault: Fault, straight: dict[str, bytes]) -> Row:
    """One run, one fault."""
    row = Row(fault)
    try:
        fault.before(bed)
        bed.start(re.sub(r"\W+", "-", fault.name), *fault.arguments)
        bed.await_steps(STRIKES_AT)
        struck = time.time()
        struck = fault.strike(bed) or struck
        status = bed.end()
        assert status == 0, f"exit status {status}:\n{bed.said()[-3000:]}"
        judge(row, bed.run, struck, straight)
    except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
        row.problem = row.problem or str(error)
    finally:
        bed.stop()
    return row


def judge(row: Row, run: Path, struck: float, straight: dict[str, bytes]) -> None:
    """What the run's own record says. Raises AssertionError."""
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
    """The data files of the newest checkpoint: weights and moments of all ranks."""
    step, folder = committed(run / "checkpoints")[-1]
    assert step == STEPS, f"the newest checkpoint is of step {step}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("rank-*.bin"))}


def table(rows: Sequence[Row]) -> list[str]:
    """The result for a person, in Markdown."""
    lines = [
        "| fault | on record | s to a new step | limit | steps lost | bit-identical |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = row.problem.splitlines()[0][:100] if row.problem else row.cause or "goes on"
        seconds = f"{row.to_step_s:.1f} | {row.limit_s:.1f}" if row.to_step_s else "- | -"
        seconds += " LATE" if row.is_late else ""
        same = "yes" if row.is_identical else "NO"
        lines.append(f"| {row.fault.name} | {shown} | {seconds} | {row.lost_steps} | {same} |")
    return lines


@contextlib.contextmanager
def bed():
    """Hosts and a clone for the time of a test."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        clone = make_clone(folder / "clone")
        corpus = ROOT / "corpora" / "synthetic"
        if corpus.is_dir():
            shutil.copytree(corpus, clone / "corpora" / "synthetic")
        with namespaces.hosts(folder, len(EVERYBODY), net=(os.getpid() + 50) % 200) as hosts:
            made = Bed(clone, hosts, f"ssh -F {hosts.serve_ssh()}", RUN)
            try:
                yield made
            finally:
                made.stop()


def undisturbed(made: Bed) -> dict[str, bytes]:
    """The final weights of the run without a fault."""
    made.start("straight")
    status = made.end()
    assert status == 0, made.said()
    return final_weights(made.run)


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m benchmarks.chaos`; returns the exit status."""
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
            rows.append(suffer(made, fault, straight))
            print(table(rows[-1:])[-1], flush=True)
            if rows[-1].problem:
                print(rows[-1].problem, file=sys.stderr, flush=True)
    print("\n".join(["", *table(rows)]))
    return int(any(row.problem or row.is_late for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
