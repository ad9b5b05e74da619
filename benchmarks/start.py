"""Measures a warm start: seconds from the command to the line of the first step, and their parts.

    python -m benchmarks.start                     five starts of the tiny recipe
    python -m benchmarks.start --runs 3 recipe=tiny zero=3

Three programs take turns: the untouched command, the same start with the clock read between its
parts (benchmarks.start_probe), and a process that only imports torch and deepspeed and makes an
optimizer, as every DeepSpeed program must. Rule: "ours" is all time before the first step that the
third program does not need; the goal is OURS_GOAL_S. The first start, which builds the corpus and
writes bytecode, is not counted. Writes benchmarks/results/start.json and start.md. Units: seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.start_probe import LAZY, STEPS
from benchmarks.step import commit, machine

OURS_GOAL_S = 3.0
LIMIT_S = 300
# Line of the first step when the console is piped.
FIRST_LINE = re.compile(r"\bstep\s+1\b")
UNAVOIDABLE = ("run: interpreter", "import torch", LAZY, "import deepspeed")

Mark = tuple[str, float, float]  # part, wall, cpu
Parts = dict[str, tuple[float, float]]  # part -> seconds (wall, cpu)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/start")
    parser.add_argument("arguments", nargs="*", default=["recipe=tiny"])
    options = parser.parse_args(arguments)
    load = os.getloadavg()
    untouched, probed, bare = [], [], []
    for number in range(options.runs + 1):
        seen = untouched_start(options.arguments), probed_start(options.arguments), bare_start()
        if number:  # the first start fills caches
            for kept, one in zip((untouched, probed, bare), seen, strict=True):
                kept.append(one)
    result = {
        "command": "python -m benchmarks.start " + " ".join(arguments),
        "commit": commit(),
        "machine": machine() | {"load before": [round(x, 1) for x in load]},
        "untouched_s": untouched,
        **summary(probed, bare),
    }
    text = markdown(result)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    return 0


def untouched_start(arguments: list[str]) -> float:
    """Seconds until the real command prints the line of its first step."""
    command = [
        sys.executable,
        "-m",
        "commands.pretrain",
        "--nproc",
        "1",
        "--",
        *run_arguments(arguments),
    ]
    return timed_run(command, FIRST_LINE)


def probed_start(arguments: list[str]) -> Parts:
    """Seconds of the parts of one start."""
    return parts_of(lambda out: ["launcher", out, *run_arguments(arguments)])


def bare_start() -> Parts:
    """Seconds of the parts of a process that imports torch and deepspeed."""
    return parts_of(lambda out: ["reference", out])


def parts_of(arguments_of: Any) -> Parts:
    """Run the probe once and add up its marks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "marks.json"
        began = time.monotonic()
        timed_run([sys.executable, "-m", "benchmarks.start_probe", *arguments_of(str(out))])
        return add_up(began, [tuple(mark) for mark in json.loads(out.read_text())])


def add_up(began: float, marks: Sequence[Mark]) -> Parts:
    """Seconds of each part, in order of first appearance.

    A mark ends the part that began at the mark before it.
    """
    parts: Parts = {}
    wall, cpu = began, 0.0
    for name, now, cpu_now in marks:
        before = parts.get(name, (0.0, 0.0))
        parts[name] = before[0] + now - wall, before[1] + cpu_now - cpu
        wall, cpu = now, cpu_now
    return parts


def timed_run(command: list[str], until: re.Pattern[str] | None = None) -> float:
    """Run a command to its end and remove its run folder.

    Returns the seconds until a line matched `until`.
    """
    shutil.rmtree(RUN_FOLDER, ignore_errors=True)
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds, lines = None, []
    try:
        for line in process.stdout:
            lines.append(line)
            if until and seconds is None and until.search(line):
                seconds = time.monotonic() - began
        code = process.wait(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(RUN_FOLDER, ignore_errors=True)
    if code != 0 or (until and seconds is None):
        raise RuntimeError(f"{' '.join(command)}: exit status {code}\n{''.join(lines[-30:])}")
    return time.monotonic() - began if seconds is None else seconds


RUN_NAME = "benchmark-start"
RUN_FOLDER = ROOT / "runs" / RUN_NAME


def run_arguments(arguments: list[str]) -> list[str]:
    """Overrides: no evaluation, two steps (a step is printed after the launch of the next)."""
    return [*arguments, f"run={RUN_NAME}", "stop_after=2", "eval_tokens=0"]


def summary(probed: Sequence[Parts], bare: Sequence[Parts]) -> dict[str, Any]:
    """Medians over starts. `ours_s` is all parts except the steps, minus the third program."""
    medians = {
        name: [statistics.median(parts[name][kind] for parts in probed) for kind in (0, 1)]
        for name in probed[0]
    }
    ready = [total(parts) - parts[STEPS][0] for parts in probed]
    needed = [total(parts) for parts in bare]
    return {
        "parts": medians,
        "first_line_s": statistics.median(total(parts) for parts in probed),
        "ready_s": statistics.median(ready),
        "needed_s": statistics.median(needed),
        "ours_s": statistics.median(a - b for a, b in zip(ready, needed, strict=True)),
        "ours_cpu_s": sum(
            cpu for name, (_, cpu) in medians.items() if name not in (*UNAVOIDABLE, STEPS)
        ),
        "late_imports_s": medians[LAZY][0],
    }


def total(parts: Parts) -> float:
    """Sum of the seconds of all parts."""
    return sum(wall for wall, _ in parts.values())


def markdown(result: dict[str, Any]) -> str:
    """Report as Markdown."""
    lines = ["# Warm start", "", f"`{result['command']}` at commit {result['commit']}.", ""]
    lines += [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        "",
        "From the command to the first step's line (printed when the second step is under way):"
        f" untouched {statistics.median(result['untouched_s']):.2f} s, with the clock read between"
        f" parts {result['first_line_s']:.2f} s; ready for the first step after"
        f" {result['ready_s']:.2f} s.",
        "",
        "A process that only imports torch and deepspeed and makes an optimizer:"
        f" {result['needed_s']:.2f} s. **Ours, before the first step: {result['ours_s']:.2f} s**"
        f" (goal: at most {OURS_GOAL_S:.0f}), {result['ours_cpu_s']:.2f} s of it on a core."
        f" Counting torch's own late imports as ours would add {result['late_imports_s']:.2f} s.",
        "",
        "| part, in order (bold: the three largest of ours) | seconds | on a core |",
        "|---|---|---|",
    ]
    mine = {
        name: wall
        for name, (wall, _) in result["parts"].items()
        if name not in (*UNAVOIDABLE, STEPS)
    }
    largest = sorted(mine, key=mine.__getitem__)[-3:]
    for name, (wall, cpu) in result["parts"].items():
        mark = "**" if name in largest else ""
        lines.append(f"| {mark}{name}{mark} | {wall:.2f} | {cpu:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
