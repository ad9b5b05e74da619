"""Starts agents on hosts: by ssh, pdsh or SLURM's srun, or as a child process on this host.

    ssh     one connection per host; the order goes through its standard input
    pdsh    one process for all hosts, without an input: the order is an argument, in base64
    srun    one job step, one task per host; srun copies its standard input to every task

Rule: the only text that a remote shell ever sees is `cd FOLDER && exec PYTHON -m
launch.hosts.agent ...`, every argument quoted. Names, paths, values and overrides travel as JSON.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.redaction import redact, redacted, secret_values
from launch.hosts import network
from launch.hosts.hostfile import Host, is_host_name, plain

WAYS = ("ssh", "pdsh", "srun")
SSH_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",  # a question for a password would wait for ever behind the output
    "-o", "ConnectTimeout=20",
    "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip


@dataclass(frozen=True)
class Carrier:
    """A process that takes an order to `nodes` (numbers of hosts) and brings their messages."""

    nodes: tuple[int, ...]
    command: tuple[str, ...]
    takes_input: bool = True


def carriers(
    via: str, hosts: Sequence[Host], root: Path, order: dict[str, Any], ssh: str = "ssh"
) -> list[Carrier]:
    """The processes to start for `order`. `ssh` is the ssh command with the user's options.

    Raises UserError where a program is missing, or where a secret would be visible.
    """
    for host in hosts:
        assert is_host_name(host.name), host.name  # launch.hosts.hostfile has refused others
    if via == "ssh":
        return [
            _here(node) if is_here(host.name) else _ssh(node, host.name, root, ssh)
            for node, host in enumerate(hosts)
        ]
    if via == "pdsh":
        return [_pdsh(hosts, root, order, ssh)]
    if via == "srun":
        return [_srun(hosts, root)]
    raise UserError(f"VIA={via} is not one of {', '.join(WAYS)}")


def is_here(name: str) -> bool:
    """Whether a host name or address means this very machine."""
    name, own = plain(name), plain(socket.gethostname())
    short, domain = own.partition(".")[::2]
    if name in ("localhost", own, short):
        return True
    # With a domain the same first label may be another machine's: its address decides.
    is_kin = name.partition(".")[0] == short and not domain
    addresses = network.addresses_of(name) if is_kin else [name]
    return any(network.is_own(address) for address in addresses)


def _here(node: int) -> Carrier:
    return Carrier((node,), (sys.executable, "-m", "launch.hosts.agent", "--node", str(node)))


def _ssh(node: int, name: str, root: Path, ssh: str) -> Carrier:
    arguments = ssh_arguments(ssh)
    remote = agent_line(root, "--node", str(node))
    return Carrier((node,), (*arguments, *SSH_OPTIONS, "--", name, remote))


def _pdsh(hosts: Sequence[Host], root: Path, order: dict[str, Any], ssh: str) -> Carrier:
    environment = order.get("environment", {})
    secrets = [name for name, value in redacted(environment).items() if value != environment[name]]
    if secrets:
        raise UserError(
            f"PASS: {', '.join(secrets)} would be visible in the process lists of all hosts,"
            " because pdsh has no standard input; use VIA=ssh"
        )
    recipe = order.get("composed") or ""
    if redact(recipe, secret_values(os.environ)) != recipe:
        raise UserError(
            "the recipe has the value of a secret variable, which would be visible in the process"
            " lists of all hosts, because pdsh has no standard input; use VIA=ssh"
        )
    if not shutil.which("pdsh"):
        raise UserError("VIA=pdsh but there is no pdsh on this machine; use VIA=ssh")
    if any(":" in host.name for host in hosts):
        raise UserError("VIA=pdsh takes no IPv6 addresses; give names, or use VIA=ssh")
    encoded = base64.b64encode(json.dumps(order).encode()).decode()
    # With its module `exec` pdsh runs ssh as it is told, and fills in %h (host) and %n (number).
    ssh_command = [*ssh_arguments(ssh), *SSH_OPTIONS, "--"]
    remote = agent_line(root, "--order", encoded).replace("%", "%%") + " --node %n"
    command = (
        "pdsh", "-R", "exec", "-S", "-N", "-f", str(len(hosts)),
        "-w", ",".join(host.name for host in hosts),
        *(argument.replace("%", "%%") for argument in ssh_command), "%h", remote,
    )  # fmt: skip
    return Carrier(tuple(range(len(hosts))), command, takes_input=False)


def _srun(hosts: Sequence[Host], root: Path) -> Carrier:
    # srun has not passed sbatch's --cpus-per-task on since SLURM 22.05.
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    command = (
        "srun",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(host.name for host in hosts)}",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--input=all",
        "--export=ALL",
        "--mpi=none",
        "--cpu-bind=none",  # the one task of a host starts ranks that need all of its cores
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        f"--chdir={root}",
        sys.executable, "-m", "launch.hosts.agent", "--node", "slurm",
    )  # fmt: skip
    return Carrier(tuple(range(len(hosts))), command)


def ssh_arguments(ssh: str) -> list[str]:
    """The user's ssh command as arguments. Raises UserError."""
    try:
        arguments = shlex.split(ssh)
    except ValueError as error:
        raise UserError(f"SSH={ssh!r}: {error}") from None
    if not arguments or not shutil.which(arguments[0]):
        raise UserError(f"SSH={ssh!r}: no such program here; give one: SSH='ssh -p 2222'")
    return arguments


def agent_line(root: Path, *arguments: str) -> str:
    """The line for the remote shell: arguments quoted for any shell of the sh or csh kind."""
    agent = shlex.join([sys.executable, "-m", "launch.hosts.agent", *arguments])
    return f"cd {shlex.quote(str(root))} && exec {agent}"
