"""What the planner found, for people: the winner explained, the others with what they lose.

    Ranking (plan.search) + Outlook  ->  lines of text, or plain values for JSON

Rule: nothing is computed here that the search did not compute, except what one changed input would
do (`changes`), by the same functions. Speeds are ranges; memory is what torch's allocator counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from base.errors import UserError
from base.table import scaled, table
from base.units import GIB
from base.values import counted
from plan.memory_use import RESERVE, StageMemory, host_parts, memory_of_stages
from plan.outlook import Outlook, outlook
from plan.ranges import relative_range
from plan.search import TIE, Option, Ranking, option_of, summary, why_slower
from plan.step_time import StepTime, step_time

BAR = 40  # characters
KINDS = ("weights", "gradients", "optimizer", "buffers", "activations", "logits", "step")
LETTERS = dict(zip(KINDS[:-1], "WGOBAL", strict=True))
TERMS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound work",
    "launch": "waiting for the host",
    "tensor": "tensor communication",
    "context": "context communication",
    "data": "data communication",
    "pipeline": "pipeline messages",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "drag": "slowest host",
}
LIMITS = {
    "matmul": "matrix products",
    "attention": "attention kernels",
    "memory_bound": "memory bandwidth",
    "launch": "latency of the host",
    "tensor": "the scale-up link",
    "context": "the scale-up link",
    "data": "the network",
    "pipeline": "latency of messages",
    "bubble": "the pipeline bubble",
    "optimizer": "memory bandwidth",
    "drag": "the slowest host",
}


def speed_range(option: Option) -> tuple[float, float]:
    """(low, high) tokens per second over all ranks; four runs in five fall between."""
    low, high = relative_range(option.time, (), is_calibrated(option))
    return option.tokens_per_s * low, option.tokens_per_s * high


def is_calibrated(option: Option) -> bool:
    """Whether constants were fitted on runs of this engine on such a GPU."""
    return bool(option.machine.calibrated) and option.job.engine.is_calibrated


def report(
    found: Ranking, winner: Option, assumed: Sequence[str], tokens: float, shown: int
) -> list[str]:
    """The whole answer of `make plan`."""
    world = winner.job.world
    lines = [summary(found, world), *ranking(found, winner, shown), ""]
    return [*lines, *explained(winner, assumed, tokens)]


def ranking(found: Ranking, winner: Option, shown: int) -> list[str]:
    """A table of the fastest options, and of the nearest that do not fit."""
    rows = [["", "tokens/s per GPU", "GiB", "state", "against the first", "knobs"]]
    fastest = (found.best or found.edge)[0]
    for option in [*found.best[:shown], *found.edge[:3], *found.large[:3]]:
        is_tie = option.tokens_per_s >= (1 - TIE) * fastest.tokens_per_s
        mark = "->" if option is winner else "tie" if is_tie and option in found.best else ""
        speed = f"{option.tokens_per_s / option.job.world:,.0f}"
        rows.append(
            [
                mark,
                speed if option not in found.large else f"({speed})",
                f"{option.memory.peak / GIB:.1f}",
                option.state,
                "-" if option is winner else why_slower(option, winner),
                option.knobs,
            ]
        )
    lines = [table(rows)]
    if found.large:
        lines.append(f"  nearest that would fit of the first too large: {nearest_fit(found)}")
    return lines


def nearest_fit(found: Ranking) -> str:
    """The change that makes the least oversized option fit."""
    option = found.large[0]
    same = [
        other
        for other in found.best
        if (other.job.tensor, other.job.pipeline, other.job.context, other.job.stage)
        == (option.job.tensor, option.job.pipeline, option.job.context, option.job.stage)
    ]
    if same:
        other = same[0]
        return (
            f"micro_batch={other.job.micro_batch} recompute={other.job.recompute}"
            f" ({other.memory.peak / GIB:.1f} GiB)"
        )
    return "other axes: see the first rows"


def explained(option: Option, assumed: Sequence[str], tokens: float) -> list[str]:
    """One option: layout, memory of each stage, time by kind, the run, what limits it."""
    view = outlook(option.job, option.machine, option.time.total, tokens)
    lines = [
        f"{option.recipe.run or 'recipe'}: {option.knobs}",
        f"  {option.layout.describe()}",
        "",
        *memory_lines(option),
        "",
        "time of a step",
        *time_lines(option.time),
        "",
        "the run",
        *run_lines(option, view),
        "",
        f"limited by {limit(option.time)}; what would change it",
        *(f"  {line}" for line in changes(option)),
    ]
    if assumed:
        lines += [
            "",
            "assumed, because the cluster file does not say",
            *(f"  {a}" for a in assumed),
        ]
    return lines


def memory_lines(option: Option) -> list[str]:
    """A heading, then a bar for each pipeline stage; of many the first, some between, the last."""
    stages = memory_of_stages(option.job)
    worst = max(range(len(stages)), key=lambda index: stages[index].peak)
    chosen = sorted({0, 1, worst, len(stages) - 1} & set(range(len(stages))))
    usable = option.machine.usable_bytes
    lines = [
        f"memory of a rank, as torch's allocator counts it (card: {option.machine.memory_gib:g} GiB"
        f" {option.machine.gpu}; {RESERVE / GIB:.1f} GiB are kept for context and communicators)"
    ]
    for index in chosen:
        stage = stages[index]
        parts = ", ".join(
            f"{name} {getattr(stage, name) / GIB:.1f}" for name in KINDS if getattr(stage, name)
        )
        mark = " <- fullest" if index == worst and len(stages) > 1 else ""
        name = f"stage {index}: " if len(stages) > 1 else ""
        lines.append(
            f"  {name}{stage.peak / GIB:.1f} GiB ({stage.peak / usable:.0%}){mark}: {parts}"
        )
        lines.append(f"    [{bar(stage, usable)}]")
    lines.append(
        "    " + " ".join(f"{letter} {name}" for name, letter in LETTERS.items())
        + " (step: gradients and their fp32 copy while the optimizer steps)"
    )  # fmt: skip
    ranks = min(option.job.world, option.machine.gpus_per_node)
    kinds = [
        f"{name} {ranks * bytes_ / GIB:.1f}"
        for name, bytes_ in host_parts(option.job).items()
        if ranks * bytes_ >= 0.05 * GIB
    ]
    share = option.host_bytes / option.machine.usable_host_bytes
    mark = "" if share <= 1 else " <- does not fit"
    lines.append(
        f"  memory of a host: {option.host_bytes / GIB:.1f} GiB ({share:.0%}){mark}:"
        f" {', '.join(kinds)}"
    )
    return lines


def bar(stage: StageMemory, usable: float) -> str:
    """One character per 1/BAR of the card."""
    text = ""
    reached = 0.0
    for name in LETTERS:
        reached += getattr(stage, name)
        text += LETTERS[name] * (round(BAR * reached / usable) - len(text))
    return text[:BAR].ljust(BAR, ".") + (">" if reached > usable else "")


def time_lines(time: StepTime) -> list[str]:
    """Terms of a step with their share; those below half a per mille are left out."""
    rows = []
    for name, shown in TERMS.items():
        seconds = getattr(time, name)
        if seconds > 5e-4 * time.total:
            share = seconds / time.total
            rows.append([shown, f"{seconds:.3f} s", f"{share:.1%}", "#" * round(BAR * share)])
    rows.append(["step", f"{time.total:.3f} s", "100%", ""])
    return [table(rows)]


def run_lines(option: Option, view: Outlook) -> list[str]:
    """Speed, MFU, length and cost, each as a range."""
    low, high = (bound / option.tokens_per_s for bound in speed_range(option))
    calibrated = (
        ""
        if is_calibrated(option)
        else " (not calibrated: no run of this engine on this GPU was fitted)"
    )
    rows = [
        ["tokens/s", spread(view.tokens_per_s, low, high, ",.0f"), calibrated.strip()],
        ["tokens/s per GPU", spread(view.tokens_per_s / option.job.world, low, high, ",.0f"), ""],
        ["MFU", spread(100 * view.mfu, low, high, ".1f", "%"),
         f"attention over the full square; causal half: {view.mfu_causal:.1%}"],
        [*(["days", spread(view.days, 1 / high, 1 / low, ".2f")] if view.days >= 1 else
           ["hours", spread(24 * view.days, 1 / high, 1 / low, ".2f")]),
         f"{scaled(view.tokens)} tokens, failures and saves included"],
        ["GPU-hours", spread(view.gpu_hours, 1 / high, 1 / low,
                             ",.0f" if view.gpu_hours >= 100 else ".1f"), ""],
        ["goodput", f"{view.goodput:.1%}",
         f"with a save every {counted(view.interval, 'step')} (about {view.save_s:.0f} s each)"],
    ]  # fmt: skip
    if view.cost is None:
        rows.append(["cost", "not known", "set cluster.price_per_hour, the price of one GPU"])
    else:
        rows.append(["cost", spread(view.cost, 1 / high, 1 / low, ",.0f"), ""])
    return [table(rows)]


def spread(value: float, low: float, high: float, form: str, unit: str = "") -> str:
    """`value (low to high)`."""
    shown = [f"{number:{form}}{unit}" for number in (value, value * low, value * high)]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def limit(time: StepTime) -> str:
    """What takes most of the step, and the largest thing that is not arithmetic."""
    names = sorted(TERMS, key=lambda name: -getattr(time, name))
    first = names[0]
    other = next(name for name in names if name not in ("matmul", "attention"))
    if first == other or getattr(time, other) < 0.02 * time.total:
        return LIMITS[first]
    return f"{LIMITS[first]} ({getattr(time, first) / time.total:.0%}), then {LIMITS[other]}" + (
        f" ({getattr(time, other) / time.total:.0%})"
    )


def changes(option: Option) -> list[str]:
    """What one other input would do to the step time."""
    now = option.time.total
    lines = []
    for shown, field, factor in (
        ("network half as fast", "nic_gb_s", 0.5),
        ("scale-up link half as fast", "link_gb_s", 0.5),
        ("memory bandwidth + 50 %", "memory_gb_s", 1.5),
        ("matrix products + 20 %", "matmul_tflops", 1.2),
    ):
        machine = option.machine
        changed = {field: getattr(machine, field) * factor}
        if field == "matmul_tflops":
            seconds = now - option.time.matmul * (1 - 1 / factor)
        else:
            seconds = step_time(option.job, dataclasses.replace(machine, **changed)).total
        if abs(seconds / now - 1) >= 0.005:
            lines.append(f"{shown}: {seconds / now - 1:+.0%} time")
    lines += [line for line in (twice(option), recomputed(option)) if line]
    return lines


def twice(option: Option) -> str | None:
    """The micro-batch of twice the sequences."""
    size = 2 * option.recipe.micro_batch
    other = another(option, micro_batch=size)
    return other and f"micro_batch={size}: {other}"


def recomputed(option: Option) -> str | None:
    """The next lower or higher amount of recomputation."""
    how = {"none": "selective", "selective": "none", "full": "selective"}.get(
        option.recipe.recompute
    )
    other = how and another(option, recompute=how)
    return other and f"recompute={how}: {other}"


def another(option: Option, **knobs: Any) -> str | None:
    """Time and memory of an option with other knobs; None where that is not legal."""
    recipe = dataclasses.replace(option.recipe, **knobs)
    sequences = option.job.micro_batch * option.job.micro_batches
    if sequences % recipe.micro_batch:
        return None
    try:
        other = option_of(recipe, option.job.world, option.job.stage, option.machine)
    except UserError:
        return None
    seconds = other.time.total / option.time.total - 1
    share = other.memory.peak / option.machine.usable_bytes
    return f"{seconds:+.1%} time, {share:.0%} of memory ({other.state})"


def versus(one: Option, other: Option) -> list[str]:
    """Where the seconds of two options differ, for one step of the same tokens."""
    scale = one.job.tokens / other.job.tokens
    rows = [["", one.knobs, other.knobs, "difference"]]
    for name, shown in TERMS.items():
        first, second = getattr(one.time, name), getattr(other.time, name) * scale
        if max(first, second) > 5e-4 * one.time.total:
            rows.append([shown, f"{first:.3f} s", f"{second:.3f} s", f"{second - first:+.3f} s"])
    totals = one.time.total, other.time.total * scale
    rows.append(
        ["step", f"{totals[0]:.3f} s", f"{totals[1]:.3f} s", f"{totals[1] - totals[0]:+.3f} s"]
    )
    memory = one.memory.peak / GIB, other.memory.peak / GIB
    rows.append(
        [
            "memory",
            f"{memory[0]:.1f} GiB",
            f"{memory[1]:.1f} GiB",
            f"{memory[1] - memory[0]:+.1f} GiB",
        ]
    )
    rows.append(["state", one.state, other.state, ""])
    if abs(totals[1] / totals[0] - 1) <= TIE:
        rows.append(["", "", "", f"a tie: within {TIE:.0%}"])
    return [table(rows)]


def plain(option: Option, tokens: float) -> dict[str, Any]:
    """One option as plain values, for JSON."""
    view = outlook(option.job, option.machine, option.time.total, tokens)
    low, high = speed_range(option)
    return {
        "knobs": option.knobs,
        "layout": option.layout.as_dict(),
        "state": option.state,
        "is_calibrated": is_calibrated(option),
        "step_s": option.time.total,
        "time_s": dataclasses.asdict(option.time),
        "tokens_per_s": option.tokens_per_s,
        "tokens_per_s_low": low,
        "tokens_per_s_high": high,
        "memory_bytes": option.memory.peak,
        "memory_of_stages_bytes": [
            dataclasses.asdict(stage) | {"peak": stage.peak}
            for stage in memory_of_stages(option.job)
        ],
        "memory_card_usable_bytes": option.machine.usable_bytes,
        "host_memory_bytes_per_rank": host_parts(option.job),
        "host_memory_bytes": option.host_bytes,
        "host_memory_usable_bytes": option.machine.usable_host_bytes,
        "limited_by": limit(option.time),
        "changes": changes(option),
        "run": dataclasses.asdict(view) | {"days": view.days},
    }
