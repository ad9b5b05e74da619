"""Predicted speed of 7b and 70b from 8 to 4,096 GPUs, beside published runs of such sizes.

    weak scaling: as many tokens per GPU and step     strong scaling: the recipe's own batch

Rule: each point is the best layout that fits at that number of GPUs, as `make plan` chooses it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from plan.drawings import draw_curves
from plan.machine import PUBLISHED
from plan.published_rows import read, usable
from plan.recipe_jobs import machine_for
from plan.search import search
from recipes.compose import compose

COUNTS = tuple(2**power for power in range(3, 13))
WEAK_SEQUENCES = {"7b": 8, "70b": 2}  # per GPU and step, as published runs have
LIKE = {"7b": r"(MPT-7b|Llama-\S*-?[78]B)$", "70b": r"Llama-\S*-?70B$|MPT-70b$"}

Points = list[tuple[int, float]]


def curve(name: str, is_weak: bool, counts: Sequence[int] = COUNTS) -> Points:
    """(GPUs, tokens/s per GPU) of a recipe on H100s, where a layout fits."""
    recipe = compose(name, ["cluster=h100"]).recipe
    machine, _ = machine_for(recipe)
    points = []
    for world in counts:
        tokens = WEAK_SEQUENCES[name] * recipe.seq_len * world if is_weak else recipe.batch_tokens
        winner = search(dataclasses.replace(recipe, batch_tokens=tokens), world, machine).winner
        if winner is not None:
            points.append((world, winner.tokens_per_s / world))
    return points


def published(name: str) -> Points:
    """(GPUs, tokens/s per GPU) of published runs of about the size, on H100 SXM."""
    runs, _ = usable(read(PUBLISHED / "throughput.csv"))
    return [
        (run.job.world, run.tokens_per_s)
        for run in runs
        if re.search(LIKE[name], run.notes["model"])
        and run.machine.gpu == "H100-SXM"
        and run.job.seq_len in (2048, 4096, 8192)
    ]


def draw_scaling(path: Path) -> None:
    """The picture of docs/planning.md."""
    curves = {
        f"{name} {'weak' if is_weak else 'strong'}": curve(name, is_weak)
        for name in ("7b", "70b")
        for is_weak in (True, False)
    }
    dots = {f"{name} published": published(name) for name in ("7b", "70b")}
    draw_curves("tokens/s per GPU on H100: lines predicted, dots published", curves, dots, path)
