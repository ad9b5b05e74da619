"""Pictures of the planner as SVG text: a plan, predicted against measured, scaling curves.

Rule: no library draws, so a picture needs nothing that a checkout lacks and is the same text on
every machine. Units: pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from base.units import GIB
from plan.memory_use import memory_of_stages
from plan.search import Option

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#222255",
           "#225555", "#cc6600", "#777777")  # fmt: skip
MEMORY = ("weights", "gradients", "optimizer", "buffers", "activations", "logits")


class Canvas:
    """Shapes, one after the other, then one SVG text."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.shapes = [f'<rect width="{width}" height="{height}" fill="white"/>']

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
            f' fill="{colour}"/>'
        )

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> None:
        """A line of text; `anchor` is start, middle or end."""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-family="sans-serif"'
            f' text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> None:
        """Straight lines from point to point."""
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(
            f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="1.5"{style}/>'
        )

    def dot(self, x: float, y: float, colour: str, label: str = "", radius: float = 3) -> None:
        """A dot, with a label that browsers show under the mouse."""
        title = f"<title>{escape(label)}</title>" if label else ""
        self.shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"'
            f' fill-opacity="0.6">{title}</circle>'
        )

    def write(self, path: Path) -> None:
        """The file."""
        shapes = "\n".join(self.shapes)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}"'
            f' viewBox="0 0 {self.width} {self.height}">\n{shapes}\n</svg>\n'
        )


def draw_plan(option: Option, path: Path) -> None:
    """Memory of the stages as bars against the card, and the step as one stacked bar."""
    stages = memory_of_stages(option.job)
    if len(stages) > 8:
        stages = [*stages[:4], *stages[-4:]]
    height = 150 + 26 * len(stages) + 150
    canvas, left, wide = Canvas(860, height), 90, 640
    canvas.text(10, 20, f"{option.recipe.run or 'recipe'}: {option.knobs}", size=13)
    canvas.text(
        10, 44, f"memory of a rank, GiB ({option.machine.gpu}: {option.machine.memory_gib:g})"
    )
    usable = option.machine.usable_bytes
    scale = wide / max(usable, *(stage.peak for stage in stages))
    y = 54
    for index, stage in enumerate(stages):
        canvas.text(10, y + 15, f"stage {index}" if len(stages) > 1 else "every rank")
        x = float(left)
        for name, colour in zip(MEMORY, COLOURS, strict=False):
            part = getattr(stage, name) * scale
            canvas.rect(x, y, part, 20, colour)
            x += part
        canvas.text(x + 6, y + 15, f"{stage.peak / GIB:.1f}")
        y += 26
    canvas.line([(left + usable * scale, 50), (left + usable * scale, y)], "#cc0000", "4 3")
    legend(canvas, left, y + 16, MEMORY)
    y += 50
    canvas.text(10, y, f"one step: {option.time.total:.3f} s")
    x = float(left)
    terms = [name for name in option.time.__dataclass_fields__
             if getattr(option.time, name) > 5e-3 * option.time.total]  # fmt: skip
    for name, colour in zip(terms, COLOURS, strict=False):
        part = wide * getattr(option.time, name) / option.time.total
        canvas.rect(x, y + 10, part, 24, colour)
        x += part
    legend(canvas, left, y + 54, terms)
    canvas.write(path)


def legend(canvas: Canvas, left: float, y: float, names: Sequence[str]) -> None:
    """Coloured squares with names, four in a row."""
    for index, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        x, row = left + 165 * (index % 4), y + 18 * (index // 4)
        canvas.rect(x, row - 10, 11, 11, colour)
        canvas.text(x + 16, row, name.replace("_", "-"))


def draw_scatter(tests, path: Path) -> None:
    """Predicted against measured tokens/s per GPU, one colour for each family."""
    canvas, left, size = Canvas(760, 640), 70, 540
    values = [v for test in tests for v in (test.predicted, test.run.tokens_per_s)]
    place = log_scale(min(values), max(values), size)
    low, high = min(values), max(values)
    for factor, dash in ((1.0, ""), (1.1, "4 3"), (1 / 1.1, "4 3")):
        points = [(left + place(v), 20 + size - place(v * factor)) for v in (low, high)]
        canvas.line(points, "#999999", dash)
    families = sorted({test.run.family for test in tests})
    colours = dict(zip(families, COLOURS, strict=False))
    for test in tests:
        canvas.dot(
            left + place(test.run.tokens_per_s),
            20 + size - place(test.predicted),
            colours.get(test.run.family, "#000000"),
            f"{test.run.label}: {test.error:+.1%}",
        )
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        if low <= 10**power <= high:
            canvas.text(left + place(10**power), 20 + size + 18, f"{10**power:g}", "middle")
            canvas.text(left - 8, 24 + size - place(10**power), f"{10**power:g}", "end")
    canvas.text(left + size / 2, 20 + size + 38, "measured tokens/s per GPU", "middle")
    canvas.text(left, 14, "predicted tokens/s per GPU (dashed: 10 %)")
    legend(canvas, left, 20 + size + 58, families)
    canvas.write(path)


def log_scale(low: float, high: float, size: float):
    """Value -> pixels from the lower end, logarithmic."""
    span = math.log(high / low) or 1.0
    return lambda value: size * math.log(value / low) / span


def draw_curves(title: str, curves: dict[str, list[tuple[int, float]]],
                dots: dict[str, list[tuple[int, float]]], path: Path) -> None:  # fmt: skip
    """tokens/s per GPU over the number of GPUs: lines are predicted, dots are published."""
    canvas, left, wide, tall = Canvas(860, 520), 80, 700, 360
    points = [point for group in (*curves.values(), *dots.values()) for point in group]
    across = log_scale(min(n for n, _ in points), max(n for n, _ in points), wide)
    up = log_scale(min(v for _, v in points) / 1.1, max(v for _, v in points) * 1.1, tall)
    canvas.text(10, 18, title, size=13)
    names = list(curves)
    for name, colour in zip(names, COLOURS, strict=False):
        line = [(left + across(n), 40 + tall - up(v)) for n, v in curves[name]]
        canvas.line(line, colour, "5 4" if "strong" in name else "")
    for name, colour in zip(dots, COLOURS[len(names) :], strict=False):
        for n, value in dots[name]:
            canvas.dot(
                left + across(n), 40 + tall - up(value), colour, f"{name}: {n}, {value:,.0f}", 4
            )
    for n in sorted({n for group in curves.values() for n, _ in group}):
        canvas.text(left + across(n), 40 + tall + 18, str(n), "middle", 10)
    for value in (100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000):
        y = 40 + tall - up(value)
        if 40 <= y <= 40 + tall:
            canvas.text(left - 8, y + 4, f"{value:,}", "end", 10)
            canvas.line([(left, y), (left + wide, y)], "#eeeeee")
    canvas.text(left + wide / 2, 40 + tall + 36, "GPUs", "middle")
    legend(canvas, left, 40 + tall + 58, [*names, *dots])
    canvas.write(path)
