"""The run: recipe -> layout -> engine -> stream -> loop. Read this first.

    python pretrain.py recipe=tiny zero=3 run=tiny-z3              one process
    torchrun --nproc-per-node 8 pretrain.py recipe=1b              or srun, or `make pretrain`

    every rank    compose, check -> join -> engine, checkpoint -> loop: batch -> step -> save
    rank 0 also   run folder, metrics, ledger, console

The loop is the same for every layout. Step N (from 1) is the N-th update of the weights; its batch
and its learning rate are functions of N alone. The loss of step N is read after step N+1 has been
launched, so no step waits for its own. A run whose folder holds a checkpoint goes on from it, under
whatever layout it is started with.

Exit status: 0 finished, or stopped on request; 75 preempted, saved; 76 taken back to an older
checkpoint, start again; 93 refused, or stopped for good: trying again would not help; 130 Ctrl-C,
saved (record.requests).
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # what follows takes seconds to import
    from record import requests

    requests.REQUESTS.listen(is_importing=True)

from base.errors import Shared, UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED, REWOUND
from base.lossy_output import make_lossy
from base.values import counted
from checkpoint.comm import RankComm, broadcast, together
from checkpoint.format.blocks import Damaged
from checkpoint.format.state import restore_random_states
from checkpoint.lineage import read
from checkpoint.load.allowed_changes import RecipeChange
from checkpoint.load.choosing import set_aside
from checkpoint.load.outside_weights import Origin, read_origin, same_everywhere
from checkpoint.load.rank_views import same_listing
from checkpoint.load.restoring import Loaded, load
from checkpoint.save.interval import is_due
from checkpoint.save.lease import Lease
from data.stream.collect import LEDGER_EVERY, Collector
from data.stream.ledger import Ledger
from data.stream.schedule import schedule_of
from data.stream.stream import StepData, Stream, open_stream
from data.stream.windows import Batch
from parallel.layout import Layout, describe_places, places
from recipes.compose import compose_command, recipe_yaml
from recipes.schema import Recipe
from record import environment, history, run_folder
from record.heartbeat import HEART
from record.records import LEDGER, make_way
from record.requests import REQUESTS, AskedEarly
from record.resuming import compare, data_of, left_behind, read_state, standing
from runtime.engine.batches import gather_hashes, to_device
from runtime.engine.communication import Counter, bytes_by_kind
from runtime.engine.engine import Engine, build, decoder_config, initial, untrained
from runtime.engine.learning_rate import learning_rate
from runtime.engine.memory import peak_gib
from runtime.health.health_monitor import HealthMonitor, rewinds_by_policy
from runtime.health.recovery import Rewound, recover
from runtime.log.rank0_record import Finished, RunRecord
from runtime.monitor.hardware import Hardware
from runtime.monitor.profiling import profiler_of
from runtime.process import process
from runtime.resolve import Resolved, resolve
from runtime.saving import Saver, Unsaved

ROOT = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    """Run one command line; returns the exit status."""
    try:
        run = prepare(arguments)
        return FINISHED if run is None else train(run)
    except UserError as error:
        process.report(error)
        return DO_NOT_RETRY
    except Rewound:
        return REWOUND
    except OSError as error:  # a full disk, a file system that went away
        print(f"failed on rank {process.launched_rank()}: {error}", file=sys.stderr)
        return FAILED
    except AskedEarly as asked:
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return asked.ending.status
    finally:
        HEART.beat("end")
        process.finish()


@dataclass
class Run:
    """What one rank needs for the loop."""

    recipe: Recipe
    resolved: Resolved
    stream: Stream
    data_rank: int
    held_out: list[Batch]
    folder: Path
    process: process.Process
    engine: Engine
    ranks: RankComm  # for checkpoints, beside training's own group
    lease: Lease | None  # rank 0's right to write the run
    saver: Saver
    loaded: Loaded | None
    origin: str | None  # where the weights of step 0 came from, where it was not chance
    changes: list[RecipeChange]
    warnings: list[str]
    counter: Counter | None  # of communication, where the recipe asks for it

    @property
    def after_step(self) -> int:
        """The update that this process goes on from; 0 = from the start."""
        return self.loaded.step if self.loaded else 0


def prepare(arguments: list[str]) -> Run | None:
    """From the command line to an engine that is ready; refuses before anything is written.

    None when the run is finished already.
    """
    process.check_launcher()
    composed = compose_command(arguments)
    recipe = composed.recipe
    schedule = schedule_of(recipe)
    resolved = resolve(recipe, process.launched_world(), schedule)
    layout = resolved.layout
    folder = ROOT / "runs" / recipe.run
    data, vocabulary = data_of(recipe, folder), recipe.model.vocab_size
    # Builds the corpus where it is absent: one rank of each host, the others wait for its lock.
    stream = open_stream(data, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)
    warnings = [*composed.warnings, *resolved.warnings, *stream.check(resolved.last_step)]
    warnings += left_behind(recipe, composed.file, folder)
    run_folder.refuse_busy(folder)
    stands = None
    if process.launched_rank() == 0:  # a network file system may show the others something older
        stands = standing(folder, recipe, stream.state(), stream.past, resolved.last_step)
    place = layout.coordinates(process.launched_rank())
    held_out = evaluation_batches(recipe, layout, stream, place.data)

    me = process.start(recipe.cluster)
    counter = Counter() if recipe.log.communication else None
    ranks = RankComm()
    if recipe.resume != "fresh":
        same_listing(ranks, folder / "checkpoints")
    stands = broadcast(ranks, stands, "where the run stands")
    if stands.step >= resolved.last_step:
        say_finished(recipe, stands.step, resolved.total_steps)
        return None
    origin, notes = together(ranks, lambda: origin_of(recipe, stands.step, stream), "init_from")
    label = origin.label if origin else None
    same_everywhere(label, stream.state(), recipe, ranks)
    is_fresh = recipe.resume == "fresh"
    documents = description(recipe, resolved)
    lease = process.first_does(lambda: run_folder.open_folder(folder, documents, is_fresh))
    try:
        if me.is_first:
            HEART.show_in(folder)
        draw = None if stands.step else origin.draw if origin else initial
        engine = build(recipe, layout, resolved.config, me, draw)
        saver = Saver(folder, recipe, resolved, stream, engine, ranks, me, lease)
        run = Run(
            recipe, resolved, stream, place.data, held_out, folder, me, engine, ranks, lease, saver,
            None, label, stands.changes, [*warnings, *stands.notes, *notes], counter,
        )  # fmt: skip
        if stands.step:
            restore(run)
        saver.segment = enter_segment(run)
    except BaseException:
        if lease:
            lease.release()  # no other host is to wait for an attempt that trained nothing
        raise
    return run


def say_finished(recipe: Recipe, step: int, total_steps: int) -> None:
    """A run that has nothing left to do says so and ends well."""
    if process.launched_rank() == 0:
        further = "give more steps with allow=[steps]"
        if step < total_steps:
            further = f"take stop_after={recipe.stop_after} away ({total_steps} steps are planned)"
        print(
            f"run={recipe.run} is finished: it has a checkpoint of step {step}. To train on,"
            f" {further}; to start again, resume=fresh or another run=NAME"
        )


def origin_of(recipe: Recipe, step: int, stream: Stream) -> tuple[Origin | None, list[str]]:
    """Where the weights of a new run come from, None = chance; and what is to be said of it."""
    if recipe.init_from is None:
        return None, []
    if step:
        return None, [f"init_from={recipe.init_from} is for a run's start; this one goes on"]
    is_first = process.launched_rank() == 0
    origin = read_origin(recipe, ROOT, decoder_config(recipe), stream, compare=is_first)
    text = f"weights from {origin.label}; optimizer, schedule and data start anew"
    return origin, ["; ".join([text, *origin.notes])]


def restore(run: Run) -> None:
    """Fill the engine from the newest whole checkpoint; a collective."""
    HEART.beat("load")
    try:
        run.loaded = load(run.folder, run.engine.fragments(), run.ranks)
        state = read_state(run.loaded.state, run.loaded.folder)
        # The manifest that was looked at before may not be the one that was whole.
        past = read(run.folder)
        run.changes = compare(state, run.recipe, run.stream.state(), run.stream.past, past)
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


def enter_segment(run: Run) -> int:
    """The segment of the history that this attempt goes on in, the same on all ranks; a
    collective.
    """
    number = process.first_does(lambda: history.begin(run.folder, run.origin, run.after_step))
    seen = run.ranks.exchange((number, run.stream.skips.fingerprint()), "segment")
    if len({skips for _, skips in seen}) > 1:
        raise Shared(
            f"run={run.recipe.run}: the ranks read different lists of skips from {run.folder}: a"
            " shared file system that lags; start it again"
        )
    return seen[0][0]


def train(run: Run) -> int:
    """The loop, and the cause on record where it does not reach its end; the exit status."""
    record = None
    try:
        if run.process.is_first:
            record = open_record(run)
            run.saver.tell, run.saver.sync_record = record.report, record.sync
        with run.saver:  # what is in flight ends first
            return loop(run, record)
    except (UserError, OSError, KeyboardInterrupt) as error:
        if record:
            record.ended(error)
        raise
    finally:
        if run.lease:
            run.lease.release()


def loop(run: Run, record: RunRecord | None) -> int:
    """One turn per step; returns the exit status."""
    recipe, resolved, engine, me = run.recipe, run.resolved, run.engine, run.process
    layout, last_step = resolved.layout, resolved.last_step
    hardware = Hardware(recipe.hardware, layout, me, run.after_step)
    collector = Collector(
        record.ledger if record else None,
        lambda own: gather_hashes(own, me.device),
        LEDGER_EVERY,
        [layout.coordinates(rank).data for rank in range(layout.world)],
        run.stream.skips.fingerprint(),
    )
    late: Finished | None = None
    profiler = profiler_of(
        recipe.log.profile, run.folder, me.rank, HEART.around(hardware.clock.phase)
    )
    REQUESTS.begin(run.folder, recipe.cluster.timeout_s)
    health_monitor = health_monitor_of(run)

    with run.stream.prefetch(
        run.after_step + 1, last_step, run.data_rank, layout.data, layout.micro_batch
    ) as batches:
        hardware.clock.start()
        for step in range(run.after_step + 1, last_step + 1):
            profiler.begin(step)
            HEART.beat("step", step)
            REQUESTS.send()
            with profiler.phase("data"):
                data = next(batches)
                micro_batches = [to_device(batch, me.device) for batch in data.micro_batches]
            HEART.beat("step", parts=len(micro_batches))
            lr = learning_rate(step, recipe.optim, resolved.warmup_steps, resolved.total_steps)
            engine.set_lr(lr)
            if run.counter:
                run.counter.take()  # what came before belongs to no step
            health_monitor.begin(data)
            if data.is_update:
                result = engine.train_step(
                    micro_batches, data.num_targets, data.num_tokens, profiler.phase,
                    health_monitor.may_update,
                )  # fmt: skip
            else:  # data.skip: the step counts, the weights stay
                result = untrained(data.num_tokens, me.device)
            sent = bytes_by_kind(run.counter.take()) if run.counter else None
            val_loss = None
            if run.held_out and is_due(step, recipe.eval_every, last_step):
                with profiler.phase("eval"):
                    val_loss = engine.evaluate(
                        to_device(batch, me.device) for batch in HEART.each(run.held_out)
                    )
                run.saver.evaluated = (step, val_loss)
            finished = Finished(data, lr, result, hardware.clock.finish(), val_loss, sent)
            profiler.end(step)
            hardware.step(step, finished.span)

            if run.lease:
                run.lease.confirm()  # before this step goes on record
            collector.add(data)
            if record:
                if late:
                    record.write(late)
                late = finished
                record.hardware(step, hardware.news())
                if result.skipped or health_monitor.judgement.reason:
                    record.bad_step(data, result.skipped, health_monitor.judgement)
                if data.quarantined:
                    record.quarantined(data)
            ending = REQUESTS.answer(step == last_step)
            run.saver.poll()
            is_saved = run.saver.is_due(step, ending is not None and ending.saves)
            if health_monitor.is_sick or is_saved or ending or step == last_step:
                # What a checkpoint vouches for is on record before it exists.
                collector.flush()
                if record:
                    record.write(late)
                    late = None
            if health_monitor.is_sick:
                leave_sick(run, data, health_monitor, record)
            if is_saved:
                with profiler.phase("save"):
                    run.saver.save(step, health_monitor.health.as_dict())
            if ending:
                break
    HEART.beat("end")
    if is_saved and not ending:
        unsaved, ending = run.saver.last(step, health_monitor.health.as_dict(), REQUESTS.now)
    else:
        unsaved = run.saver.drain()
    hardware.close()
    if unsaved and is_saved and not ending:
        raise Unsaved(f"the last step, {step}, is trained and not saved: {unsaved}")
    peaks = run.ranks.exchange(peak_gib(), "peak memory")
    if record:
        cause = ending.cause if ending else "finished"
        record.close(cause, step=step, is_saved=is_saved and not unsaved, peak_memory_gib=peaks)
        REQUESTS.done()
    return ending.status if ending else FINISHED


def leave_sick(
    run: Run, data: StepData, health_monitor: HealthMonitor, record: RunRecord | None
) -> NoReturn:
    """End this attempt after a step that no skip can cure: the run goes back, or stops."""
    health = run.recipe.health
    HEART.beat("end")
    run.saver.drain()  # it may be what is gone back to
    process.first_does(lambda: recover(run.folder, data, health_monitor.judgement, health, record))
    raise Rewound


def health_monitor_of(run: Run) -> HealthMonitor:
    """What judges the steps of this attempt, from where the checkpoint left it; a collective."""
    return HealthMonitor(
        run.recipe,
        run.resolved.warmup_steps,
        run.stream.schedule.sequences_at,
        run.loaded.state["health"] if run.loaded else None,
        rewinds_by_policy(run.folder, run.ranks),
        is_changed=any(change.treatment == "deliberate" for change in run.changes),
    )


def evaluation_batches(
    recipe: Recipe, layout: Layout, stream: Stream, data_rank: int
) -> list[Batch]:
    """One rank's held-out micro-batches, the same at every evaluation; none with eval_tokens=0."""
    if recipe.eval_tokens == 0:
        return []
    return stream.evaluation(data_rank, layout.data, layout.micro_batch, recipe.eval_tokens)


def description(recipe: Recipe, resolved: Resolved) -> dict[str, str | dict]:
    """The documents of the run folder that say what the run is."""
    return {
        "recipe.yaml": recipe_yaml(recipe),
        "layout.json": resolved.layout.as_dict() | {"places": places(resolved.layout)},
        "ds_config.json": resolved.config,
    }


def open_record(run: Run) -> RunRecord:
    """Rank 0's record of this attempt, after telling what is about to happen."""
    make_way(run.folder / LEDGER)
    record = RunRecord(
        run.folder,
        run.recipe,
        run.resolved,
        run.process,
        Ledger(run.folder / "ledger", run.after_step, run.saver.segment),
        run.stream.tokens_after,
        run.after_step,
        run.saver.segment,
    )
    record_conditions(run)
    deliberate = [change for change in run.changes if change.treatment == "deliberate"]
    history.overrides(run.folder, deliberate, run.after_step)
    record.log(banner(run))
    if run.loaded:
        record.resumed(run.loaded, run.changes)
    return record


def record_conditions(run: Run) -> None:
    """Under which conditions this attempt trains, in environment.json."""
    conditions = environment.environment(ROOT, run.process.device) | {
        "layout": run.resolved.layout.as_dict(),
        "recipe": dataclasses.asdict(run.recipe),
    }
    environment.record(run.folder, conditions, run.saver.segment, run.after_step)


def banner(run: Run) -> list[str]:
    """What is about to happen, for a person."""
    recipe, resolved = run.recipe, run.resolved
    sequences = run.stream.schedule.sequences_at(1)
    lines = [
        f"{recipe.run}: {resolved.num_parameters:,} parameters,"
        f" {counted(resolved.total_steps, 'step')} of"
        f" {sequences} x {recipe.seq_len} tokens, {recipe.precision} on {run.process.device.type}",
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
    lines += history.describe(read(run.folder))
    lines += [f"warning: {warning}" for warning in run.warnings]
    return [*lines, f"record in {run.folder.relative_to(ROOT)}/; look at it with: make tensorboard"]


if __name__ == "__main__":
    make_lossy()
    sys.excepthook = process.print_without_secrets
    HEART.begin()
    REQUESTS.listen()
    process.leave(main(sys.argv[1:]))
