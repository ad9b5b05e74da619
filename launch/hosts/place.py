"""The place where a run starts, and the number of its ranks: NPROC, WORLD and HOSTFILE.

    NPROC      ranks on each host             WORLD = NPROC x hosts
    WORLD      ranks of the whole run         NPROC = WORLD / hosts
    HOSTFILE   the hosts; without it the run starts on this machine, with `--slurm` on the hosts of
               the job around this process

Every command that needs a number of ranks takes all three. Rule: nothing is guessed from variables
that happen to be set; two of the three that contradict each other are refused.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.paths import ROOT
from base.values import counted, read_ranks
from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import MOST_SLOTS, Host, choose, expand, part, ranks_per_host, read_hosts


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
    """Add the options that choose place and ranks; an empty text means not given."""
    parser.add_argument("--nproc", default="", help="ranks on this machine, or on each host")
    parser.add_argument("--world", default="", help="ranks of the whole run")
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


def ranks_on_each(options: argparse.Namespace, place: Place | None) -> int | None:
    """Ranks on each host of a run that starts in `place`; None = none of the options says.

    Raises UserError where NPROC, WORLD and the hosts contradict each other.
    """
    nproc, world = read_counts(options)
    if place is None:
        if nproc and world and nproc != world:
            hosts = counted(-(-world // nproc), "host")
            raise UserError(
                f"WORLD={world} ranks with NPROC={nproc} on each host are {hosts}; name them"
                f" (HOSTFILE=), or give NPROC={world} or WORLD={nproc} for this machine alone"
            )
        return nproc or world
    hosts = place.cluster.hosts
    if world is not None:
        total = f"WORLD={world} ranks on {counted(len(hosts), 'host')}"
        if world % len(hosts):
            raise UserError(f"{total} are not the same number on each; give a multiple or NPROC=")
        if nproc not in (None, world // len(hosts)):
            raise UserError(
                f"{total} are {world // len(hosts)} on each, and NPROC={nproc}; give one of the two"
            )
        nproc = world // len(hosts)
    if nproc is None and hosts[0].slots == MOST_SLOTS:
        raise UserError("this SLURM job has no GPUs to count; give the ranks per host: NPROC=")
    return ranks_per_host([*hosts, *place.spares], nproc)


def planned_world(options: argparse.Namespace) -> int | None:
    """Ranks of the whole run that the options ask for; None = they do not say. Raises UserError.

    Hosts need not exist: WORLD and NPROC without HOSTFILE may mean several hosts of NPROC ranks.
    """
    place = read_place(options)
    nproc, world = read_counts(options)
    if place is None and nproc and world:
        if world % nproc:
            raise UserError(f"WORLD={world} is not a multiple of NPROC={nproc} ranks on each host")
        return world
    per_host = ranks_on_each(options, place)
    return per_host * len(place.cluster.hosts) if place and per_host else per_host


def read_counts(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """NPROC and WORLD; None = not given. Raises UserError."""
    given = (("NPROC", options.nproc), ("WORLD", options.world))
    nproc, world = (read_ranks(name, text) if text else None for name, text in given)
    return nproc, world


def place_variables(options: argparse.Namespace) -> tuple[str, ...]:
    """The variables of make that name the hosts in `options`, such as HOSTFILE=hosts."""
    given = {
        "HOSTFILE": options.hostfile, "INCLUDE": options.include, "EXCLUDE": options.exclude,
        "VIA": options.via, "SSH": options.ssh, "PASS": options.named, "SPARES": options.spares,
    }  # fmt: skip
    return tuple(f"{name}={value}" for name, value in given.items() if value)


def start_options(variables: Iterable[str], world: int) -> list[str]:
    """Options of commands.pretrain for `world` ranks on the hosts of `place_variables`."""
    named = (variable.partition("=") for variable in variables)
    return [*(f"--{name.lower()}={value}" for name, _, value in named), f"--world={world}"]


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
