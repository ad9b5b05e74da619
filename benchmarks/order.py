"""Measures the computed order of a source against a stored shuffle: time and memory, by size.

    python -m benchmarks.order --sizes 1e8 1e9

    ours     data.stream.order: nothing is built; the windows of a batch are computed on demand
    numpy    Generator.shuffle of the whole source (int32 below 2**31), then a lookup

Each measurement is a separate process. Rule: the first batch of a fresh process and every later
batch are both compared, so that the time of building is visible. Also measures the mixture table of
1,000 sources. Writes benchmarks/results/order.json and .md. Units: seconds of CPU, MiB of peak
memory above that of the imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.step import commit, machine
from data.stream.mixture import Stages
from data.stream.order import Order

BATCH, SEED, REPEATS = 1024, 1234, 200
RESULTS = Path(__file__).resolve().parent / "results"
TIME_LIMIT_S = 1800


def main(arguments: list[str]) -> int:
    """Run the command: each case in its own process. With a case: measure it in this process."""
    parser = argparse.ArgumentParser(prog="benchmarks.order", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=lambda text: int(float(text)), default=[10**8])
    parser.add_argument("--case", nargs=2, help="internal: name and size")
    parser.add_argument("--out", type=Path, default=RESULTS / "order")
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(CASES[options.case[0]](int(options.case[1]))))
        return 0
    rows = []
    for size in options.sizes:
        for name in ("ours", "numpy"):
            rows.append({"case": name, "samples": size} | in_process(name, size))
    rows.append({"case": "mixture", "samples": 1000} | in_process("mixture", 1000))
    result = {"rows": rows, "machine": machine(), "commit": commit()}
    text = markdown(result, " ".join(arguments))
    print(text)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text + "\n")
    return 0


def in_process(name: str, size: int) -> dict[str, float]:
    """Run one case in a process; returns its numbers."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.order", "--case", name, str(size)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    return json.loads(done.stdout)


def ours(size: int) -> dict[str, float]:
    """Measure the keyed permutation: building, first batch, later batches."""
    before, began = peak_mib(), time.process_time()
    order = Order(SEED, ["prose"], [size])
    source = np.zeros(BATCH, dtype=np.int64)
    order.windows(source, np.arange(BATCH))
    first = time.process_time() - began
    later = []
    for number in range(1, REPEATS):
        draws = np.arange(number * BATCH, (number + 1) * BATCH)
        began = time.process_time()
        order.windows(source, draws)
        later.append(time.process_time() - began)
    return seen(first, later, before)


def stored(size: int) -> dict[str, float]:
    """Measure a permutation that is made and stored as a whole."""
    before, began = peak_mib(), time.process_time()
    order = np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)
    np.random.default_rng(SEED).shuffle(order)
    order[:BATCH].astype(np.int64)
    first = time.process_time() - began
    later = []
    for number in range(1, REPEATS):
        began = time.process_time()
        order[number * BATCH : (number + 1) * BATCH].astype(np.int64)
        later.append(time.process_time() - began)
    return seen(first, later, before)


def seen(first: float, later: list[float], mib_before: float) -> dict[str, float]:
    """Numbers of one case. The fastest of the later batches counts: other programs slow some."""
    times = {"batch_ms": 1e3 * min(later), "batch_median_ms": 1e3 * statistics.median(later)}
    return {"first_s": first, **times, "mib": peak_mib() - mib_before}


def mixture(sources: int) -> dict[str, float]:
    """Measure the table of so many sources, and its largest deviation from the shares."""
    weights = {f"s{i:05d}": 1 + (i * 7919) % 1000 for i in range(sources)}
    before, began = peak_mib(), time.process_time()
    stages = Stages([(0, weights)])
    first, mib = time.process_time() - began, peak_mib() - before
    one = stages.mixtures[0]
    samples = np.arange(one.period)
    source, draw = stages.locate(samples)
    worst = float(np.abs(draw - samples * one.counts[source] / one.period).max())
    return {"first_s": first, "mib": mib, "worst_deviation": worst}


def peak_mib() -> float:
    """Peak resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


CASES = {"ours": ours, "numpy": stored, "mixture": mixture}


def markdown(result: dict, arguments: str) -> str:
    """Report as Markdown."""
    lines = [
        "# Order",
        "",
        f"`python -m benchmarks.order {arguments}` at commit {result['commit']}; CPU seconds, a"
        " process each.",
        "",
        *(f"- {key}: {value}" for key, value in result["machine"].items()),
        "",
        f"| | samples | build and first batch of {BATCH:,} | a later batch, least (median) |"
        " peak memory |",
        "|---|---|---|---|---|",
    ]
    names = {"ours": "keyed permutation (ours)", "numpy": "numpy shuffle, stored"}
    for row in result["rows"]:
        if row["case"] == "mixture":
            lines += [
                "",
                f"Mixture table of {row['samples']:,} sources: {row['first_s']:.3f} s,"
                f" {row['mib']:.0f} MiB, worst deviation from the shares at any prefix"
                f" {row['worst_deviation']:.2f} samples.",
            ]
            continue
        lines.append(
            f"| {names[row['case']]} | {row['samples']:.0e} | {row['first_s']:.4f} s |"
            f" {row['batch_ms']:.3f} ms ({row['batch_median_ms']:.3f}) | {row['mib']:,.0f} MiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
