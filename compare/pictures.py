"""Draws the pictures of a report: speed, time, memory and communication of the variants; losses.

Rule: a picture shows the numbers of the report's tables and no others. PNG files, drawn without a
display.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported: no display is needed

from matplotlib import pyplot as plt

from base.units import MIB
from compare.ranking import LEARNED, curve
from compare.report import PARTS, Comparison
from compare.results import SAME_LOSS, Side, bases_by_seed, difference, differing

SPEED, LOSSES, VALIDATION = "speed.png", "losses.png", "validation.png"
BLUE, WHISKER, DOT = "#4477aa", "#222222", "#ee6677"
PART_COLORS = ("#4477aa", "#ee6677", "#ccbb44", "#bbbbbb")
# Easy to tell apart, also for color-blind readers (Paul Tol's bright scheme).
LINES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#222222")
DOTS_PER_INCH, WIDTH = 110, 13.0  # inches
LABEL_WIDTH, LABEL_LINES = 34, 3  # characters, lines
TITLE = dict(loc="left", fontsize=10)
SMALLEST_SHARE = 1e-4


def draw(shown: Comparison, folder: Path) -> tuple[str, ...]:
    """Draw the pictures into `folder`; returns their file names."""
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        drawn = {SPEED: speed(shown)}
        if len(shown.runs) > 1:
            drawn[LOSSES] = losses(shown)
        if shown.ranked():
            drawn = {VALIDATION: validation(shown), **drawn}
        for name, figure in drawn.items():
            figure.savefig(folder / name, dpi=DOTS_PER_INCH)
            plt.close(figure)
    return tuple(drawn)


def speed(shown: Comparison) -> Any:
    """Figure of four bar charts: tokens/s, parts of a step, peak memory, communication."""
    sides = [side for side in shown.sides if side.runs]
    has_bytes = any(side.communication_bytes() for side in sides)
    height = 2 * (1.5 + 0.42 * len(shown.sides))
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(shown.name, fontsize=13)
    throughput(axes[0][0], shown.sides)
    step_parts(axes[0][1], shown.sides)
    memory(axes[1][0], shown.sides)
    if has_bytes:
        communication(axes[1][1], shown.sides)
    else:
        axes[1][1].set_axis_off()
    for panel in axes.flat:
        is_left = panel in axes[:, 0]
        names = [label(side) if is_left else "" for side in shown.sides]
        panel.set_yticks(range(len(shown.sides)), names)
        panel.set_ylim(len(shown.sides) - 0.5, -0.5)  # the first variant on top
        panel.set_xlim(0, 1.12 * panel.get_xlim()[1])  # room for the number beside the longest bar
        panel.xaxis.grid(True, color="#dddddd")
        panel.set_axisbelow(True)
    return figure


def label(side: Side) -> str:
    """Name of a variant, wrapped for an axis."""
    text = side.label if side.runs else f"{side.label} (failed)"
    return "\n".join(textwrap.wrap(text, LABEL_WIDTH, max_lines=LABEL_LINES))


def validation(shown: Comparison) -> Any:
    """Figure of two charts: validation loss over steps, and at the end of each variant."""
    order = shown.ranked()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(WIDTH, 5.5), layout="constrained", width_ratios=(3, 2)
    )
    sides = [side for side in shown.sides if side.runs]
    colors = {side.label: LINES[number % len(LINES)] for number, side in enumerate(sides)}
    for side in sides:
        points = curve(side, shown.rank)
        steps = sorted(points)
        means = [statistics.mean(points[step]) for step in steps]
        left.plot(steps, means, ".-", color=colors[side.label], label=label(side))
        lows, highs = ([pick(points[step]) for step in steps] for pick in (min, max))
        left.fill_between(steps, lows, highs, color=colors[side.label], alpha=0.2, linewidth=0)
    left.set_title(f"{shown.name}: validation loss (line: mean, band: all seeds)", **TITLE)
    left.set_xlabel("step")
    left.set_ylabel(f"loss, {LEARNED[shown.rank]}")
    left.legend(fontsize=9, frameon=False)
    # The end of each variant, over the swept value where it is one number.
    places, name = swept_numbers(sides)
    for number, one in enumerate(sorted(order, key=lambda one: sides.index(one.side))):
        own = [loss for loss in one.losses if math.isfinite(loss)]
        place = places.get(one.side.label, number)
        right.plot([place] * len(own), own, "o", color=colors[one.side.label], markersize=6)
    finite = [one for one in order if math.isfinite(one.mean)]
    if places:
        line = sorted((places[one.side.label], one.mean) for one in finite)
        right.plot([x for x, _ in line], [y for _, y in line], color=WHISKER, linewidth=1)
        numbers = places.values()
        if min(numbers) > 0 and max(numbers) >= 4 * min(numbers):
            right.set_xscale("log")
        right.set_xlabel(name)
    else:
        right.set_xticks(range(len(sides)), [label(side) for side in sides], rotation=20)
    right.set_title("At the end (dots: seeds)", **TITLE)
    for panel in (left, right):
        panel.grid(True, color="#dddddd")
    return figure


def swept_numbers(sides: Sequence[Side]) -> tuple[dict[str, float], str]:
    """Value of the only swept knob by label, and its name; empty where it is no number."""
    swept = differing([side.runs[0] for side in sides])
    if len(swept) != 1:
        return {}, ""
    [(name, values)] = swept.items()
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return {}, ""
    return {side.label: float(v) for side, v in zip(sides, values, strict=True)}, name


def throughput(panel: Any, sides: list[Side]) -> None:
    """Draw tokens/s with quartiles, and the median of each run as a dot."""
    for row, side in enumerate(sides):
        low, middle, high = side.quartiles("tokens_per_s")
        if middle is None:
            continue
        panel.barh(row, middle, 0.6, color=BLUE)
        panel.plot([low, high], [row, row], color=WHISKER, linewidth=2)
        medians = [run.summary["tokens_per_s"] for run in side.runs]
        if len(medians) > 1:
            panel.plot(medians, [row] * len(medians), "o", color=DOT, markersize=4)
        panel.text(max(high, *medians), row, f"   {middle:,.0f}", va="center")
    panel.set_title("Throughput: median, quartiles (line), each run (dots)", **TITLE)
    panel.set_xlabel("tokens/s over all ranks")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def step_parts(panel: Any, sides: list[Side]) -> None:
    """Draw the seconds of each part of a step as stacked bars."""
    parts = {title: [side.median(name) or 0.0 for side in sides] for name, title in PARTS}
    stacked(panel, parts, PART_COLORS)
    panel.set_title("Where a step's time goes", **TITLE)
    panel.set_xlabel("seconds per step (medians of rank 0)")


def memory(panel: Any, sides: list[Side]) -> None:
    """Draw the peak memory of each variant's rank with the highest peak."""
    kinds = {run.summary["memory_of"] for side in sides for run in side.runs}
    for row, side in enumerate(sides):
        known = [peak for peak in side.peaks_gib() if peak is not None]
        if known:
            panel.barh(row, max(known), 0.6, color=BLUE)
            panel.text(max(known), row, f"  {max(known):.3f}", va="center")
    panel.set_title("Peak memory of the rank with the highest peak", **TITLE)
    panel.set_xlabel(f"GiB of {' and '.join(sorted(kinds))} memory")


def communication(panel: Any, sides: list[Side]) -> None:
    """Draw the payload of a step's collectives as stacked bars, one part for each kind."""
    sent = [side.communication_bytes() for side in sides]
    sizes = {kind: sum(one.get(kind, 0) for one in sent) for one in sent for kind in one}
    # Kinds that send almost nothing, such as a loss of four bytes, get no entry in the legend.
    kinds = [kind for kind in sorted(sizes) if sizes[kind] > SMALLEST_SHARE * sum(sizes.values())]
    parts = {kind: [one.get(kind, 0) / MIB for one in sent] for kind in kinds}
    stacked(panel, parts, LINES)
    for row, one in enumerate(sent):
        if one:
            panel.text(
                sum(one.values()) / MIB, row, f"  {sum(one.values()) / MIB:,.4g}", va="center"
            )
    panel.set_title("Counted payload of a step's collectives", **TITLE)
    panel.set_xlabel("MiB per step as rank 0 sees them")


def stacked(panel: Any, parts: dict[str, list[float]], colors: Sequence[str]) -> None:
    """Draw horizontal stacked bars, with the legend beside the title."""
    for (title, sizes), color in zip(parts.items(), itertools.cycle(colors), strict=False):
        before = [
            sum(values)
            for values in zip(*list(parts.values())[: list(parts).index(title)], strict=True)
        ]
        panel.barh(range(len(sizes)), sizes, 0.6, left=before or 0.0, color=color, label=title)
    if parts:
        panel.legend(
            ncols=4, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.02, 0.98),
            borderpad=0.3, columnspacing=1.0, handlelength=1.2,
        )  # fmt: skip


def losses(shown: Comparison) -> Any:
    """Figure of two charts: loss curves, and their difference from the base below."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH, 7.5), layout="constrained", sharex=True
    )
    first, bases = shown.base.runs[0], bases_by_seed(shown.sides)
    base = first.losses
    sides = [side for side in shown.sides if side.runs]
    result = shown.agreement()
    for number, side in enumerate(sides):
        # Later lines are thinner: where losses agree, every color stays visible.
        style = dict(color=LINES[number % len(LINES)], linewidth=max(1.2, 5 - 1.2 * number))
        own = side.runs[0].losses
        steps = [step for step, loss in own.items() if loss is not None]
        above.plot(steps, [own[step] for step in steps], label=side.label, **style)
        gaps = {
            step: max(
                difference(bases.get(run.knobs["seed"], first).losses.get(step), run.losses[step])
                for run in side.runs
            )
            for step in base
            if all(step in run.losses for run in side.runs)
        }
        below.plot(list(gaps), list(gaps.values()), ".-", color=style["color"], label=side.label)
    above.set_title(f"{shown.name}: training loss", **TITLE)
    above.set_ylabel("loss, nats per token")
    below.set_title(f"Largest difference of a variant's runs to {shown.base.label}", **TITLE)
    below.set_ylabel("relative difference of losses")
    below.set_xlabel("step")
    below.xaxis.get_major_locator().set_params(integer=True)
    # Linear near zero, so that a difference of exactly 0 can be drawn.
    below.set_yscale("symlog", linthresh=1e-8)
    below.set_ylim(bottom=-2e-9)
    if result and result.reason is None and result.bound is not None:
        below.axhline(SAME_LOSS, color=WHISKER, linestyle="--", linewidth=1)
        below.text(below.get_xlim()[1], SAME_LOSS, f"bound {SAME_LOSS:g} ", ha="right", va="bottom")
        below.set_ylim(top=max(below.get_ylim()[1], 3 * SAME_LOSS))
    for panel in (above, below):
        panel.grid(True, color="#dddddd")
    above.legend(fontsize=9, frameon=False, ncols=1 + len(sides) // 8)
    return figure
