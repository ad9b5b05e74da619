"""Starts a script on several gloo ranks under a time limit, for tests.

A launch needs about ten seconds of imports on two cores, so each script checks several things and
writes its results as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import patience

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = patience()  # factor of all time limits


def environment(**extra: str) -> dict[str, str]:
    """Environment of this process with one thread per rank, CPU, and the project on the path.

    Variables of an outer launcher or an outer make (`make test`) are left out.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "MAKE", "MFLAGS"))
    }
    return kept | {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def run_command(
    command: list[str], timeout_s: float, cwd: Path = ROOT, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `command` in a new session; past `timeout_s` kill all its processes and fail."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s * PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(
            f"no end after {timeout_s * PATIENCE:.0f} s: likely one rank waits in a collective that"
            " another never reached, or the machine is overloaded.\n"
            f"{' '.join(command)}\n{output[-4000:]}"
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def run_ranks(script: Path, world: int, timeout_s: float, *arguments: str) -> Any:
    """Run `script out.json *arguments` on `world` ranks and return the JSON that rank 0 wrote."""
    out = Path(arguments[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(script), *arguments]
    done = run_command(command, timeout_s)
    assert done.returncode == 0, f"{script.name} failed on {world} ranks:\n{done.stdout[-6000:]}"
    return json.loads(out.read_text())
