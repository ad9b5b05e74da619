"""Starts programs of a clone in a process that has imported them before: a fork for each rank.

    Warm(clone).start("run=x", nproc=2)     pretrain.py on two ranks, without a launcher
    Warm(clone).check("run=x", "zero=9")    commands.pretrain

The imports of two ranks take a dozen seconds, which tests of a run's behaviour need not pay. The
file itself runs as `__main__`, in the environment that a launcher gives. One difference: counts of
log.communication begin after the import of DeepSpeed, not before it. Use it only where neither
launcher nor supervisor is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from clones import SMALL
from ranks import PATIENCE, environment

from launch.hosts.network import free_port
from launch.ranks.rank_process import rank_variables

# Reads a line {"what", "words", "ranks": [variables of each], "out": file}; answers with the number
# of the process that leads them, and with its status when all have ended.
SERVER = """
import ctypes, json, os, runpy, signal, sys, time, traceback
import deepspeed, pretrain, commands.pretrain

def run(what, words, variables):
    os.environ.update(variables)
    sys.argv = [what, *words]
    status = 0
    try:
        if what.endswith(".py"):
            runpy.run_path(what, run_name="__main__")
        else:
            del sys.modules[what]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        status = ending.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)

def lead(order):
    os.setsid()
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1), os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if len(order["ranks"]) == 1:
        run(order["what"], order["words"], order["ranks"][0])
    pids = []
    for variables in order["ranks"]:
        pids.append(os.fork())
        if not pids[-1]:
            run(order["what"], order["words"], variables)
    first = 0
    for _ in pids:
        status = os.waitstatus_to_exitcode(os.wait()[1])
        if status and not first:
            first = status
            time.sleep(1)  # the other ranks print their messages
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    os._exit(first if first >= 0 else 128 - first)

PR_SET_CHILD_SUBREAPER = 36  # ranks whose leader was killed are waited for, too
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
for line in sys.stdin:
    order = json.loads(line)
    sys.stdout.flush()
    leader = os.fork()
    if not leader:
        lead(order)
    print(leader, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    try:
        while True:
            os.wait()
    except ChildProcessError:
        print(status, flush=True)
"""


class Warm:
    """Server process of one clone; it runs one start at a time."""

    def __init__(self, clone: Path):
        self.clone, self.leader, self._out = clone, 0, ""
        variables = environment(PYTHONPATH=str(clone), OMP_WAIT_POLICY="PASSIVE")
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=clone,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that no answer waits in a buffer where select does not see it
        )

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._server.kill()  # at once: the interpreter's own end takes a second
        self._server.wait()

    def begin(self, *words: str, nproc: int = 1, what: str = "pretrain.py", **extra: str) -> None:
        """Start ranks; `end` waits for them."""
        port = free_port()
        ranks = [rank_variables(0, 1, nproc, local, "127.0.0.1", port) for local in range(nproc)]
        if what != "pretrain.py":
            ranks = [{}]
        handle, self._out = tempfile.mkstemp(prefix="warm-")
        os.close(handle)
        order = {"what": what, "words": words, "ranks": [one | extra for one in ranks]}
        self._server.stdin.write((json.dumps(order | {"out": self._out}) + "\n").encode())
        self.leader = int(self._server.stdout.readline())

    def is_over(self, timeout_s: float = 0) -> bool:
        """True where all ranks have ended, or end within the given time."""
        return bool(select.select([self._server.stdout], [], [], timeout_s)[0])

    def kill(self) -> None:
        """SIGKILL for all ranks."""
        with contextlib.suppress(ProcessLookupError):
            if self.leader:
                os.killpg(self.leader, signal.SIGKILL)

    def end(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for the ranks; returns the status of the first rank that failed, and all output."""
        is_in_time = self.is_over(timeout_s * PATIENCE)
        if not is_in_time:
            self.kill()
        status, self.leader = int(self._server.stdout.readline()), 0
        said = Path(self._out).read_text()
        os.unlink(self._out)
        assert is_in_time, f"no end in time: one rank waits for another, or load\n{said[-4000:]}"
        return subprocess.CompletedProcess("warm", status, said)

    def start(
        self, *words: str, nproc: int = 1, timeout_s: float = 120, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run pretrain.py; the overrides of a small run come first."""
        self.begin(*SMALL, *words, nproc=nproc, **extra)
        return self.end(timeout_s)

    def check(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the program of `make pretrain` on one rank."""
        self.begin("--nproc", "1", "--", *SMALL, *words, what="commands.pretrain")
        return self.end(timeout_s)
