"""Makes a new run from a checkpoint of another run: its recipe, history, record and checkpoint.

    branched(...)   the new run's recipe, and what differs from the parent's
    make_run(...)   the folder, under a temporary name until it is complete

    runs/tiny-b/  recipe.yaml      the checkpoint's own recipe with OVERRIDES
                  history.jsonl    that of the parent, and the branch as its next segment
                  ledger/ metrics.jsonl environment.json    the parent's lines up to STEP
                  checkpoints/     hard links to the parent's files, or an average of checkpoints

Rule: the two runs may share bytes but no file name. A committed checkpoint is never written to
again, so removing or pruning one run does not affect the other; only damage to the disk under a
file affects both. The folder appears complete, by one rename, after the parent's history has
recorded it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from base.durable import sync_folder, sync_tree
from base.errors import UserError
from base.paths import ROOT
from checkpoint.format.manifest import committed, read_manifest
from checkpoint.lineage import MARK, Line, Lineage, lineage, read
from checkpoint.load.allowed_changes import RecipeChange, check_resume
from checkpoint.load.choosing import verify
from data.stream.schedule import schedule_of
from data.stream.stream import open_stream
from recipes.check import folder_name, to_recipe
from recipes.compose import compose, recipe_yaml
from recipes.schema import Recipe
from record import history
from record.records import read_line
from record.resuming import compare, read_state

ENVIRONMENT = "environment.json"
LINE_FILES = ("metrics.jsonl", "ledger/steps.jsonl")
# Knobs of a single start; a new run does not inherit them.
OF_A_START = {"stop_after": None, "resume": "auto", "allow": [], "init_from": None}


def whole_checkpoint(parent: Path, step: int, segment: int | None) -> tuple[history.Target, Path]:
    """The checkpoint of a step, of which every byte has been read. Raises UserError."""
    lines = read(parent)
    target = history.find(parent, lines, step, segment)
    path = dict(committed(parent / "checkpoints", lineage(lines, target.segment)))[target.step]
    damage = verify(path, "full")
    if damage:
        raise UserError(*damage)
    return target, path


def name_problems(name: str) -> list[str]:
    """Return why a new run cannot have this name."""
    try:
        if not name or folder_name(name) is None:
            return ["TO=: give the new run a name, such as TO=tiny-b"]
    except ValueError as error:
        return [f"TO={name} {error}"]
    if os.path.lexists(ROOT / "runs" / name):
        return [f"TO={name}: runs/{name} exists; choose another name"]
    return []


def branched(
    parent: Path, target: history.Target, checkpoint: Path, name: str, overrides: Sequence[str]
) -> tuple[Recipe, list[RecipeChange]]:
    """Return the recipe of the new run `name`, and its deliberate changes. Every change that
    OVERRIDES names is allowed if it may change within a run. Raises UserError.
    """
    state = read_state(read_manifest(checkpoint).state, checkpoint)
    stored = state.recipe | OF_A_START
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / MARK
        own.write_text(recipe_yaml(to_recipe(stored, {}, [])[0]), encoding="utf-8")
        recipe = compose(str(own), [*overrides, f"run={name}"]).recipe
    found = check_resume(stored, dataclasses.asdict(recipe)).changes
    allow = tuple(change.key for change in found if change.treatment == "deliberate")
    skips = history.data_with_skips(recipe.data, kept_skips(read(parent), target))
    schedule = schedule_of(recipe)
    vocabulary = recipe.model.vocab_size
    stream = open_stream(skips, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)
    allowed = dataclasses.replace(recipe, allow=allow)
    changes = compare(state, allowed, stream.state(), stream.past)
    return recipe, [change for change in changes if change.treatment == "deliberate"]


def kept_skips(lines: Sequence[Line], target: history.Target) -> list[Line]:
    """Return the data steps that the parent leaves out before and after the target."""
    before = history.in_force(lines, target.segment, target.step)
    return [*before, *history.carried(lines, target)]


def make_run(
    parent: Path,
    target: history.Target,
    put: Callable[[Path], None],
    recipe: Recipe,
    changes: Sequence[RecipeChange],
    facts: Mapping[str, Any],
) -> None:
    """Make the folder under a temporary name, record it in the parent's history, rename it.

    `put` fills the empty folder of checkpoints that it is given; `facts` are kept in the history.
    Raises UserError.
    """
    folder = ROOT / "runs" / recipe.run
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    lines, facts = read(parent), {**facts, "who": "operator", "since": history.now()}
    os.umask(os.umask(0o077) | 0o022)  # only the owner may write to what is made here
    try:
        # Make the folder, with the checkpoint and copies of the record.
        sweep(folder)
        (new / "checkpoints").mkdir(parents=True)
        put(new / "checkpoints")
        (new / MARK).write_text(recipe_yaml(recipe), encoding="utf-8")
        for name in LINE_FILES:
            copy_lines(parent / name, new / name, lineage(lines, target.segment), target.step)
        if (parent / ENVIRONMENT).is_file():
            shutil.copy2(parent / ENVIRONMENT, new / ENVIRONMENT)
        # Write its history: that of the parent, then the branch as the next segment.
        for line in lines:
            if line["kind"] != "branch":
                history.append(new, line)
        skips = history.carried(lines, target)
        line = history.next_segment(lines, target, skips, facts, run=parent.name)
        history.append(new, line)
        history.overrides(new, changes, target.step)
        # Record the branch in the parent, then give the folder its name.
        place = {"segment": target.segment, "step": target.step, "to": folder.name}
        history.append(parent, {"kind": "branch", **place, **facts})
        sync_tree(new)
        os.rename(new, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise UserError(f"TO={folder.name}: {error.filename}: {error.strerror}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what killed commands for the same name have left."""
    for left in folder.parent.glob(f".{folder.name}.new-*"):
        process = left.name.rpartition("-")[2]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(left)


def link(checkpoint: Path, to: Path) -> None:
    """Give every file of a checkpoint a second name. Raises OSError where the file system has no
    hard links, or where the parent run has removed the checkpoint meanwhile.
    """
    to.mkdir()
    for file in sorted(checkpoint.iterdir()):
        os.link(file, to / file.name)


def copy_lines(source: Path, to: Path, chosen: Lineage, last_step: int) -> None:
    """Copy the lines of the steps that the branch goes on from. Damaged lines are left out."""
    if not source.is_file():
        return
    to.parent.mkdir(exist_ok=True)
    with open(source, "rb") as old, open(to, "wb") as new:
        for text in old:
            line = read_line(text, ("segment", "step")) if text.endswith(b"\n") else None
            if not isinstance(line, dict) or line["step"] > last_step:
                continue
            if chosen.holds(line["segment"], line["step"]):
                new.write(text)
