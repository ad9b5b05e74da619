"""Runs of this site as rows of the validation: `make plan-check RUNS="a b"`.

    runs/<run>/ recipe.yaml, layout.json, metrics.jsonl  ->  PublishedRun, as of a published table

Rule: the prediction is made anew by today's code for the layout that was trained, and what was
measured comes from the run's record. Units: tokens per second and GPU, GiB.
"""

from __future__ import annotations

import json
from pathlib import Path

from base.errors import UserError
from plan.published_rows import PublishedRun
from plan.recipe_jobs import machine_for
from plan.search import option_of
from recipes.compose import compose
from record.predictions import measured

FAMILY = "own runs"


def own_runs(folders: list[Path]) -> tuple[list[PublishedRun], dict[str, int]]:
    """The runs that can be predicted, and reason -> number of those that cannot.

    Raises UserError where a folder holds no run.
    """
    missing = [folder.name for folder in folders if not (folder / "recipe.yaml").is_file()]
    if missing:
        raise UserError(*(f"RUNS: there is no run {name} under runs/" for name in missing))
    found, refused = [], {}
    for folder in folders:
        run = own_run(folder)
        if isinstance(run, str):
            refused[run] = refused.get(run, 0) + 1
        else:
            found.append(run)
    return found, refused


def own_run(folder: Path) -> PublishedRun | str:
    """One run, or why it cannot be compared."""
    try:
        recipe = compose(str(folder / "recipe.yaml")).recipe
        layout = json.loads((folder / "layout.json").read_text())
        machine, _ = machine_for(recipe)
        option = option_of(recipe, layout["world"], layout["stage"], machine)
        real = measured(folder)
    except UserError as error:
        return f"{folder.name}: {error.problems[0]}"
    except (OSError, ValueError, KeyError, IndexError) as error:
        return f"{folder.name}: its record cannot be read: {error!r}"
    if "tokens_per_s" not in real:
        return f"{folder.name}: no step after the first is on record"
    return PublishedRun(
        family=FAMILY,
        label=f"{folder.name}: {option.knobs}",
        framework=option.job.engine.name,
        job=option.job,
        machine=machine,
        tokens_per_s=real["tokens_per_s"] / layout["world"],
        memory_gib=real.get("peak_memory_gib"),
        notes={"source": folder.name, "model": str(recipe.model)},
    )
