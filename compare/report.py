"""Writes the report of a comparison as Markdown, and its main table for the terminal.

Rule: this file formats what `results` computed and computes nothing itself. A value that is not
known or was not measured is shown as a dash, never as a zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from base.table import table
from base.units import MIB
from base.values import counted
from compare.ranking import LEARNED, SPEED, RankedSide, ranked
from compare.results import (
    Agreement,
    RunResult,
    Side,
    agreement,
    differing,
    ratios,
    surroundings,
)
from record.predictions import comparison

NONE = "-"
RANK_LEGEND = (
    "{rank} = mean over seeds of the last validation loss of a run, {unit}. distinguishable:"
    " the difference to the best variant is larger than the spread (highest minus lowest) over the"
    " seeds of both; NO means that another set of seeds could change the order."
)
PARTS = (("compute_s", "forward, backward"), ("optimizer_s", "optimizer"), ("data_s", "data"),
         ("other_s", "other"))  # fmt: skip
BUSY = 2  # load average per core; the previous run of the comparison leaves about 1
# Two runs that differ in one of these knobs do not do the same work in a step.
WORK = ("model", "data", "batch_tokens", "seq_len", "seq_len_warmup", "precision")


@dataclass(frozen=True)
class Comparison:
    """Content of a report: the sides; the first one is the base of all ratios."""

    name: str
    command: str
    sides: list[Side]
    is_sweep: bool
    pictures: tuple[str, ...] = ()
    loads: Sequence[float] = ()  # load averages of the machine before the runs
    rank: str = SPEED  # what the variants are ranked by: compare.ranking.RANKS

    @property
    def runs(self) -> list[RunResult]:
        """All runs of all sides."""
        return [run for side in self.sides for run in side.runs]

    @property
    def base(self) -> Side:
        """First side that has a run."""
        return next(side for side in self.sides if side.runs)

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, without repetition."""
        return sorted({run.knobs["seed"] for run in self.runs})

    def agreement(self) -> Agreement | None:
        """Agreement of the losses of all runs."""
        return agreement(self.sides)

    def ranked(self) -> list[RankedSide]:
        """Variants in the order of validation loss; empty where they are ranked by speed."""
        return ranked(self.sides, self.rank) if self.rank in LEARNED else []


def markdown(shown: Comparison) -> str:
    """Return the whole report as Markdown."""
    lines = [f"# {shown.name}", "", f"`{shown.command}`", "", *setting(shown), ""]
    lines += [f"**{line}**\n" for line in warnings(shown)]
    lines += [verdict(shown.agreement()), ""]
    if shown.rank in LEARNED:
        lines += ["## Ranked by validation loss", "", best(shown), ""]
        meaning = RANK_LEGEND.format(rank=shown.rank, unit=LEARNED[shown.rank])
        lines += [*pipes(rank_rows(shown)), "", meaning, "", "## Speed and memory", ""]
    lines += [*pipes(main_rows(shown)), "", *legend(shown)]
    if shown.pictures:
        lines += ["", *(f"![{name.partition('.')[0]}]({name})\n" for name in shown.pictures)]
    for title, rows in (
        ("Where the seconds of a step go", part_rows(shown)),
        ("Predicted by the plan, and measured", prediction_rows(shown)),
        ("Losses", loss_rows(shown)),
        ("Numbers that the engine adds, medians over steps", scalar_rows(shown)),
        ("Communication of a step, MiB as rank 0 sees it", communication_rows(shown)),
        ("What differs", difference_rows(shown)),
        ("Runs", run_rows(shown)),
    ):
        if len(rows) > 1:
            lines += ["", f"## {title}", "", *pipes(rows)]
    return "\n".join(lines) + "\n"


def terminal(shown: Comparison) -> str:
    """Return the main table, the verdict on the losses and all warnings, for the terminal."""
    tables = [rank_rows(shown), main_rows(shown)] if shown.rank in LEARNED else [main_rows(shown)]
    lines = []
    for rows in tables:
        lines += [table([[plain(cell) for cell in row] for row in rows], indent=""), ""]
    if len(rows := prediction_rows(shown)) > 1:
        lines += ["predicted by the plan, and measured", table(rows, indent=""), ""]
    lines += [plain(best(shown))] if shown.rank in LEARNED else []
    lines += [plain(verdict(shown.agreement()))]
    return "\n".join([*lines, *(f"WARNING: {line}" for line in warnings(shown))])


def setting(shown: Comparison) -> list[str]:
    """Lines on what was trained and on which machine."""
    run = shown.base.runs[0]
    around = run.environment
    packages = around.get("packages") or {}
    device = around.get("gpu") or around.get("processor") or around.get("machine")
    ranks = run.layout["world"]
    first, last = run.summary["first_step"], run.summary["last_step"]
    rounds = max(run.round for run in shown.runs)
    commit = (around.get("commit") or "unknown")[:12]
    lines = [
        f"- {run.parameters:,} parameters, {run.knobs['precision']}, steps {first} to {last} of"
        f" {run.lines[-1]['tokens_per_step']:,} tokens, {counted(ranks, 'rank')}",
        f"- {device}, {around.get('cores')} cores, {around.get('threads')} per rank; torch"
        f" {around.get('torch')}, deepspeed {packages.get('deepspeed')}",
        f"- commit {commit}{' with uncommitted changes' * bool(around.get('uncommitted_changes'))}",
    ]
    if shown.is_sweep and len(shown.seeds) > 1:
        lines.append(f"- {counted(len(shown.seeds), 'seed')}, the same for every variant:"
                     f" {', '.join(map(str, shown.seeds))}")  # fmt: skip
    elif shown.is_sweep and shown.rank in LEARNED:
        lines.append("- 1 seed: another seed could change the order (SEEDS=3)")
    elif shown.is_sweep and rounds > 1:
        lines.append(
            f"- {counted(rounds, 'round')}; each round runs every variant once, so that a machine"
            " whose speed drifts slows all variants alike"
        )
    elif shown.is_sweep:
        lines.append(
            "- 1 round: a machine whose speed drifts looks like a difference between variants"
            " (REPEATS=3)"
        )
    if shown.loads:
        lines.append(
            f"- load average before the runs {min(shown.loads):.1f} to {max(shown.loads):.1f}"
        )
    return lines


def warnings(shown: Comparison) -> list[str]:
    """Warnings about everything that makes the numbers less reliable than they look."""
    found = []
    result = shown.agreement()
    if result and result.is_broken:
        found.append(
            f"LOSSES DO NOT AGREE: {result.largest:.2g} apart at step {result.at[0]} in"
            f" {result.at[1]}, where {result.bound:g} is the bound. The variants do not train the"
            " same model: find the reason before you use these speeds."
        )
    cores = shown.base.runs[0].environment.get("cores") or 1
    if shown.loads and max(shown.loads) > BUSY * cores:
        found.append(
            f"THE MACHINE WAS BUSY: load average up to {max(shown.loads):.1f} on {cores} cores"
            " before a run; other programs slowed some of these runs more than others"
        )
    work = [
        key
        for key in differing(shown.runs)
        if any(key == name or key.startswith(f"{name}.") for name in WORK)
    ]
    if work:
        found.append(
            f"NOT THE SAME WORK: {', '.join(work)} differ, so tokens/s do not compare layouts"
        )
    for name in surroundings(shown.runs):
        if name != "ranks":
            found.append(f"NOT THE SAME SURROUNDINGS: {name} differs between runs (What differs)")
    return found


def verdict(result: Agreement | None) -> str:
    """Sentence that says how far the losses agree."""
    if result is None:
        return "Losses: one run, nothing to compare."
    if result.reason is not None:
        return f"Losses are not compared: {result.reason}."
    size = f"{result.largest:.2g} over {counted(result.steps, 'step')}"
    if result.bound is None:
        return f"Losses: the largest relative difference is {size} (no bound outside fp32)."
    if result.is_broken:
        return f"**Losses do NOT agree**: the largest relative difference is {size}."
    data = "the batches are the same" if result.same_data else "THE BATCHES ARE NOT THE SAME"
    return (
        f"Losses agree: the largest relative difference is {size} (bound {result.bound:g}, fp32);"
        f" {data} (ledger)."
    )


def best(shown: Comparison) -> str:
    """Sentence on the best variant, and on those that are not distinguishable from it."""
    order = shown.ranked()
    if not order:
        return "No run was evaluated."
    if math.isinf(order[0].mean):
        return "**No variant has a finite validation loss.**"
    loss = f"{order[0].mean:.4f} {LEARNED[shown.rank]}"
    text = f"Best: `{order[0].side.label}` with a validation loss of {loss}."
    if len(order) == 1:
        return text
    if order[1].is_distinguishable is None:
        return f"{text} One seed: it is not known whether the differences are more than chance."
    close = [f"`{one.side.label}`" for one in order[1:] if one.is_distinguishable is False]
    if not close:
        return f"{text} Its differences to all others are larger than the spread over seeds."
    return (
        f"{text} NOT DISTINGUISHABLE from it, because the difference is not larger than the spread"
        f" over seeds: {', '.join(close)}."
    )


def rank_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of variants in the order of validation loss; failed variants come last."""
    order = shown.ranked()
    rows = [
        ["variant", "place", shown.rank, "lowest to highest seed", "to the best", "distinguishable"]
    ]
    answers = {True: "yes", False: "NO", None: NONE}
    for place, one_side in enumerate(order, start=1):
        is_best = place == 1
        finite = [loss for loss in one_side.losses if math.isfinite(loss)]
        rows.append([
            f"`{one_side.side.label}`", str(place),
            f"{one_side.mean:.4f}" if math.isfinite(one_side.mean) else "not finite",
            f"{min(finite):.4f} to {max(finite):.4f}" if len(finite) > 1 else NONE,
            NONE if is_best or math.isinf(one_side.mean) else f"+{one_side.difference:.4f}",
            NONE if is_best else answers[one_side.is_distinguishable],
        ])  # fmt: skip
    found = {one_side.side.label for one_side in order}
    rows += [
        [f"`{side.label}`", NONE, f"failed: {cell(side.reason)}" if not side.runs else NONE,
         *[NONE] * 3]
        for side in shown.sides if side.label not in found
    ]  # fmt: skip
    return rows


def main_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the main table: a header, then one row for each side."""
    has_mfu = any(side.median("mfu") is not None for side in shown.sides)
    has_bytes = any(side.communication_bytes() for side in shown.sides)
    has_state = any(side.median("state_gib") is not None for side in shown.sides)
    memory = "device" if any(r.summary["memory_of"] == "device" for r in shown.runs) else "host"
    header = [
        "variant" if shown.is_sweep else "run", "tokens/s", f"x `{shown.base.label}`",
        *(["MFU"] if has_mfu else []), "s/step",
        *(["state GiB of a rank"] if has_state else []),
        f"peak {memory} GiB of a rank", *(["sent, MiB/step"] if has_bytes else []),
    ]  # fmt: skip
    rows = [header]
    for side in shown.sides:
        if not side.runs:
            empty = [""] * (len(header) - 2)
            rows.append([f"`{side.label}`", f"failed: {cell(side.reason)}", *empty])
            continue
        bytes_ = side.communication_bytes()
        rows.append([
            f"`{side.label}`",
            spread(side.quartiles("tokens_per_s"), ",.0f"),
            ratio(side, shown),
            *([one(side.median("mfu"), ".1%")] if has_mfu else []),
            one(side.median("step_s"), ".4g"),
            *([one(side.median("state_gib"), ".3f")] if has_state else []),
            between(side.peaks_gib()),
            *([one(sum(bytes_.values()) / MIB if bytes_ else None, ",.4g")] if has_bytes else []),
        ])  # fmt: skip
    return rows


def legend(shown: Comparison) -> list[str]:
    """Text that explains the columns of the main table."""
    lines = [
        "Medians over the steps of all runs of a variant, quartiles in brackets; the first step of"
        " a run, evaluation and saves are part of no number. tokens/s is over all ranks.",
        f"x = tokens/s relative to `{shown.base.label}` in the same round: median, lowest and"
        " highest round in brackets." if shown.is_sweep else
        f"x = tokens/s relative to `{shown.base.label}`.",
        "Seconds are those of rank 0. Peak memory: the rank with the highest peak, and the lowest"
        " where it differs; host memory includes Python and its libraries.",
    ]  # fmt: skip
    if any(side.median("state_gib") is not None for side in shown.sides):
        lines.append("state = weights, gradients and optimizer, which ZeRO shares between ranks.")
    if any(side.communication_bytes() for side in shown.sides):
        lines.append("sent = counted payload of all collectives of a step on rank 0.")
    if not any(side.median("mfu") is not None for side in shown.sides):
        lines.append(
            "MFU: not known, because the peak of the device is not known (cluster.peak_tflops sets"
            " it)."
        )
    return [" ".join(lines)]


def part_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of seconds of a step and of its parts."""
    rows = [["", "step", *(title for _, title in PARTS)]]
    for side in shown.sides:
        if side.runs:
            parts = [one(side.median(name), ".4f") for name, _ in PARTS]
            rows.append([f"`{side.label}`", spread(side.quartiles("step_s"), ".4f"), *parts])
    return rows


def prediction_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of what the plan predicted for the first run of each side."""
    rows = [["", "term", "predicted", "measured", "difference"]]
    for side in shown.sides:
        for run in side.runs[:1]:
            for row in comparison(run.predicted, run.measured):
                rows.append([side.label, *row])
    return rows


def loss_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of losses: each side's first run at five steps, the largest difference."""
    result = shown.agreement()
    if result is None:
        return []
    steps = sorted(set.intersection(*(set(run.losses) for run in shown.runs)))
    picked = sorted({steps[round(i * (len(steps) - 1) / 4)] for i in range(5)}) if steps else []
    rows = [["", *(f"step {step}" for step in picked), "largest difference"]]
    for side in shown.sides:
        if side.runs:
            losses = side.runs[0].losses
            gap = "not compared" if result.reason else f"{result.by_side[side.label]:.2g}"
            rows.append([f"`{side.label}`", *(one(losses[s], ".6f") for s in picked), gap])
    return rows


def scalar_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of numbers that the engine adds to a step (StepResult.scalars)."""
    found = {side.label: side.extra_scalars() for side in shown.sides}
    names = sorted({name for numbers in found.values() for name in numbers})
    return [["", *names]] + [
        [f"`{label}`", *(one(numbers.get(name), ".6g") for name in names)]
        for label, numbers in found.items()
        if numbers
    ]


def communication_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of payload by kind of collective."""
    sent = {side.label: side.communication_bytes() for side in shown.sides}
    kinds = sorted({kind for bytes_ in sent.values() for kind in bytes_})
    if not kinds:
        return []
    return [["", *kinds]] + [
        [f"`{label}`", *(payload(bytes_.get(k)) for k in kinds)]
        for label, bytes_ in sent.items()
        if bytes_
    ]


def difference_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of knobs and surroundings that differ, one column for each side."""
    firsts = [(side.label, side.runs[0]) for side in shown.sides if side.runs]
    runs = [run for _, run in firsts]
    found = {**differing(runs), **surroundings(runs)}
    within = dict.fromkeys(surroundings(shown.runs), "differs between rounds")
    rows = [["", *(f"`{label}`" for label, _ in firsts)]]
    rows += [[name, *(cell(value) for value in values)] for name, values in found.items()]
    return rows + [
        [name, *[text] * len(firsts)] for name, text in within.items() if name not in found
    ]


def run_rows(shown: Comparison) -> list[list[str]]:
    """Rows of the table of single runs, with the numbers that `make pretrain` printed."""
    rows = [["run", "tokens/s", "s/step", "steps counted", "peak GiB by rank", "last loss"]]
    for run in shown.runs:
        s = run.summary
        three = (s["tokens_per_s_p25"], s["tokens_per_s"], s["tokens_per_s_p75"])
        peaks = run.peaks_gib or [s["peak_memory_gib"]]
        rows.append([
            run.name, spread(three, ",.0f"), one(s["step_s"], ".4g"), str(s["num_steady_steps"]),
            between(peaks) if len(peaks) > 8 else ", ".join(one(peak, ".3f") for peak in peaks),
            one(s["last_loss"], ".6f"),
        ])  # fmt: skip
    return rows


def ratio(side: Side, shown: Comparison) -> str:
    """Speed relative to the base, with the range over the rounds where there are several."""
    three = ratios(side, shown.base)
    if side is shown.base or three is None:
        return "1" if side is shown.base else NONE
    if three[0] == three[2]:
        return f"{three[1]:.3f}"
    return f"{three[1]:.3f} [{three[0]:.3f} to {three[2]:.3f}]"


def spread(three: Sequence[float | None], form: str) -> str:
    """Text of a median with its quartiles in brackets."""
    first, middle, third = three
    if middle is None:
        return NONE
    return f"{middle:{form}} [{first:{form}} to {third:{form}}]"


def between(values: Sequence[float | None]) -> str:
    """Text of the highest value, and of the lowest where it differs."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    high, low = f"{max(known):.3f}", f"{min(known):.3f}"
    return high if high == low else f"{high} (lowest {low})"


def one(value: float | None, form: str) -> str:
    """Text of a number, or a dash where it is not known."""
    return NONE if value is None else format(value, form)


def payload(size: float | None) -> str:
    """Text of a size in MiB, or in bytes where it is below a thousandth of a MiB."""
    if size is None or size >= MIB / 1000:
        return one(None if size is None else size / MIB, ",.4g")
    return f"{size:.0f} bytes"


def cell(value: Any) -> str:
    """Text of any value for a cell of a Markdown table."""
    text = value if isinstance(value, str) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def plain(text: str) -> str:
    """Remove Markdown's emphasis, for the terminal."""
    return text.replace("**", "").replace("`", "")


def pipes(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is its header, numbers are aligned right."""
    align: Callable[[int], str] = lambda column: "---" if column == 0 else "---:"  # noqa: E731
    line = "|".join(align(column) for column in range(len(rows[0])))
    return [f"| {' | '.join(rows[0])} |", f"|{line}|",
            *(f"| {' | '.join(row)} |" for row in rows[1:])]  # fmt: skip
