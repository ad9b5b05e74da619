"""`make doctor`: checks whether this machine, or every host of HOSTFILE, is fit for a run.

    facts -> judge -> routes to the first host -> operators built once -> collective test -> links

Rule: every problem names its host and its key. Each start on several hosts runs the quick part of
this by itself. Here disks are timed, stale locks of builds are removed, and the links are measured
by a process that runs as a rank does (runtime.process.link_test). The last line is
the verdict. Exit status: 0 = fit, 93 = not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from base.command_line import Parser
from base.errors import UserError
from base.exits import DO_NOT_RETRY
from base.lossy_output import make_lossy
from base.values import counted
from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import MOST_SLOTS, Host
from launch.hosts.judge import Need, cards_of
from launch.hosts.link_speeds import slow_links
from launch.hosts.own_gpus import count_gpus, idle_gpus
from launch.hosts.place import ROOT, Place, add_place, ranks_on_each, read_place
from launch.hosts.preflight import Inspection, StartPlan, preflight, wanted_port
from launch.hosts.variables import passed
from launch.ranks import start

RESULT = ".cache/links.json"
# Builds the operators that DeepSpeed would build while ranks wait; only offload needs them.
OPERATORS = ("-m", "runtime.engine.ops")
LEAST_FREE_GIB = 1.0  # of the run folder, where no recipe says more


def main(arguments: list[str]) -> int:
    """Run `python -m commands.doctor`; returns the exit status."""
    parser = Parser(prog="python -m commands.doctor", description=__doc__)
    add_place(parser)
    options = parser.parse_args(arguments)
    report = DoctorReport()
    try:
        place = read_place(options)
        cluster = AgentCluster([Host("localhost", MOST_SLOTS)], ROOT)
        if place:  # spares are examined with the rest
            cluster = replace(place.cluster, hosts=[*place.cluster.hosts, *place.spares])
        named = place.named if place else ()
        per_host = ranks_to_test(options, place)
        problems = examine(cluster, per_host, passed(os.environ, named), report.log)
    except UserError as error:
        problems = error.problems
    except OSError as error:  # .cache/ is another user's
        problems = [f"{error.filename}: {error.strerror}"]
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    report.log(verdict(len(problems), report.warnings))
    return DO_NOT_RETRY if problems else 0


class DoctorReport:
    """Prints the lines of the report, and counts the warnings among them."""

    def __init__(self):
        self.warnings = 0

    def log(self, line: str) -> None:
        """Print a line of the report."""
        self.warnings += line.startswith("warning: ")
        print(line, flush=True)


def verdict(problems: int, warnings: int) -> str:
    """The last line: whether a run can start, and how many lines above need a look."""
    if problems:
        lines = "line" if problems == 1 else "lines"
        return f"verdict: not fit, {counted(problems, 'problem')}; see the {lines} `refused:`"
    if warnings:
        return f"verdict: fit, with {counted(warnings, 'warning')}; see above"
    return "verdict: fit"


def ranks_to_test(options: argparse.Namespace, place: Place | None) -> int:
    """Ranks on each host in the collective test: what is given, the slots, all GPUs, or 1."""
    if place and not options.nproc and not options.world:
        if place.cluster.hosts[0].slots == MOST_SLOTS:  # a SLURM job without GPUs
            return 1
    elif not place and not options.nproc and not options.world:
        with contextlib.suppress(UserError):  # the facts report it
            return max(1, count_gpus())
        return 1
    return ranks_on_each(options, place)


def examine(
    cluster: AgentCluster,
    per_host: int,
    environment: dict[str, str],
    log: Callable[[str], None],
) -> list[str]:
    """All problems of the hosts; prints the findings on the way."""
    inspection = Inspection(
        need=Need(per_host, "auto", LEAST_FREE_GIB),
        environment=environment,
        port=wanted_port(os.environ),
        is_full=True,
    )
    plan, facts = preflight(cluster, inspection, log)
    for host, f in facts.items():
        log(describe(host, f))
        for line in idle_gpus(len(cards_of(f)), per_host, f"{host}: "):
            log(line)
    has_gpus = all(cards_of(f) for f in facts.values())
    if has_gpus and start.across(cluster, plan, OPERATORS, 1, environment, None):
        log("warning: zero=zero3_offload will not start; all else does not need the operators")
    return collective(cluster, plan, per_host, environment, "cuda" if has_gpus else "cpu", log)


def collective(
    cluster: AgentCluster,
    plan: StartPlan,
    per_host: int,
    environment: dict[str, str],
    device: str,
    log: Callable[[str], None],
) -> list[str]:
    """Run the collective test; the problems of sums and links."""
    names = [host.name for host in cluster.hosts]
    out = ROOT / RESULT
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    arguments = ["-m", "runtime.process.link_test", str(out), device]
    status = start.across(cluster, plan, arguments, per_host, environment, None)
    if status:
        return [f"the collective test on {len(names)} hosts ended with status {status}; see above"]
    if not out.exists():
        return [f"{out} was written on {names[0]} and is not here; the folder is not shared"]
    result = json.loads(out.read_text())
    speeds = {(a, b): speed for a, b, speed in result["mib_per_s"]}
    wrong = [
        f"{names[rank // per_host]}: rank {rank} got a wrong sum from an all-reduce"
        for rank in result["wrong"]
    ]
    num_ranks = per_host * len(names)
    log(f"all-reduce over {counted(num_ranks, 'rank')} ({device}): {'wrong' if wrong else 'right'}")
    if speeds:
        slowest, fastest = min(speeds.values()), max(speeds.values())
        log(f"links between hosts: {len(speeds)}, {slowest:.0f} to {fastest:.0f} MiB/s")
    return wrong + slow_links(speeds, names)


def describe(host: str, f: dict) -> str:
    """One line about a host."""
    cards = cards_of(f)
    packages = f["packages"]
    speed = f["disk_mib_per_s"]["runs/"]
    return (
        f"{host}: Python {f['python']}, torch {packages.get('torch')}, deepspeed"
        f" {packages.get('deepspeed')}, {counted(f['cores'], 'core')}, {f['memory_gib']:.0f} GiB,"
        f" {counted(len(cards), 'GPU')}{' (' + cards[0]['name'] + ')' if cards else ''},"
        f" runs/ {f['disk']['runs/']:.0f} GiB free, {speed or 0:.0f} MiB/s"
    )


if __name__ == "__main__":
    make_lossy()
    sys.exit(main(sys.argv[1:]))
