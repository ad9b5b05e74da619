"""Measures tokens/s of a training step against a bare torch loop and the Hugging Face Trainer.

    python -m benchmarks.step                                    fp32 and bf16, about ten minutes
    python -m benchmarks.step --precision fp32 --seconds 60 --profile
    python -m benchmarks.step --world 2 --only torch ours

Every contender is a process; they take turns of a few steps (A B C, B C A, ...), so that a machine
whose speed drifts slows all alike. Rule: before any speed is reported, all contenders must have
computed the same losses from the same weights and tokens. First steps are not counted. Writes
benchmarks/results/step.json and step.md (see --out). Units: seconds, tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import ROOT, Contender, Missing
from benchmarks.workload import Workload
from model.cost import num_parameters

# Losses are compared in this turn; it and the second warm-up turn are not counted.
COMPARED_STEPS = 3
MIN_ROUNDS = 3
# Transformers runs bf16 products on a CPU without bf16 units 20 times slower than fp32; with as
# many tokens as in fp32 one of its steps would take a minute.
BF16 = dict(micro_batch=2, accumulation=2, seq_len=64)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.step " + " ".join(arguments),
        "commit": commit(),
        "machine": machine(),
        "measurements": [],
    }
    for precision in options.precision:
        work = workload(precision, options)
        result["measurements"].append(measure(work, options))
    text = report.markdown(result)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"]
    )
    parser.add_argument("--seconds", type=float, default=240, help="of rounds, per precision")
    parser.add_argument("--world", type=int, choices=(1, 2), default=1, help="ranks")
    parser.add_argument("--threads", type=int, help="per rank; default: cores / ranks")
    parser.add_argument("--steps-per-turn", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also the costliest operators")
    parser.add_argument("--only", nargs="+", choices=tuple(report.TITLES), default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/step")
    return parser.parse_args(arguments)


def workload(precision: str, options: argparse.Namespace) -> Workload:
    """Workload of 8 million parameters whose steps take less than two seconds."""
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.world)
    work = Workload(precision=precision, threads=threads, world=options.world)
    return dataclasses.replace(work, **BF16) if precision == "bf16" else work


def measure(work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all rounds of one precision. Raises NotTheSame or ContenderError."""
    log(f"{work.precision}: starting contenders one after the other")
    missing: dict[str, str] = {}
    load_before = os.getloadavg()
    with ExitStack() as stack:
        contenders = {}
        for name in options.only or report.TITLES:
            contender = stack.enter_context(Contender(name, work))
            try:
                contender.wait_ready()
                contenders[name] = contender
            except Missing as error:
                missing[name] = str(error)
        first = {name: each.turn(COMPARED_STEPS)["losses"] for name, each in contenders.items()}
        report.check_same_losses(first, work.precision)
        log(f"same losses: {first}")
        for each in contenders.values():
            each.turn(1)
        turns = take_rounds(contenders, options.seconds, options.steps_per_turn)
        ops = {}
        if options.profile:
            ops = {name: each.turn(2, profile=True)["ops"] for name, each in contenders.items()}
    return {
        "workload": dataclasses.asdict(work),
        "parameters": num_parameters(work.shape_object),
        "load_before": [round(x, 1) for x in load_before],
        "load_after": [round(x, 1) for x in os.getloadavg()],
        "rounds": len(next(iter(turns.values()))),
        "steps_per_turn": options.steps_per_turn,
        "compared_steps": COMPARED_STEPS,
        "first_losses": first,
        "missing": missing,
        "has_bf16_units": has_bf16_units(),
        "contenders": report.summary(turns, work.tokens),
        "ops": ops,
    }


def take_rounds(
    contenders: dict[str, Contender],
    seconds: float,
    steps: int,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[dict[str, Any]]]:
    """Run rounds until the time is up; each round begins with another contender."""
    names = list(contenders)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    end, number = clock() + seconds, 0
    while number < MIN_ROUNDS or clock() < end:
        start = number % len(names)
        for name in names[start:] + names[:start]:
            turns[name].append(contenders[name].turn(steps))
        number += 1
        log(f"round {number}")
    return turns


def has_bf16_units() -> bool:
    """True where torch has fast bf16 matrix products on this CPU."""
    from model.layers import CPU_HAS_BF16_PRODUCTS

    return CPU_HAS_BF16_PRODUCTS


def commit() -> str:
    """Commit of this checkout, with a + where files differ from it; "unknown" outside git."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """Facts about this machine on which the numbers depend."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    packages = ("torch", "deepspeed", "transformers", "accelerate", "numpy")
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": ", ".join(versions),
    }


def log(line: str) -> None:
    """Print progress on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
