"""Whether a run goes on, and from where: what its folder holds against what is asked for now.

    no folder -> new     folder without a checkpoint -> from step 0 again     checkpoint -> go on

The one rule: a run that has a checkpoint never starts at step 0 unless resume=fresh asks for it.
Pure reading, no torch: the launcher refuses by it before any rank starts, and rank 0 decides by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.blocks import Damaged
from checkpoint.manifest import committed, read_manifest
from checkpoint.resume import Change, check_resume
from recipes.schema import Recipe, UserError

# What makes a folder under runs/ a run of ours.
MARK = "recipe.yaml"


@dataclass(frozen=True)
class Standing:
    """Where a run stands before it starts. `step` 0 = nothing to go on from."""

    is_new: bool
    step: int
    changes: list[Change]


def standing(
    folder: Path,
    recipe: Recipe,
    data_state: dict[str, Any],
    past: Callable[[int], dict[str, Any]],
) -> Standing:
    """What `folder` says about starting `recipe`; `data_state` and `past` are its stream's.

    Raises UserError: a folder of something else, a change that is not allowed.
    """
    if not folder.exists() or recipe.resume == "fresh":
        return Standing(True, 0, [])
    if not (folder / MARK).is_file():
        raise UserError(
            f"run={folder.name}: {folder} is not the folder of a run (no {MARK}); choose another"
            " name, or remove it"
        )
    state = newest_state(folder)
    if state is None:
        return Standing(False, 0, [])
    return Standing(False, state["step"], compare(state, recipe, data_state, past))


def newest_state(folder: Path) -> dict[str, Any] | None:
    """State of the newest checkpoint whose manifest can be read; None where there is none."""
    for _, path in reversed(committed(folder / "checkpoints")):
        try:
            return read_manifest(path).state
        except Damaged:
            continue  # said aloud when it is loaded
    return None


def compare(
    state: dict[str, Any],
    recipe: Recipe,
    data_state: dict[str, Any],
    past: Callable[[int], dict[str, Any]],
) -> list[Change]:
    """Differences between a checkpoint's recipe and data and those of now.

    Raises UserError with every one that is not allowed.
    """
    stored = state["recipe"] | {"identity": identity(state["data"])}
    now = dataclasses.asdict(recipe) | {"identity": identity(data_state, state["data"]["corpora"])}
    verdict = check_resume(stored, now, recipe.allow)
    problems = [*verdict.problems, *changed_past(state, recipe, past(state["step"]))]
    if problems:
        raise UserError(*(f"run={recipe.run}: {line}" for line in problems))
    return verdict.changes


def changed_past(state: dict[str, Any], recipe: Recipe, past: dict[str, Any]) -> list[str]:
    """What the recipe of now would change of the steps that were trained, which are past."""
    step, was = state["step"], state["data"]["past"]
    data_step = was["data_step"]
    problems = []
    if past["tokens"] != was["tokens"]:
        problems.append(
            f"batch_tokens={recipe.batch_tokens} would put step {step} at {past['tokens']}"
            f" tokens, but {was['tokens']} were trained on: samples would be left out or repeated."
            f" Keep the past in a ramp, such as batch_tokens=[[0,OLD],[{data_step},NEW]]"
        )
    if past["mixture"] != was["mixture"]:
        problems.append(
            f"data.sources: these weights would have mixed steps 1 to {step} in another way. Keep"
            f" the past as a stage, such as data.sources.NAME.weight=[[0,OLD],[{data_step},NEW]]"
        )
    if past["skips"] != was["skips"]:
        problems.append(
            f"data.skip would change what steps 1 to {step} trained on, which is done: keep the"
            f" ranges that were in force, and let new ones begin at data step {data_step} or later"
        )
    return problems


def identity(data_state: dict[str, Any], known: Iterable[str] | None = None) -> dict[str, Any]:
    """What of the data is fixed for a run: which corpora, and the version of their order.

    `known`: names that a checkpoint has; a source beside them is new, which is a matter of weights.
    """
    corpora = data_state["corpora"]
    if known is not None:
        corpora = {uid: corpus for uid, corpus in corpora.items() if uid in known}
    return {"order_version": data_state["order_version"], "corpora": corpora}
