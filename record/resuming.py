"""Decides whether a start continues a run, and from which step, or has to be refused.

    no folder -> new run    folder without a checkpoint -> from step 0    checkpoint -> go on

Rule: a run that has a checkpoint never starts at step 0 unless resume=fresh asks for it. This file
only reads, and imports no torch: the launcher refuses by it before any rank starts, and rank 0
decides by it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import UserError
from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import (
    Manifest,
    all_committed,
    none_is_whole,
    size_problems,
)
from checkpoint.format.state import RunState
from checkpoint.lineage import FILE, MARK, lineage_of, read, segments
from checkpoint.load.allowed_changes import RecipeChange, check_resume
from checkpoint.load.choosing import newest_whole
from recipes.compose import compose
from recipes.schema import Data, Recipe
from record.history import EFFECTS, data_with_skips, described, in_force, is_covered, recorded
from record.records import (
    EVENTS,
    EVENTS_HAVE,
    METRICS,
    METRICS_HAVE,
    damage,
    last_lines,
    read_events,
)


@dataclass(frozen=True)
class Standing:
    """The state of a run before a start. `step` 0 = there is no checkpoint to go on from."""

    is_new: bool
    step: int
    changes: list[RecipeChange]
    notes: list[str] = field(default_factory=list)  # warnings for the start


def data_of(recipe: Recipe, folder: Path) -> Data:
    """The data of a recipe with the skips in the history of the run in `folder` added."""
    if recipe.resume == "fresh":
        return recipe.data
    return data_with_skips(recipe.data, in_force(read(folder)))


def left_behind(recipe: Recipe, file: Path, folder: Path) -> list[str]:
    """A note for a recipe that is read from another run's folder, whose rewinds skip data.

    Those skips stand in the other run's history and not in its recipe. Empty where none is missing.
    """
    source = file.parent.resolve()
    if file.name != MARK or source == folder.resolve():
        return []
    missing = [
        skip
        for skip in in_force(read(source))
        if not is_covered(tuple(skip["range"]), getattr(recipe.data.skip, skip["effect"]))
    ]
    if not missing:
        return []
    data = data_with_skips(recipe.data, missing)
    return [
        f"{source.name} leaves out {'; '.join(described(skip) for skip in missing)}: that stands in"
        f" its history, not in its recipe, and this run trains on them. {' '.join(as_words(data))}"
        " leaves them out here, too; make branch and make reproduce take the history along"
    ]


def as_words(data: Data) -> list[str]:
    """Overrides that skip the same data as `data.skip`."""
    ranges = {effect: getattr(data.skip, effect) for effect in EFFECTS}
    return [
        f"data.skip.{effect}=" + json.dumps(some, separators=(",", ":"))
        for effect, some in ranges.items()
        if some
    ]


def standing(
    folder: Path,
    recipe: Recipe,
    data_state: dict[str, Any],
    past: Callable[[int], dict[str, Any]],
    last_step: int,
) -> Standing:
    """The standing of the run in `folder` for a start of `recipe`, which ends after `last_step`.

    `data_state` and `past` are those of the recipe's stream. Raises UserError for a folder that is
    no run's, and for changes that are not allowed.
    """
    if not folder.exists() or recipe.resume == "fresh":
        return Standing(True, 0, [])
    if not (folder / MARK).is_file():
        raise UserError(
            f"run={folder.name}: {folder} is not the folder of a run (no {MARK}); choose another"
            " name, or remove it"
        )
    refuse_lost_segments(folder)
    state = newest_state(folder, last_step)
    if state is None:
        return Standing(False, 0, [], another_training(folder, recipe))
    notes = [line for line in (foreign(folder, recipe, state),) if line]
    try:
        changes = compare(state, recipe, data_state, past, read(folder))
    except UserError as error:
        raise UserError(*notes, *error.problems) from None
    return Standing(False, state.step, changes, notes)


def another_training(folder: Path, recipe: Recipe) -> list[str]:
    """A note where the run in `folder` trained another model or other data, and saved nothing."""
    last = last_lines(folder / METRICS, 1, METRICS_HAVE)
    try:
        before = compose(str(folder / MARK)).recipe
    except UserError:  # not readable by this version: nothing is known
        return []
    if not last or what_is_trained(before) == what_is_trained(recipe):
        return []
    return [
        f"run={recipe.run}: this run holds another training, up to step {last[-1]['step']} and"
        " without a checkpoint. This start replaces it; to train beside it, add run=NAME"
    ]


def what_is_trained(recipe: Recipe) -> tuple[Any, ...]:
    """What makes two trainings different ones: shape, seed, and where the corpora are."""
    return recipe.model, recipe.seed, [one.corpus for one in recipe.data.sources.values()]


def foreign(folder: Path, recipe: Recipe, state: RunState) -> str | None:
    """Return a line about a checkpoint that another run has saved; None: this run has saved it.

    A renamed run, a branch and a replay also go on from a checkpoint with another run's name, but
    their own record contains it.
    """
    name = state.recipe.get("run")
    saves = {(event.get("segment", 0), event.get("step")) for event in read_events(folder, "saved")}
    is_recorded = (state.segment, state.step) in saves
    parents = {line["parent"].get("run") for line in segments(read(folder)) if line["parent"]}
    linked = {line.get("run") for line in read(folder) if line["kind"] == "linked"}
    if name in (None, recipe.run) or is_recorded or name in parents | linked:
        return None
    return (
        f"run={recipe.run}: the checkpoint of step {state.step} in {folder / 'checkpoints'} was"
        f" saved by another run, run={name}. If it was copied here by mistake, move it away; to"
        f" start from its weights, use init_from=runs/{name}@{state.step}; to continue that run"
        f" under a new name, use make branch RUN={name} STEP={state.step} TO=..."
    )


def refuse_lost_segments(folder: Path) -> None:
    """Raise UserError where a segment has checkpoints or steps, but no line in the history.

    Without that line the run would go on in another lineage, and train on data that was skipped.
    """
    known = len(segments(read(folder)))
    seen = [segment for _, segment, _ in all_committed(folder / "checkpoints")]
    seen += [line["segment"] for line in last_lines(folder / METRICS, 1, METRICS_HAVE)]
    if max(seen, default=0) >= max(known, 1):
        raise UserError(
            f"run={folder.name}: segment {max(seen)} has left checkpoints or steps, and no line in"
            f" {folder / FILE}. The run's lineage hangs on that: put the file back from a copy, or"
            " start from step 0 with resume=fresh"
        )


def newest_state(folder: Path, last_step: int) -> RunState | None:
    """State of the newest checkpoint of the lineage with a valid manifest; None = none was saved.

    A checkpoint of the last step must have all its files, too, because nobody would load it and
    notice. Files of other checkpoints are not opened here, because every rank comes here. Raises
    UserError where checkpoints exist, or were saved once, and none can be used.
    """
    checkpoints = folder / "checkpoints"

    def problems_of(path: Path, manifest: Manifest) -> list[str]:
        return size_problems(path, manifest) if manifest.step >= last_step else []

    choice = newest_whole(checkpoints, problems_of)
    if choice.found:
        return read_state(choice.found.manifest.state, choice.found.folder)
    if choice.damaged:
        raise none_is_whole(choice.damaged)
    current = lineage_of(folder)
    saves = [event for event in read_events(folder, "saved") if "step" in event]
    saved = [event["step"] for event in current.own(saves)]
    if not saved and (unknown := damage(folder / EVENTS, EVENTS_HAVE)):
        raise UserError(
            f"run={folder.name}: {checkpoints} has no checkpoint, and whether one was saved is not"
            f" known: {unknown}. Put them back, delete the line if nothing was saved, or start from"
            " step 0 with resume=fresh"
        )
    if saved or current.after:  # a branch has saved nothing itself
        raise UserError(
            f"run={folder.name}: a checkpoint of step {saved[-1] if saved else current.after} was"
            f" saved, but {checkpoints} holds none: put them back (is a disk not mounted?), or"
            " start from step 0 with resume=fresh"
        )
    return None


def read_state(values: dict[str, Any], path: Path) -> RunState:
    """The state in the manifest of `path`.

    Raises UserError where it cannot be read: its digest holds, so another version wrote it.
    """
    try:
        state = RunState.from_dict(values)
        if "past" not in state.data:
            raise Damaged("state: data has no `past`")
        return state
    except Damaged as damage:
        raise UserError(
            f"{path}: {damage}; another version of the project wrote it: go on with that one"
        ) from None


def compare(
    state: RunState,
    recipe: Recipe,
    data_state: dict[str, Any],
    past: Callable[[int], dict[str, Any]],
    lines: Sequence[dict[str, Any]] = (),
) -> list[RecipeChange]:
    """Differences between the recipe and data of a checkpoint and those of now.

    Changes that are recorded in the run's history (`lines`) are no differences. Raises UserError
    with every difference that is not allowed.
    """
    stored = with_data(recorded(lines, state.step, state.recipe), state.data)
    now = with_data(dataclasses.asdict(recipe), data_state, state.data["corpora"])
    verdict = check_resume(stored, now, recipe.allow)
    problems = [*verdict.problems, *changed_past(state, recipe, past(state.step))]
    if any(change.treatment == "fixed" for change in verdict.changes):
        problems.insert(
            0,
            f"this run holds another training, with a checkpoint of step {state.step}. To train"
            " this one beside it, add run=NAME; to replace it, add resume=fresh",
        )
    if problems:
        raise UserError(*(f"run={recipe.run}: {line}" for line in problems))
    return verdict.changes


def changed_past(state: RunState, recipe: Recipe, past: dict[str, Any]) -> list[str]:
    """Problems where the recipe of now would change the data of steps that were trained already."""
    step, was = state.step, state.data["past"]
    data_step = was["data_step"]
    problems = []
    if past["tokens"] != was["tokens"]:
        problems.append(
            f"batch_tokens={recipe.batch_tokens} would put step {step} at {past['tokens']}"
            f" tokens, but {was['tokens']} were trained on: samples would be left out or repeated."
            f" Keep the past in a ramp, such as batch_tokens=[[0,OLD],[{data_step},NEW]]"
        )
    if past.get("lengths") != was.get("lengths"):
        problems.append(
            f"seq_len_warmup={recipe.seq_len_warmup} would have cut the sequences of steps 1 to"
            f" {step} in another way: keep its pieces before data step {data_step}, and let new"
            " ones begin there or later"
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


def with_data(
    recipe: dict[str, Any], data_state: dict[str, Any], known: Iterable[str] | None = None
) -> dict[str, Any]:
    """A nested recipe with the facts about its data that it does not contain itself.

    These are the identity of the corpora, the version of the order, and the window that is permuted
    (by default the sequence length). `known` = sources that a checkpoint has; a source that is not
    among them is new, and is judged by its weight.
    """
    data = recipe["data"] | {"window_tokens": data_state["window_tokens"]}
    corpora = {
        uid: corpus
        for uid, corpus in data_state["corpora"].items()
        if known is None or uid in known
    }
    identity = {"order_version": data_state["order_version"], "corpora": corpora}
    return recipe | {"data": data, "identity": identity}
