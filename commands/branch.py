"""`make branch`: makes a new run that goes on from a checkpoint of another, without copying its
data.

    make branch RUN=tiny STEP=80 TO=tiny-b OVERRIDES="optim.lr=1e-4" WHY="lower rate"

    runs/tiny-b/  recipe.yaml      the checkpoint's own recipe with OVERRIDES
                  history.jsonl    that of the parent, and the branch as its next segment
                  ledger/ metrics.jsonl environment.json    the parent's lines up to STEP
                  checkpoints/     hard links to the parent's files

Rule: the two runs share bytes but no file name. A committed checkpoint is never written to again,
so removing or pruning one run does not affect the other; only damage to the disk under a file
affects both. The folder appears complete, by one rename, after the parent's history has recorded
it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from base.command_line import Parser, add_overrides, arguments_of, count_of, refuse
from base.durable import sync_folder, sync_tree
from base.errors import UserError
from base.exits import FINISHED
from base.paths import ROOT
from checkpoint.format.manifest import committed, read_manifest
from checkpoint.lineage import MARK, Line, Lineage, lineage, read, run_folder
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
from record.run_status import start_command
from runtime.resolve import attempt

ENVIRONMENT = "environment.json"
LINE_FILES = ("metrics.jsonl", "ledger/steps.jsonl")
# Knobs of a single start; a branch does not inherit them.
OF_A_START = {"stop_after": None, "resume": "auto", "allow": [], "init_from": None}


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.branch RUN --step N --to NAME`; returns the exit status."""
    parser = Parser(prog="make branch", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", default="", help="checkpoint to go on from")
    parser.add_argument("--segment", default="", help="take the checkpoint of this segment")
    parser.add_argument("--to", default="", help="name of the new run")
    parser.add_argument("--why", default="", help="for the record")
    add_overrides(parser, "*", "overrides of the new run")
    options = parser.parse_args(arguments)
    try:
        parent = run_folder(options.run, ROOT)
        target, checkpoint = find(parent, options)
        recipe, changes = branched(parent, target, checkpoint, options)
        branch(parent, target, checkpoint, recipe, changes, options.why)
    except UserError as error:
        return refuse(error)
    print(
        f"runs/{recipe.run} goes on from step {target.step} of {parent.name} (segment"
        f" {target.segment}); its checkpoint is linked, not copied"
    )
    for change in changes:
        print(
            f"changed from step {target.step + 1} on: {change.key} {change.stored} -> {change.now}"
        )
    print(f"start it with: {start_command(ROOT / 'runs' / recipe.run, parent)}")
    return FINISHED


def find(parent: Path, options: argparse.Namespace) -> tuple[history.Target, Path]:
    """Find the checkpoint to go on from, and read every byte of it. Raises UserError."""
    problems: list[str] = []
    step = attempt(problems, lambda: count_of("STEP", options.step, least=1))
    segment = None
    if options.segment:
        segment = attempt(problems, lambda: count_of("SEGMENT", options.segment))
    problems += name_problems(options.to)
    if problems:
        raise UserError(*problems)
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
    parent: Path, target: history.Target, checkpoint: Path, options: argparse.Namespace
) -> tuple[Recipe, list[RecipeChange]]:
    """Return the new run's recipe, and its deliberate changes. Every change that OVERRIDES names is
    allowed if it may change within a run. Raises UserError.
    """
    state = read_state(read_manifest(checkpoint).state, checkpoint)
    stored = state.recipe | OF_A_START
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / MARK
        own.write_text(recipe_yaml(to_recipe(stored, {}, [])[0]), encoding="utf-8")
        recipe = compose(str(own), [*arguments_of(options), f"run={options.to}"]).recipe
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


def branch(
    parent: Path,
    target: history.Target,
    checkpoint: Path,
    recipe: Recipe,
    changes: Sequence[RecipeChange],
    why: str,
) -> None:
    """Make the folder under a temporary name, record it in the parent's history, rename it. Raises
    UserError.
    """
    folder = ROOT / "runs" / recipe.run
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    lines, facts = read(parent), {"why": why, "who": "operator", "since": history.now()}
    os.umask(os.umask(0o077) | 0o022)  # only the owner may write to what is made here
    try:
        # Make the folder, with links to the checkpoint and copies of the record.
        sweep(folder)
        new.mkdir()
        link(checkpoint, new / "checkpoints" / checkpoint.name)
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
    to.mkdir(parents=True)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
