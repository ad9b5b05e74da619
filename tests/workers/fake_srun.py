"""Replaces SLURM's srun, as its manual page describes it, with all "hosts" on this machine.

One task per host with its SLURM_ variables; standard input is copied to every task (--input=all);
with --kill-on-bad-exit the first task that fails ends the others; the exit status is the highest of
all tasks, 128 + signal for one that was killed; a signal is passed on to the tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

KNOWN = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--nodelist", "--wait", "--input", "--export",
    "--mpi", "--cpu-bind", "--cpus-per-task", "--chdir",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in KNOWN:
        parser.add_argument(name)
    parser.add_argument("--kill-on-bad-exit", choices=("0", "1"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    names = options.nodelist.split(",")
    if len(names) != int(options.nodes) or int(options.ntasks) != len(names):
        print("srun: error: Requested node configuration is not available", file=sys.stderr)
        return 1
    if set(names) - set(os.environ["FAKE_ALLOCATION"].split(",")):
        print("srun: error: Invalid node list", file=sys.stderr)
        return 1
    tasks = [
        subprocess.Popen(
            options.command,
            cwd=options.chdir,
            stdin=subprocess.PIPE,
            env=os.environ
            | {
                "SLURM_STEP_ID": "0",
                "SLURM_STEPID": "0",
                "SLURM_PROCID": str(number),
                "SLURM_NODEID": str(number),
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": str(len(names)),
                "SLURM_STEP_NODELIST": options.nodelist,
                "SLURMD_NODENAME": name,
            },
            start_new_session=True,
        )
        for number, name in enumerate(names)
    ]
    threading.Thread(target=copy_input, args=(tasks,), daemon=True).start()

    def pass_on(number: int, frame) -> None:
        for task in tasks:
            if task.poll() is None:
                task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    while any(task.poll() is None for task in tasks):
        if options.kill_on_bad_exit == "1" and any(task.poll() for task in tasks):
            for task in tasks:
                if task.poll() is None:
                    task.kill()
        time.sleep(0.05)
    return max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks))


def copy_input(tasks) -> None:
    while chunk := os.read(0, 65536):
        for task in tasks:
            try:
                task.stdin.write(chunk)
                task.stdin.flush()
            except OSError:
                pass
    for task in tasks:
        with contextlib.suppress(OSError):
            task.stdin.close()


sys.exit(main())
