"""The place where a run starts: this machine, the hosts of a hostfile, or a SLURM job.

Rule: a hostfile that is named has precedence. With `--slurm` the hosts are those of the job around
this process; else the run starts on this machine. Nothing is guessed from variables that happen to
be set.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.paths import ROOT
from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import MOST_SLOTS, Host, choose, expand, part, read_hosts


@dataclass(frozen=True)
class Place:
    """Hosts that train and hosts that wait.

    `included` are hosts that are used although they failed (INCLUDE); `named` are variables that
    the user wants to reach all ranks (PASS).
    """

    cluster: AgentCluster
    named: tuple[str, ...]
    spares: tuple[Host, ...] = ()
    included: tuple[str, ...] = ()


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the place; an empty text means not given."""
    parser.add_argument("--hostfile", default="", help="hosts, as in DeepSpeed: NAME slots=N")
    parser.add_argument("--include", default="", help="only these: NAME[:SLOT,SLOT]@NAME...")
    parser.add_argument("--exclude", default="", help="all but these")
    parser.add_argument("--via", default="", help="ssh (default) or pdsh")
    parser.add_argument("--ssh", default="", help="the ssh command with your options")
    parser.add_argument("--pass", dest="named", default="", help="variables that go along besides")
    parser.add_argument("--spares", default="", help="the last so many hosts wait for a failure")
    parser.add_argument("--slurm", action="store_true", help="the hosts of this SLURM job, by srun")


def read_place(options: argparse.Namespace) -> Place | None:
    """The place that the options choose; None = this machine. Raises UserError."""
    named = tuple(options.named.replace(",", " ").split())
    if options.slurm or options.hostfile:
        if options.slurm:
            hosts = choose(slurm_hosts(os.environ), options.include, options.exclude)
            via = "srun"
        else:
            hosts = read_hosts(Path(options.hostfile), options.include, options.exclude)
            via = options.via or "ssh"
        train, wait = part(hosts, read_spares(options.spares))
        included = tuple(host.name for host in hosts) if options.include else ()
        cluster = AgentCluster(train, ROOT, via, options.ssh or "ssh")
        return Place(cluster, named, tuple(wait), included)
    for variable, value in (
        ("INCLUDE", options.include),
        ("EXCLUDE", options.exclude),
        ("VIA", options.via),
        ("SSH", options.ssh),
        ("PASS", options.named),
        ("SPARES", options.spares),
    ):
        if value:
            raise UserError(f"{variable}={value} has no effect without HOSTFILE=")
    return None


def read_spares(text: str) -> int:
    """The number of spare hosts in a text. Raises UserError."""
    if text and not (text.isascii() and text.isdigit() and len(text) < 7):
        raise UserError(f"SPARES={text[:80]!r} is not a number of hosts")
    return int(text or 0)


def slurm_hosts(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the SLURM job around this process. Raises UserError outside of one."""
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise UserError(
            "--slurm: there is no SLURM job here (SLURM_JOB_NODELIST is not set); submit"
            " launch/slurm.sbatch, or start inside salloc"
        )
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    slots = int(gpus) if gpus.isdigit() and int(gpus) else MOST_SLOTS
    return [Host(name, slots) for name in expand(nodes)]
