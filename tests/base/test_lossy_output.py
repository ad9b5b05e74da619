"""base.lossy_output: whoever reads, or does not, a process ends as it would."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from ranks import ROOT

CODE = """
import sys
from base.lossy_output import make_lossy
make_lossy()
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream)
    print("last", file=stream, flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("where", [">/dev/full 2>&1", ">&- 2>&-", "2>&1 | true"])
def test_what_cannot_be_printed_costs_nothing(where):
    command = f'"$0" -c "$1" {where}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, CODE], cwd=ROOT, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7


def test_a_pipe_that_never_waits_and_is_full_costs_nothing():
    read, write = os.pipe()
    os.set_blocking(write, False)
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=write, stderr=write, check=False,
    )  # fmt: skip
    os.close(write)
    os.close(read)
    assert done.returncode == 7


def test_what_can_be_printed_is_printed():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert done.stdout == done.stderr == "x" * 100_000 + "\nlast\n"


def test_a_terminal_that_was_closed_costs_nothing():
    pid, terminal = pty.fork()
    if pid == 0:
        wait = "import os, signal; hangup = {signal.SIGHUP}\n"
        wait += "signal.pthread_sigmask(signal.SIG_BLOCK, hangup); os.write(1, b'go')\n"
        wait += "signal.sigwait(hangup)\n"
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", wait + CODE])
    while b"go" not in os.read(terminal, 100):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
