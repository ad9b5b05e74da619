"""`make profile`: trains some steps of a run again under torch's profiler and reports their time.

    python -m commands.profile --run RUN [--steps 10:15] [--nproc N | --world N] [-- overrides]

    runs/RUN/recipe.yaml -> a new run RUN-profile, from its start to the last of the steps
      -> runs/RUN-profile/profile/: rank-*.trace.json.gz (Perfetto), report.md
      -> TensorBoard's text tab

Rule: RUN itself is not changed. The new run has RUN's recipe and number of ranks and leaves out the
data that RUN's rewinds left out, so that its batches are the same. It starts from step 1, so it
also trains all steps before those that are profiled; it saves and evaluates nothing.

Units: milliseconds per step of rank 0. The profiler slows small operators most, so that shares mean
more than times.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from base.command_line import Parser, add_overrides, arguments_of, refuse
from base.errors import UserError
from base.paths import ROOT
from base.table import table
from base.values import read_steps
from compare.folder import RUNS
from compare.report import pipes
from launch.hosts.place import add_place, place_variables, planned_world, start_options
from recipes.compose import compose
from record.records import read_metrics
from record.resuming import as_words, data_of
from runtime.log.event_files import EventFiles

FOLDER, OPERATORS = "profile", "operators.json"  # runtime.monitor.profiling's, which needs torch
FAILED = 1
SHOWN = 20  # operators
# Purpose of an operator or kernel, by its name; the first pattern that matches is used.
KINDS = (
    ("waiting, and Python between operators", r"^(phase|step) "),
    ("communication", r"nccl|gloo|c10d|AllGather|AllReduce|ReduceScatter"),
    ("attention", r"scaled_dot_product|flash|fmha|attention"),
    ("matrix products", r"mm\b|mm_|gemm|matmul|aten::linear|cutlass|xmma|nvjet"),
    ("optimizer", r"adam|_foreach|aten::lerp|multi_tensor"),
    ("embedding and loss", r"embedding|softmax|nll_loss|cross_entropy|logsumexp|index"),
    ("copies and fills", r"copy|aten::cat|fill|zero|[Mm]em(cpy|set)|clone|stack"),
)
REST = "everything else (element by element, norms, views)"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog="make profile", description=__doc__)
    parser.add_argument("--run", required=True, help="a run under runs/")
    parser.add_argument("--steps", default="10:15", help="A:B, the steps A to B-1")
    add_place(parser)
    add_overrides(parser, "*", "overrides")
    options = parser.parse_args(arguments)
    try:
        options.arguments = arguments_of(options)
        command, folder = prepare(options)
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a folder that this user may not write, a full disk
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    # Train.
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        return status
    # Report.
    seen = read_profile(folder)
    lines = report(seen, options.run)
    (folder / FOLDER / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    events = EventFiles(folder / "tensorboard" / FOLDER, attempt=1, after_step=0)
    events.text(0, f"{folder.name}/where the time goes", "\n".join(lines))
    events.close()
    print("\n".join(terminal(seen)))
    shown = f"runs/{folder.name}/{FOLDER}"
    print(f"\nreport in {shown}/report.md; open {shown}/rank-0.trace.json.gz in ui.perfetto.dev")
    return 0


def prepare(options: argparse.Namespace) -> tuple[list[str], Path]:
    """Return the command of the new run and its folder. Raises UserError with every problem."""
    source, folder = RUNS / options.run, RUNS / f"{options.run}-profile"
    problems = []
    if not (source / "recipe.yaml").is_file():
        problems.append(f"RUN={options.run}: there is no run in {source}; make pretrain makes one")
    if (folder / "checkpoints").is_dir():
        problems.append(f"RUN={options.run}: {folder} is a run with checkpoints; move it away")
    steps = range(1, 2)
    try:
        steps = read_steps(options.steps)
    except ValueError as error:
        problems.append(f"STEPS={options.steps!r} {error}")
    ranks = 1
    try:
        ranks = planned_world(options)
        if ranks is None and not problems:
            ranks = json.loads((source / "layout.json").read_text())["world"]
    except UserError as error:
        problems += error.problems
    except (OSError, ValueError, KeyError):
        problems.append(f"RUN={options.run}: {source}/layout.json cannot be read; give NPROC=")
    if problems:
        raise UserError(*problems)
    skips = as_words(data_of(compose(str(source / "recipe.yaml"), ["resume=auto"]).recipe, source))
    arguments = [
        f"recipe=runs/{options.run}/recipe.yaml", *skips, "eval_tokens=0", "eval_every=0",
        "checkpoint.interval=0", "checkpoint.at_end=false", f"stop_after={steps[-1]}",
        f"log.profile={options.steps}", *options.arguments, f"run={folder.name}",
    ]  # fmt: skip
    options = ["--with-parent", "--once", *start_options(place_variables(options), ranks)]
    return [sys.executable, "-m", "commands.pretrain", *options, "--", *arguments], folder


def read_profile(folder: Path) -> dict[str, Any]:
    """Read what the profiler recorded: operators, and the metrics lines of their steps."""
    seen = json.loads((folder / FOLDER / OPERATORS).read_text())
    first, end = seen["steps"]
    lines = [line for line in read_metrics(folder) if first <= line["step"] < end]
    return {**seen, "count": end - first, "lines": lines}


def kind_of(name: str) -> str:
    """Purpose of an operator: one of KINDS, or REST."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), REST)


def phase_rows(seen: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of the parts of a step, measured by the run's own clock."""
    rows = [["part of a step", "ms", "share"]]
    whole = statistics.median(line["step_s"] for line in seen["lines"])
    for name, title in (
        ("compute_s", "forward and backward"),
        ("optimizer_s", "optimizer"),
        ("data_s", "waiting for data"),
        ("other_s", "other"),
        ("step_s", "whole step"),
    ):
        seconds = statistics.median(line[name] for line in seen["lines"])
        rows.append([title, f"{seconds * 1e3:.2f}", f"{seconds / whole:.1%}"])
    return rows


def column_of(seen: dict[str, Any]) -> str:
    """Name of the time that is shown: the device's where a device worked, else the CPU's."""
    on_device = sum(each["self_device_s"] for each in seen["operators"])
    return "self_device_s" if on_device > 0 else "self_cpu_s"


def kind_rows(seen: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of time by kind of work."""
    column = column_of(seen)
    kinds: dict[str, float] = {}
    for each in seen["operators"]:
        kind = kind_of(each["name"])
        kinds[kind] = kinds.get(kind, 0.0) + each[column]
    whole = sum(kinds.values())
    device = "device" if column == "self_device_s" else "CPU"
    rows = [["kind of work", f"{device} ms", "share"]]
    for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1]):
        rows.append([kind, f"{seconds * 1e3 / seen['count']:.2f}", f"{seconds / whole:.1%}"])
    return rows


def operator_rows(seen: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of the operators with the largest own time."""
    column = column_of(seen)
    named = [each for each in seen["operators"] if not re.match(KINDS[0][1], each["name"])]
    whole = sum(each[column] for each in seen["operators"])
    is_device = column == "self_device_s"
    rows = [["operator", "calls", *(["device ms"] if is_device else []), "CPU ms", "share"]]
    for each in sorted(named, key=lambda each: -each[column])[:SHOWN]:
        name = each["name"] if len(each["name"]) <= 60 else f"{each['name'][:57]}..."
        milliseconds = [each["self_device_s"]] if is_device else []
        milliseconds.append(each["self_cpu_s"])
        rows.append([
            name.replace("|", "/"), f"{each['calls'] / seen['count']:.4g}",
            *(f"{seconds * 1e3 / seen['count']:.2f}" for seconds in milliseconds),
            f"{each[column] / whole:.1%}",
        ])  # fmt: skip
    return rows


def report(seen: dict[str, Any], run: str) -> list[str]:
    """Lines of the report as Markdown."""
    first, end = seen["steps"]
    lines = [
        f"# Where the time of {run} goes",
        "",
        f"Steps {first} to {end - 1} of a new run of its recipe, rank 0, per step. The profiler"
        " slows small operators most, so that shares mean more than times. The time of an operator"
        " does not include the operators that it calls; all threads are added up.",
    ]
    for rows in (phase_rows(seen), kind_rows(seen), operator_rows(seen)):
        lines += ["", *pipes(rows)]
    return lines


def terminal(seen: dict[str, Any]) -> list[str]:
    """Lines of the report for the terminal."""
    first, end = seen["steps"]
    lines = ["", f"steps {first} to {end - 1}, rank 0, per step, under the profiler"]
    for rows in (phase_rows(seen), kind_rows(seen), operator_rows(seen)):
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        aligned = [
            [row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in rows
        ]
        lines += ["", table(aligned, indent="")]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
