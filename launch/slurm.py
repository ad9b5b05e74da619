"""Puts a SLURM job back in the queue where its run asks for it.

Rule: SLURM is asked with its own command. Where that fails the exit status (75) still asks for it,
which sites may let requeue a job by itself (RequeueExit in slurm.conf).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from base.exits import REQUEUE

TIMEOUT_S = 60


def requeued(status: int, environ: Mapping[str, str]) -> int:
    """Have this job run again where `status` asks for it; returns the status."""
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    if status != REQUEUE or not job:
        return status
    if task := environ.get("SLURM_ARRAY_TASK_ID"):
        job += f"_{task}"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        print(f"warning: {' '.join(command)}: {problem}; submit the job again", file=sys.stderr)
    else:
        print(f"job {job} is back in the queue; it goes on from the newest checkpoint", flush=True)
    return status
