"""Writes a comparison for TensorBoard: one run for each variant, and one for the report.

    runs/<comparison>/tensorboard/<variant>/   curves, hyper-parameters, page of charts
    runs/<comparison>/tensorboard/report/      the report's text and pictures

Rule: every number is one that the runs recorded. A point of a variant's curve is the median over
its runs at that step; the columns of the hyper-parameters tab are the medians of the report.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

from base.units import MIB
from compare.ranking import LEARNED, ranked
from compare.report import Comparison, markdown
from compare.results import Side, differing, extra_scalars
from runtime.log.event_files import FAMILIES, SERIES, EventFiles

FOLDER, REPORT = "tensorboard", "report"
# Columns of the hyper-parameters tab: key of `numbers` -> (tag, title).
COLUMNS = {
    "tokens_per_s": ("result/tokens_per_s", "tokens/s, all ranks (median)"),
    "peak_memory_gib": ("result/peak_memory_gib", "peak memory of a rank, GiB"),
    "step_s": ("result/step_s", "s/step (median)"),
    "mfu": ("result/mfu", "MFU (median)"),
    "communication_mib": ("result/communication_mib", "sent by rank 0, MiB/step"),
    "val_loss": ("result/val_loss", "validation loss (last, mean of runs)"),
    "bits_per_byte": ("result/bits_per_byte", "bits per byte (last, mean of runs)"),
}
# Fields whose curves are equal for all variants, or repeat another curve: not drawn.
LEFT_OUT = (
    "attempt",
    "skipped_steps",
    "eval_s",
    "device_memory_gib",
    "host_memory_gib",
)


def write(shown: Comparison, folder: Path) -> None:
    """Write the event files of a comparison; those of an earlier report are removed."""
    place = folder / FOLDER
    shutil.rmtree(place, ignore_errors=True)
    swept = differing(side.runs[0] for side in shown.sides if side.runs)
    used: set[str] = set()
    for index, side in enumerate(side for side in shown.sides if side.runs):
        name = side.label.replace("/", "_").lstrip(".") or "variant"
        name = name if name not in used else f"{name} ({index})"
        used.add(name)
        values = {key.rpartition(".")[2]: given[index] for key, given in swept.items()}
        write_side(side, place / name, name, values, shown)
    report = EventFiles(place / REPORT, attempt=1, after_step=0)
    # TensorBoard shows no pictures inside a text; they are written to the Images tab below.
    report.text(0, f"{shown.name}/report", markdown(dataclasses.replace(shown, pictures=())))
    for name in shown.pictures:
        report.image(0, f"{shown.name}/{name.partition('.')[0]}", (folder / name).read_bytes())
    report.close()


def write_side(
    side: Side, folder: Path, name: str, values: dict[str, Any], shown: Comparison
) -> None:
    """Write one variant: its row of hyper-parameters and its curves."""
    found = numbers(side)
    columns = {
        field: column
        for field, column in COLUMNS.items()
        if any(numbers(other)[field] is not None for other in shown.sides if other.runs)
    }
    lines = curves(side)
    fields = {field for line in lines.values() for field in line}
    events = EventFiles(folder, attempt=1, after_step=0)
    events.page(without={*SERIES, *FAMILIES} - fields)
    ranks = {run.layout["world"] for run in shown.runs}
    if len(ranks) > 1:
        values = {**values, "ranks": side.runs[0].layout["world"]}
    plain = {key: value if isinstance(value, bool | float) else str(value)
             for key, value in values.items()}  # fmt: skip
    # TensorBoard merges sessions of one name into one row, even those of two comparisons. It shows
    # the first letters of a name, so what tells the variants apart comes first.
    events.hyper_parameters(plain, f"{name} ({shown.name})", columns)
    for step, line in lines.items():
        events.scalars(step, line)
    events.results(max(lines), found, columns)
    events.end_session(True)
    events.close()


def numbers(side: Side) -> dict[str, float | None]:
    """Values of one variant for the columns of the hyper-parameters tab."""
    peaks = [peak for peak in side.peaks_gib() if peak is not None]
    sent = side.communication_bytes()
    return {
        "tokens_per_s": side.median("tokens_per_s"),
        "mfu": side.median("mfu"),
        "step_s": side.median("step_s"),
        "peak_memory_gib": max(peaks, default=None),
        "communication_mib": sum(sent.values()) / MIB if sent else None,
        **{measure: last_mean(side, measure) for measure in LEARNED},
    }


def last_mean(side: Side, measure: str) -> float | None:
    """Mean over a variant's runs of the last validation loss; None where none is finite."""
    return next((one.mean for one in ranked([side], measure) if math.isfinite(one.mean)), None)


def curves(side: Side) -> dict[int, dict[str, Any]]:
    """Map each step to the values that TensorBoard draws: medians over the variant's runs.

    The times and the communication of the warm-up step are left out, because they are so large that
    they would set the scale of the charts. Its loss is drawn.
    """
    warm = ("tokens_per_s", "tokens_per_s_per_rank", "mfu", "communication_mib")
    by_step: dict[int, list[dict[str, Any]]] = {}
    for run in side.runs:
        for line in run.lines:
            by_step.setdefault(line["step"], []).append(line)
    drawn = {}
    for step, lines in sorted(by_step.items()):
        drawn[step] = {}
        for field in SERIES:
            if field in LEFT_OUT:
                continue
            is_speed = field.endswith("_s") or field in warm
            known = [
                line[field]
                for line in lines
                if line.get(field) is not None and not (is_speed and line["first_of_attempt"])
            ]
            if known:
                drawn[step][field] = statistics.median(known)
        extra = extra_scalars(lines)
        if extra:
            drawn[step]["scalars"] = extra
    return drawn
