"""The planner against published runs: errors of speed, ranges, order of layouts, bubbles, memory.

    throughput.csv -> runs; for each family: constants fitted on the others -> predictions -> table

Rule: a run is predicted with constants that were fitted without its whole family (all NVIDIA
recipes are one), so the table says how well an unseen source is met. A file of other rows is
predicted with constants fitted on all families of ours except those it holds itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from base.table import table
from base.units import GIB
from base.values import counted
from plan.constants import Constants
from plan.fit import fit
from plan.machine import PUBLISHED, machine_of
from plan.memory_use import TOO_LARGE, memory_of_stages, verdict
from plan.own_runs import own_runs
from plan.published_rows import PublishedRun, read, usable
from plan.ranges import relative_range
from plan.step_time import StepTime, bubble_rate, step_time
from plan.workload import ENGINES, Job, Shape

MAIN_GPUS = ("A100", "H100")
APART = 0.05  # relative difference from which two layouts should be ordered right
ALLOCATORS = (
    "Zero Bubble",
    "torchtitan",
    "nanotron",
    "own runs",
)  # sources that print the allocator's peak


@dataclass(frozen=True)
class Prediction:
    """One run and its blind prediction, tokens per second and GPU."""

    run: PublishedRun
    predicted: float
    low: float
    high: float
    baseline: float | None  # constant MFU of the GPU, from the other families
    time: StepTime

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.run.tokens_per_s - 1

    @property
    def is_covered(self) -> bool:
        """Whether the printed range holds the measured speed."""
        return self.low <= self.run.tokens_per_s <= self.high

    @property
    def is_main(self) -> bool:
        """Whether the run counts for the first line of the bar: A100 and H100."""
        return self.run.machine.gpu.startswith(MAIN_GPUS)


def predict_blind(runs: Sequence[PublishedRun]) -> list[Prediction]:
    """Every run, predicted by constants that were fitted without its family."""
    found = []
    for family in sorted({run.family for run in runs}):
        others = [run for run in runs if run.family != family]
        found += predict_runs([run for run in runs if run.family == family], others)
    return found


def predict_runs(runs: Sequence[PublishedRun], others: Sequence[PublishedRun]) -> list[Prediction]:
    """`runs` by constants that were fitted on `others`."""
    constants, usual = fit(others), usual_mfu(others)
    return [predict_one(run, constants, usual) for run in runs]


def predict_one(run: PublishedRun, constants: Constants, usual: dict[str, float]) -> Prediction:
    """One run with given constants."""
    time = step_time(run.job, run.machine, constants)
    rate = run.job.tokens / time.total / run.job.world
    low, high = relative_range(time, run.unknown, run.is_calibrated)
    share = usual.get(run.machine.gpu) or usual.get("")
    flops = run.job.shape.flops_per_token(run.job.seq_len)
    baseline = share * run.machine.peak_tflops * 1e12 / flops if share else None
    return Prediction(run, rate, low * rate, high * rate, baseline, time)


def usual_mfu(runs: Iterable[PublishedRun]) -> dict[str, float]:
    """Median MFU of each GPU, and of all under ""."""
    shares = defaultdict(list)
    for run in runs:
        flops = run.job.shape.flops_per_token(run.job.seq_len)
        share = run.tokens_per_s * flops / (run.machine.peak_tflops * 1e12)
        shares[run.machine.gpu].append(share)
        shares[""].append(share)
    return {gpu: statistics.median(values) for gpu, values in shares.items()}


def quantiles(errors: Iterable[float]) -> tuple[float, float]:
    """(median, 90 %) of absolute errors."""
    ordered = sorted(map(abs, errors))
    if not ordered:
        return math.nan, math.nan
    return statistics.median(ordered), ordered[
        min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)
    ]


def ordered_pairs(tests: Sequence[Prediction]) -> tuple[int, int]:
    """(ordered right, all) pairs of layouts of one model, cluster and engine that differ by more
    than APART as measured."""
    groups = defaultdict(list)
    for test in tests:
        run, job = test.run, test.run.job
        key = (run.family, run.notes["source"], run.notes.get("model"), run.machine.gpu, job.world,
               job.seq_len, run.notes.get("framework"))  # fmt: skip
        groups[key].append(test)
    right = total = 0
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            measured = one.run.tokens_per_s / other.run.tokens_per_s
            if abs(math.log(measured)) <= math.log(1 + APART):
                continue
            total += 1
            right += (measured > 1) == (one.predicted > other.predicted)
    return right, total


# ---- text


def validation_report(
    path: Path | None = None, worst: int = 8, folders: Sequence[Path] = ()
) -> tuple[list[str], list[Prediction]]:
    """The lines of `make plan-check`: for our rows, those of a file, or runs. Raises UserError."""
    own, refused = usable(read(PUBLISHED / "throughput.csv"))
    if folders:
        runs, refused = own_runs(list(folders))
        tests, title = predict_runs(runs, own), "runs of this site, by constants fitted on all rows"
    elif path is None:
        tests, title = predict_blind(own), "published runs, each family predicted without itself"
    else:
        runs, refused = usable(read(path))
        families = {run.family for run in runs}
        tests = predict_runs(runs, [run for run in own if run.family not in families])
        title = f"{path}, predicted with constants fitted on our rows of other families"
    lines = [title, *refused_lines(refused), ""]
    if not tests:
        return [*lines, "no usable row"], []
    lines += [*speed_lines(tests), "", "worst rows", *worst_lines(tests, worst), ""]
    memory = memory_lines([test.run for test in tests])
    if memory:
        lines += ["memory that an allocator measured", *memory, ""]
    if folders:
        lines += ["each run", *run_lines(tests), ""]
    elif path is None:
        lines += ["bubbles of pipelines (idle share of a step)", *bubble_lines(), ""]
    return lines, tests


def refused_lines(refused: dict[str, int]) -> list[str]:
    """How many rows were not usable, and why."""
    total = sum(refused.values())
    lines = [f"{counted(total, 'row')} not used:"] if total else []
    return lines + [f"  {count:4} {reason}" for reason, count in sorted(refused.items())]


def speed_lines(tests: Sequence[Prediction]) -> list[str]:
    """Errors of tokens/s: by family, GPU and engine, and in all."""
    head = ["tokens/s of", "rows", "median", "90 %", "bias", "in range", "constant MFU", ""]
    rows = [head]
    groups = defaultdict(list)
    for test in tests:
        groups[test.run.family, test.run.machine.gpu, test.run.job.engine.name].append(test)
    for (family, gpu, engine), group in sorted(groups.items()):
        mark = "" if group[0].run.is_calibrated else "not calibrated"
        rows.append(speed_row(f"{family}, {gpu}, {engine}", group, mark))
    main = [test for test in tests if test.is_main]
    rows.append(speed_row("all on A100 and H100", main, ""))
    known = [test for test in main if test.run.is_calibrated]
    rows.append(speed_row("of these, calibrated", known, ""))
    rows.append(speed_row("not calibrated", [t for t in tests if not t.run.is_calibrated], ""))
    rows.append(speed_row("all", tests, ""))
    right, total = ordered_pairs(tests)
    pairs = f"{right} of {total} ({right / total:.1%})" if total else "none"
    return [
        table(rows),
        f"  pairs of layouts of one model and cluster more than {APART:.0%} apart, ordered right:"
        f" {pairs}",
    ]


def speed_row(name: str, tests: Sequence[Prediction], mark: str) -> list[str]:
    """One row of the table."""
    if not tests:
        return [name, "0", "", "", "", "", "", mark]
    median, high = quantiles(test.error for test in tests)
    base = [t.baseline / t.run.tokens_per_s - 1 for t in tests if t.baseline]
    plain, plain_high = quantiles(base)
    covered = sum(test.is_covered for test in tests) / len(tests)
    bias = statistics.median(test.error for test in tests)
    return [
        name, str(len(tests)), f"{median:.1%}", f"{high:.1%}", f"{bias:+.1%}", f"{covered:.0%}",
        f"{plain:.0%} / {plain_high:.0%}" if base else "", mark,
    ]  # fmt: skip


def worst_lines(tests: Sequence[Prediction], count: int) -> list[str]:
    """The rows with the largest errors, and what makes them hard."""
    rows = []
    for test in sorted(tests, key=lambda test: -abs(math.log1p(test.error)))[:count]:
        rows.append([f"{test.error:+.0%}", test.run.label, why_hard(test)])
    return [table(rows)]


def why_hard(test: Prediction) -> str:
    """The parts of a prediction that are least certain, largest first."""
    reasons = []
    if not test.run.job.engine.is_calibrated:
        reasons.append(f"engine {test.run.job.engine.name} is not calibrated")
    if not test.run.machine.calibrated:
        reasons.append(f"{test.run.machine.gpu} is not calibrated")
    if test.run.unknown:
        reasons.append(f"not published: {', '.join(test.run.unknown)}")
    shares = {
        name: getattr(test.time, name) / test.time.total
        for name in ("tensor", "context", "data", "bubble", "launch", "memory_bound")
    }
    name = max(shares, key=lambda key: shares[key])
    reasons.append(f"{name.replace('_', '-')} is {shares[name]:.0%} of the step")
    if test.run.job.micro_batches < 2:
        reasons.append("one micro-batch: nothing hides the end of a step")
    return "; ".join(reasons)


def run_lines(tests: Sequence[Prediction]) -> list[str]:
    """Predicted and measured speed and memory of each run."""
    rows = [["", "tokens/s per GPU", "predicted", "", "range", "GiB", "predicted"]]
    for test in tests:
        run = test.run
        peak = max(stage.peak for stage in memory_of_stages(run.job)) / GIB
        rows.append([
            run.label, f"{run.tokens_per_s:,.0f}", f"{test.predicted:,.0f}", f"{test.error:+.1%}",
            f"{test.low:,.0f} to {test.high:,.0f}{'' if test.is_covered else ' (outside)'}",
            f"{run.memory_gib:.2f}" if run.memory_gib else "-", f"{peak:.2f}",
        ])  # fmt: skip
    return [table(rows)]


def memory_lines(runs: Sequence[PublishedRun]) -> list[str]:
    """Errors of the peak on the fullest GPU, by family."""
    errors, impossible = defaultdict(list), []
    for run in runs:
        if run.memory_gib is None or not run.family.startswith(ALLOCATORS):
            continue
        peak = max(stage.peak for stage in memory_of_stages(run.job))
        errors[run.family].append(peak / GIB / run.memory_gib - 1)
        if verdict(peak, run.machine) == TOO_LARGE:
            impossible.append(run.label)
    rows = [["", "rows", "median", "90 %", "bias"]]
    everything = list(itertools.chain(*errors.values()))
    for name, group in [*sorted(errors.items()), ("all", everything)]:
        if group:
            median, high = quantiles(group)
            bias = statistics.median(group)
            rows.append([name, str(len(group)), f"{median:.1%}", f"{high:.1%}", f"{bias:+.1%}"])
    if not everything:
        return []
    lines = [table(rows), f"  runs that are declared impossible: {len(impossible)}"]
    return lines + [f"    {label}" for label in impossible]


def bubble_lines() -> list[str]:
    """Published idle shares of 1F1B and interleaved schedules against ours."""
    errors = bubble_errors()
    rows = [["", "rows", "largest difference", "90 %"]]
    names: dict[str, Callable[[str], bool]] = {
        "1F1B": lambda name: name == "1F1B",
        "interleaved": lambda name: name == "1F1B-I",
        "zero bubble (not demanded)": lambda name: name.startswith("ZB"),
    }
    for shown, is_of in names.items():
        group = [error for name, error in errors if is_of(name)]
        if group:
            largest, (_, high) = max(group, key=abs), quantiles(group)
            rows.append(
                [shown, str(len(group)), f"{100 * largest:+.1f} points", f"{100 * high:.1f}"]
            )
    return [table(rows)]


def bubble_errors() -> list[tuple[str, float]]:
    """(schedule, predicted - published) of every row of bubble.csv that we model."""
    found = []
    for row in read(PUBLISHED / "bubble.csv", needed=("pp", "bubble_rate_published")):
        schedule, stages, layers = row["schedule"], int(row["pp"]), int(row["layers"])
        if schedule not in ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p"):
            continue
        hidden, heads = int(row["hidden"]), int(row["heads"])
        middle, is_lighter = divmod(layers + 2, stages)
        blocks = (middle - 1, *[middle] * (stages - 2), middle - 1) if not is_lighter else ()
        job = Job(
            shape=Shape(51200, hidden, 4 * hidden, layers, heads, heads, is_gated=False,
                        tie_word_embeddings=True, positions=1024),
            seq_len=1024 if layers < 70 else 2048,
            micro_batch=int(row["micro_batch"]),
            micro_batches=int(row["n_microbatches"]),
            tensor=1 if layers < 70 else 4,
            pipeline=stages,
            virtual=int(row["vpp"] or 1),
            data=1 if layers < 70 else 8,
            recompute="none" if layers < 70 else "full",
            blocks=blocks,
            schedule=schedule.lower() if schedule.startswith("ZB") else "1f1b",
            engine=ENGINES["megatron-classic"],
        )  # fmt: skip
        rate = bubble_rate(job, step_time(job, machine_of("A100-80GB")))
        found.append((schedule, rate - float(row["bubble_rate_published"])))
    return found
