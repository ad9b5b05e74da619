"""Runs contenders as processes that take turns; each command trains a few steps.

Rule: all contenders get the same environment, and only one of them works at a time. With
OMP_WAIT_POLICY=passive the threads of an idle contender sleep, and so do threads between two
operators. Units: seconds.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import tempfile
from typing import Any

from base.paths import ROOT
from benchmarks.workload import Workload

START_LIMIT_S = 300
TURN_LIMIT_S = 900


def next_line(process: subprocess.Popen, limit_s: float) -> str | None:
    """Next line that `process` prints; empty at its end, None where it stays silent too long."""
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else None


class ContenderError(RuntimeError):
    """A contender ended, failed or stayed silent; the message has the last lines of its output."""


class Missing(ContenderError):
    """A contender needs a package that is not installed."""


class Contender:
    """One program on `work.world` ranks. A context manager whose exit ends the processes."""

    def __init__(self, name: str, work: Workload):
        self.name, self.work = name, work
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the processes)
        port = free_port()
        self.ranks = [self.launch(rank, port) for rank in range(work.world)]

    def launch(self, rank: int, port: int) -> subprocess.Popen:
        """Start one rank; `env` adds to the inherited environment."""
        settings = {
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": self.work.threads,
            "OMP_WAIT_POLICY": "passive",
            "KMP_BLOCKTIME": 0,
            "TOKENIZERS_PARALLELISM": "false",
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.work.world,
            "LOCAL_WORLD_SIZE": self.work.world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        variables = [f"{name}={value}" for name, value in settings.items()]
        module = ["-m", "benchmarks.worker", self.name, self.work.to_json()]
        return subprocess.Popen(
            ["env", *variables, sys.executable, *module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def wait_ready(self) -> None:
        """Wait until every rank has built its model. Raises Missing or ContenderError."""
        for rank in self.ranks:
            self.read(rank, START_LIMIT_S)

    def turn(self, steps: int, profile: bool = False) -> dict[str, Any]:
        """Train `steps` steps; returns the reply of rank 0.

        A loss that is the rank's own share is summed over ranks. Raises ContenderError.
        """
        command = json.dumps({"steps": steps, "profile": profile}) + "\n"
        for rank in self.ranks:
            rank.stdin.write(command)
            rank.stdin.flush()
        replies = [self.read(rank, TURN_LIMIT_S) for rank in self.ranks]
        reply = replies[0]
        if self.name in SHARES:
            reply["losses"] = [sum(x) for x in zip(*(r["losses"] for r in replies), strict=True)]
        reply["cpu_s"] = [sum(x) for x in zip(*(r["cpu_s"] for r in replies), strict=True)]
        return reply

    def read(self, rank: subprocess.Popen, limit_s: float) -> dict[str, Any]:
        """Read the next reply of one rank."""
        line = next_line(rank, limit_s)
        reply = (
            json.loads(line) if line else {"error": "timed out" if line is None else "no answer"}
        )
        if "missing" in reply:
            raise Missing(reply["missing"])
        if "error" in reply:
            self.log.seek(0)
            raise ContenderError(f"{self.name}: {reply['error']}\n{self.log.read()[-3000:]}")
        return reply

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.stdin.close()  # the worker reads the end of file and ends
        for rank in self.ranks:
            try:
                rank.wait(timeout=30)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            rank.stdout.close()
        self.log.close()


# Contenders whose loss is the rank's own share of the global mean.
SHARES = ("torch", "deepspeed", "trainer")


def free_port() -> int:
    """TCP port of this host that no process listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
