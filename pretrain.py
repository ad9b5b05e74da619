"""The run: recipe -> layout -> engine -> stream -> loop. Read this first.

    python pretrain.py recipe=tiny zero=3 run=tiny-z3              one process
    torchrun --nproc-per-node 8 pretrain.py recipe=1b              or srun, or `make pretrain`

    every rank    compose, check -> join -> engine, checkpoint -> loop: batch -> step -> save
    rank 0 also   run folder, metrics, ledger, console

The loop is the same for every layout. Step N (from 1) is the N-th update of the weights; its batch
and its learning rate are functions of N alone. The loss of step N is read after step N+1 has been
launched, so no step waits for its own. A run whose folder holds a checkpoint goes on from it, under
the layout that it is started with, which may be another one.

Exit status: 0 finished, or stopped on request; 75 preempted, saved; 76 taken back to an older
checkpoint, start again; 93 refused, or stopped for good: trying again would not help; 130 Ctrl-C,
saved (record.requests).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NoReturn

if __name__ == "__main__":  # what follows takes seconds to import
    from record import requests

    requests.REQUESTS.listen(is_importing=True)

import torch

from base.errors import Shared, UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED, REWOUND
from base.lossy_output import make_lossy
from base.paths import ROOT
from checkpoint.comm import RankComm, broadcast, together
from checkpoint.load.outside_weights import same_everywhere
from checkpoint.load.rank_views import same_listing
from checkpoint.save.interval import is_due
from data.stream.schedule import schedule_of
from data.stream.stream import StepData, open_stream
from model.init import initial_weight
from recipes.compose import compose_command
from record import run_folder
from record.heartbeat import HEART
from record.requests import REQUESTS, AskedEarly, Ending
from record.resuming import data_of, left_behind, standing
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build, check_kernels
from runtime.engine.communication import Counter
from runtime.engine.engine import mean_loss, untrained
from runtime.engine.learning_rate import learning_rate
from runtime.engine.memory import peak_gib
from runtime.health.health_monitor import HealthMonitor
from runtime.health.recovery import Rewound, recover
from runtime.log.rank0_record import RunRecord
from runtime.process import process
from runtime.resolve import resolve
from runtime.run import Run
from runtime.same_recipe import same_recipe
from runtime.saving import Saver, Unsaved
from runtime.starting import (
    description,
    enter_segment,
    evaluation_batches,
    health_monitor_of,
    open_record,
    origin_of,
    record_finished,
    report_finished,
    restore,
)
from runtime.telemetry import Telemetry


def main(arguments: list[str]) -> int:
    """Run one command line; returns the exit status.

    The process group is destroyed at an end that all ranks come to alike. A rank that fails alone
    leaves without that: on NCCL it would wait for kernels that the other ranks never complete.
    """
    is_agreed = False
    try:
        with HEART.reporting(Rewound):
            run = prepare(arguments)
            status = FINISHED if run is None else train(run)
        is_agreed = True
        return status
    except UserError as error:
        is_agreed = isinstance(error, Shared)
        process.report(error)
        return DO_NOT_RETRY
    except Rewound:
        is_agreed = True
        return REWOUND
    except OSError as error:  # a full disk, a file system that went away
        print(f"failed on rank {process.launched_rank()}: {error}", file=sys.stderr)
        return FAILED
    except AskedEarly as asked:
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return asked.ending.status
    finally:
        if is_agreed:
            HEART.beat("end")
            process.finish()


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
    checked = stream.check(resolved.last_step, recipe.eval_tokens)
    warnings = [*composed.warnings, *resolved.warnings, *checked]
    warnings += left_behind(recipe, composed.file, folder)
    run_folder.refuse_busy(folder)
    stands = None
    if process.launched_rank() == 0:  # a network file system may show the others something older
        stands = standing(folder, recipe, stream.state(), stream.past, resolved.last_step)
    place = layout.coordinates(process.launched_rank())
    held_out = evaluation_batches(recipe, layout, stream, place.data)

    me = process.start(recipe.cluster)
    check_kernels(resolved.config, me.device)
    counter = Counter() if recipe.log.communication else None
    ranks = RankComm()
    same_recipe(recipe, resolved.config, ranks)
    if recipe.resume != "fresh":
        same_listing(ranks, folder / "checkpoints")
    stands = broadcast(ranks, stands, "where the run stands")
    if stands.step >= resolved.last_step:
        report_finished(recipe, stands.step, resolved.total_steps)
        record_finished(folder, stands.step, layout.world)
        return None
    together(ranks, lambda: stream.check_rest(resolved.last_step, stands.step), "data.skip")
    origin, notes = together(ranks, lambda: origin_of(recipe, stands.step, stream), "init_from")
    label = origin.label if origin else None
    same_everywhere(label, stream.state(), recipe, ranks)
    is_fresh = recipe.resume == "fresh"
    documents = description(recipe, resolved)
    lease = process.first_does(lambda: run_folder.open_folder(folder, documents, is_fresh))
    try:
        if me.is_first:
            HEART.show_in(folder)
        draw = None if stands.step else origin.draw if origin else initial_weight
        engine = build(recipe, layout, resolved.config, me, draw)
        saver = Saver(folder, recipe, resolved, stream, engine, ranks, me, lease)
        run = Run(
            recipe, resolved, stream, place.data, held_out, folder, me, engine, ranks, lease, saver,
            None, label, stands.changes, [*warnings, *stands.notes, *notes], counter,
        )  # fmt: skip
        if stands.step:
            restore(run)
        saver.state.segment = enter_segment(run)
    except BaseException:
        if lease:
            lease.release()  # no other host is to wait for an attempt that trained nothing
        raise
    return run


def train(run: Run) -> int:
    """The loop, and the cause on record where it does not reach its end; the exit status."""
    record = None
    try:
        if run.process.is_first:
            record = open_record(run)
            run.saver.tell, run.saver.sync_record = record.report, record.sync
        with run.saver, HEART.reporting(Rewound):  # a save in flight ends first
            telemetry = Telemetry(run, record)
            REQUESTS.begin(run.folder, run.recipe.cluster.timeout_s)
            monitor = health_monitor_of(run)
            last = loop(run, telemetry, monitor)
            return finish(run, record, telemetry, monitor, last)
    except BaseException as error:
        if record and not isinstance(error, Rewound):
            record.ended(error)
        raise
    finally:
        if run.lease:
            run.lease.release()


@dataclass(frozen=True)
class Decision:
    """What follows a step, the same on all ranks: a save, the end of this attempt, or neither."""

    step: int
    saves: bool
    ending: Ending | None  # somebody asked for it
    is_last: bool  # no step is left

    @property
    def ends(self) -> bool:
        """True where no other step follows in this attempt."""
        return self.is_last or self.ending is not None


def loop(run: Run, telemetry: Telemetry, monitor: HealthMonitor) -> Decision:
    """Train step after step; returns the decision after the last one of this attempt."""
    recipe, engine, layout = run.recipe, run.engine, run.resolved.layout
    steps = range(run.after_step + 1, run.resolved.last_step + 1)
    with run.stream.prefetch(
        steps.start, steps[-1], run.data_rank, layout.data, layout.micro_batch
    ) as batches:
        telemetry.start()
        run.saver.timer.restart()
        for step in steps:
            # Batch and learning rate: functions of the step.
            telemetry.begin(step)
            REQUESTS.send(run.saver.timer.is_over())
            with telemetry.phase("data"):
                data = next(batches)
                micro_batches = [to_device(one, run.process.device) for one in data.micro_batches]
            lr = learning_rate(
                step, recipe.optim, run.resolved.warmup_steps, run.resolved.total_steps
            )
            engine.set_lr(lr)

            # Launch the update, and the evaluation where it is due.
            telemetry.begin_update(len(micro_batches))
            monitor.begin(data)
            if data.is_update:
                result = engine.train_step(
                    micro_batches, data.num_targets, data.num_tokens, telemetry.phase,
                    monitor.may_update,
                )  # fmt: skip
            else:  # data.skip: the step counts, the weights stay
                result = untrained(data.num_tokens, run.process.device)
            telemetry.end_update()
            losses = evaluate(run, step, telemetry)
            finished = telemetry.end(data, lr, result, losses)

            # Record the step before: by now the device has its loss.
            if run.lease:
                run.lease.confirm()  # before anything of this step is recorded
            telemetry.record(finished, monitor.judgement)

            # Save, or end.
            decision = decide(run, step)
            if monitor.is_sick or decision.saves or decision.ends:
                telemetry.flush()  # a checkpoint vouches for the record of its step
            if monitor.is_sick:
                leave_sick(run, data, monitor, telemetry.rank0_record)
            if decision.saves:
                with telemetry.phase("save"):
                    run.saver.save(step, monitor.health.as_dict())
            if decision.ends:
                return decision
    raise AssertionError(f"there is no step after step {run.after_step}")


def evaluate(run: Run, step: int, telemetry: Telemetry) -> torch.Tensor | None:
    """Validation losses after `step` where they are due (Engine.evaluate), still on the device."""
    if run.held_out is None or not is_due(step, run.recipe.eval_every, run.resolved.last_step):
        return None
    with telemetry.phase("eval"):
        micro_batches = HEART.each(run.held_out.batches)
        losses = run.engine.evaluate(
            (to_device(batch, run.process.device) for batch in micro_batches), run.held_out.sources
        )
    run.saver.state.evaluated = (step, mean_loss(losses))
    return losses


def decide(run: Run, step: int) -> Decision:
    """What follows `step`, by the requests of all ranks and the schedule of saves."""
    is_last = step == run.resolved.last_step
    ending = REQUESTS.answer(is_last)
    run.saver.poll()
    is_asked = ending is not None and ending.saves
    saves = run.saver.is_due(step, is_asked, REQUESTS.is_save_due)
    return Decision(step, saves, ending, is_last)


def finish(
    run: Run, record: RunRecord | None, telemetry: Telemetry, monitor: HealthMonitor, last: Decision
) -> int:
    """End the attempt after its last step; a collective. Returns the exit status.

    Raises Unsaved where the last step of the run is in no checkpoint.
    """
    HEART.beat("end")
    step, ending = last.step, last.ending
    if last.saves and not ending:
        unsaved, ending = run.saver.last(step, monitor.health.as_dict(), REQUESTS.now)
    else:
        unsaved = run.saver.drain()
    telemetry.close()
    if unsaved and last.saves and not ending:
        raise Unsaved(f"the last step, {step}, is trained and not saved: {unsaved}")
    peaks = run.ranks.exchange(peak_gib(), "peak memory")
    if record:
        cause, is_saved = ending.cause if ending else "finished", last.saves and not unsaved
        record.close(cause, step=step, is_saved=is_saved, peak_memory_gib=peaks)
        REQUESTS.done()
    return ending.status if ending else FINISHED


def leave_sick(
    run: Run, data: StepData, monitor: HealthMonitor, record: RunRecord | None
) -> NoReturn:
    """End this attempt after a step that no skip can cure: the run goes back, or stops."""
    health = run.recipe.health
    HEART.beat("end")
    run.saver.drain()  # it may be what is gone back to
    process.first_does(lambda: recover(run.folder, data, monitor.judgement, health, record))
    raise Rewound


if __name__ == "__main__":
    make_lossy()
    sys.excepthook = process.print_without_secrets
    HEART.begin()
    REQUESTS.listen()
    try:
        ended = main(sys.argv[1:])
    except Exception:  # of this rank: its traceback first, then the end, without any clean-up
        sys.excepthook(*sys.exc_info())
        ended = FAILED
    process.leave(ended)
