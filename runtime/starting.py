"""Steps of a start that need a run's folder: weights, segment, record, banner.

    origin_of -> engine -> restore -> enter_segment -> open_record

Rule: a function that is a collective says so; every rank calls it, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from base.errors import Shared, UserError
from base.paths import ROOT
from base.values import counted
from checkpoint.format.blocks import Damaged
from checkpoint.format.state import restore_random_states
from checkpoint.lineage import read
from checkpoint.load.allowed_changes import RecipeChange
from checkpoint.load.choosing import set_aside
from checkpoint.load.outside_weights import Origin, read_origin
from checkpoint.load.restoring import load
from checkpoint.save.interval import risk
from data.stream.evaluation import HeldOut
from data.stream.ledger import Ledger
from data.stream.stream import Stream
from parallel.layout import Layout, describe_places, places
from recipes.compose import recipe_yaml
from recipes.schema import Recipe
from record import environment, history, run_folder
from record.attempts import record_nothing_left
from record.heartbeat import HEART
from record.predictions import PLAN
from record.records import LEDGER, make_way
from record.resuming import compare, read_state
from runtime.engine.engine import decoder_config
from runtime.health.health_monitor import HealthMonitor, rewinds_by_policy
from runtime.log.held_out_loss import Validation
from runtime.log.rank0_record import RunRecord
from runtime.process import process
from runtime.resolve import Resolved
from runtime.run import Run


def report_finished(recipe: Recipe, step: int, total_steps: int) -> None:
    """Print that the run has nothing left to do, and what to do to train on."""
    if process.launched_rank() == 0:
        further = "give more steps with allow=[steps]"
        if step < total_steps:
            further = f"take stop_after={recipe.stop_after} away ({total_steps} steps are planned)"
        print(
            f"run={recipe.run} is finished: it has a checkpoint of step {step}. To train on,"
            f" {further}; to start again, resume=fresh or another run=NAME"
        )


def record_finished(folder: Path, step: int, world: int) -> None:
    """Record, on rank 0, that this attempt found the run finished.

    Where another process writes the run now, or the disk is full, nothing is recorded.
    """
    if process.launched_rank() == 0:
        with contextlib.suppress(OSError, UserError), contextlib.closing(run_folder.hold(folder)):
            record_nothing_left(folder, step, world)


def origin_of(recipe: Recipe, step: int, stream: Stream) -> tuple[Origin | None, list[str]]:
    """The origin of a new run's weights, and lines about it; None: they are drawn at random.

    `step` is the update that the run goes on from. Raises UserError.
    """
    if recipe.init_from is None:
        return None, []
    if step:
        return None, [f"init_from={recipe.init_from} is for a run's start; this one goes on"]
    is_first = process.launched_rank() == 0
    origin = read_origin(recipe, ROOT, decoder_config(recipe), stream, compare=is_first)
    text = f"weights from {origin.label}; optimizer, schedule and data start anew"
    return origin, ["; ".join([text, *origin.notes])]


def evaluation_batches(
    recipe: Recipe, layout: Layout, stream: Stream, data_rank: int
) -> HeldOut | None:
    """One rank's held-out micro-batches, the same at every evaluation; None with eval_tokens=0."""
    if recipe.eval_tokens == 0:
        return None
    return stream.evaluation(data_rank, layout.data, layout.micro_batch, recipe.eval_tokens)


def description(recipe: Recipe, resolved: Resolved) -> dict[str, str | dict]:
    """Documents of the run folder that say what the run is, by file name."""
    return {
        "recipe.yaml": recipe_yaml(recipe),
        "layout.json": resolved.layout.as_dict() | {"places": places(resolved.layout)},
        "ds_config.json": resolved.config,
        PLAN: process.given_plan(),
    }


def restore(run: Run) -> None:
    """Fill the engine from the newest whole checkpoint; a collective."""
    HEART.beat("load")
    try:
        run.loaded = load(run.folder, run.engine.fragments(), run.ranks)
        state = read_state(run.loaded.state, run.loaded.folder)
        # The newest checkpoint may have proven damaged, and an older one was loaded.
        past = read(run.folder)
        run.changes = compare(state, run.recipe, run.stream.state(), run.stream.past, past)
        run.changes += change_of_ranks(state.layout, run.resolved.layout)
    except UserError as error:
        raise Shared(*error.problems) from None
    damaged = [path for path, _ in run.loaded.damaged]
    run.warnings += process.first_does(lambda: set_aside(damaged)) or []
    run.saver.go_on(state)
    run.engine.after_load(state.optimizer_step)
    if run.loaded.local is not None:
        try:
            restore_random_states(run.loaded.local.get("random", {}), run.process.device)
        except Damaged as damage:
            raise UserError(f"{run.loaded.folder}: {damage}") from None


def change_of_ranks(stored: Mapping[str, Any], layout: Layout) -> list[RecipeChange]:
    """The number of ranks, where it differs from the checkpoint's; it is no knob of the recipe."""
    if stored.get("world") in (None, layout.world):
        return []
    return [RecipeChange("ranks", stored["world"], layout.world, "free")]


def enter_segment(run: Run) -> int:
    """The segment of the history that this attempt goes on in, the same on all ranks.

    A collective. Raises Shared where the ranks read different histories.
    """
    number = process.first_does(lambda: history.begin(run.folder, run.origin, run.after_step))
    seen = run.ranks.exchange((number, run.stream.skips.fingerprint()), "segment")
    if len({skips for _, skips in seen}) > 1:
        raise Shared(
            f"run={run.recipe.run}: the ranks read different lists of skips from {run.folder}: a"
            " shared file system that lags; start it again"
        )
    return seen[0][0]


def health_monitor_of(run: Run) -> HealthMonitor:
    """The health monitor of this attempt, in the state that the checkpoint holds; a collective."""
    return HealthMonitor(
        run.recipe,
        run.resolved.warmup_steps,
        run.stream.schedule.sequences_at,
        run.loaded.state["health"] if run.loaded else None,
        rewinds_by_policy(run.folder, run.ranks),
        is_changed=any(change.treatment == "deliberate" for change in run.changes),
    )


def open_record(run: Run) -> RunRecord:
    """Rank 0's record of this attempt. Prints the banner."""
    make_way(run.folder / LEDGER)
    record = RunRecord(
        run.folder,
        run.recipe,
        run.resolved,
        run.process,
        Ledger(run.folder / "ledger", run.after_step, run.saver.state.segment),
        run.stream.tokens_after,
        run.after_step,
        run.saver.state.segment,
        validation_of(run),
    )
    record_conditions(run)
    deliberate = [change for change in run.changes if change.treatment == "deliberate"]
    history.overrides(run.folder, deliberate, run.after_step)
    record.log(banner(run))
    if run.loaded:
        record.resumed(run.loaded, run.changes)
    return record


def validation_of(run: Run) -> Validation:
    """Turns this run's validation losses into numbers of the record."""
    if run.held_out is None:
        return Validation([], None)
    num_bytes = run.stream.evaluation_bytes(run.recipe.eval_tokens)
    return Validation(run.held_out.uids, num_bytes)


def record_conditions(run: Run) -> None:
    """Write the conditions under which this attempt trains into environment.json."""
    conditions = environment.environment(ROOT, run.process.device) | {
        "layout": run.resolved.layout.as_dict(),
        "recipe": dataclasses.asdict(run.recipe),
    }
    environment.record(run.folder, conditions, run.saver.state.segment, run.after_step)


def banner(run: Run) -> list[str]:
    """Lines for a person: the run that is about to begin or to go on."""
    recipe, resolved = run.recipe, run.resolved
    sequences = run.stream.schedule.sequences_at(1)
    lines = [
        f"{recipe.run}: {resolved.num_parameters:,} parameters,"
        f" {counted(resolved.total_steps, 'step')} of"
        f" {sequences} x {recipe.seq_len} tokens, {recipe.precision} on {run.process.device.type}",
        *filter(None, [resolved.rounding]),
        resolved.layout.describe(),
        *describe_places(resolved.layout, run.process.local_world),
    ]
    if recipe.seq_len_warmup:
        pieces = [f"{length} from data step {step}" for step, length in recipe.seq_len_warmup]
        lines.append(f"sequences are cut to {', '.join(pieces)}")
    for use in run.stream.usage(resolved.last_step):
        rest = f" (the last {use.dropped:,} fill no window)" if use.dropped else ""
        lines.append(
            f"source {use.uid}: {use.tokens:,} tokens{rest}, {use.epochs:.2f} epochs ({use.corpus})"
        )
    cluster, wanted = recipe.cluster, recipe.checkpoint
    at_risk = risk(wanted.interval, wanted.minutes, cluster.mtbf_hours)
    lines.append(f"a kill loses at most {at_risk}")
    lines += history.describe(read(run.folder))
    lines += [f"warning: {warning}" for warning in run.warnings]
    return [*lines, f"record in {run.folder.relative_to(ROOT)}/; look at it with: make tensorboard"]
