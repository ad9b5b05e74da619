"""The run: recipe -> layout -> engine -> stream -> loop. Read this first.

    python pretrain.py recipe=tiny zero=3 run=tiny-z3              one process
    torchrun --nproc-per-node 8 pretrain.py recipe=1b              or srun, or `make pretrain`

    every rank    compose, check -> join -> stream, engine -> loop: batch -> step -> record
    rank 0 also   run folder, metrics, ledger, console

The loop is the same for every layout. Step N (from 1) is the N-th update of the weights; its batch
and its learning rate are functions of N alone. The loss of step N is read after step N+1 has been
launched, so no step waits for its own.

Exit status: 0 finished; 93 refused, or stopped for good: trying again would not help.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from data.collect import LEDGER_EVERY, Collector
from data.ledger import Ledger
from data.schedule import read_schedule
from data.stream import StepData, Stream, open_stream
from data.windows import Batch
from parallel.layout import Layout, startable
from recipes.compose import compose_command, recipe_yaml
from recipes.schema import Recipe, UserError
from runtime import process, run_folder
from runtime.batches import gather_hashes, to_device
from runtime.clock import Span, StepClock, cuda_clock
from runtime.console import Console, summary_text
from runtime.engine import Engine, StepResult, build
from runtime.learning_rate import learning_rate
from runtime.metrics import MetricsWriter, hyper_parameters
from runtime.settle import Settled, settle
from runtime.speed import peak_flops

ROOT = Path(__file__).resolve().parent
DO_NOT_RETRY = 93


def main(arguments: list[str]) -> int:
    """Run one command line; returns the exit status."""
    try:
        run = prepare(arguments)
        train(run)
    except UserError as error:
        process.report(error)
        return DO_NOT_RETRY
    finally:
        process.finish()
    return 0


@dataclass
class Run:
    """What one rank needs for the loop."""

    recipe: Recipe
    settled: Settled
    stream: Stream
    data_rank: int
    held_out: list[Batch]
    engine: Engine
    process: process.Process
    folder: Path
    warnings: list[str]


def prepare(arguments: list[str]) -> Run:
    """From the command line to an engine that is ready; refuses before anything is written."""
    composed = compose_command(arguments)
    recipe = composed.recipe
    schedule = read_schedule(recipe.batch_tokens, recipe.seq_len)
    settled = settle(recipe, process.launched_world(), schedule)
    startable(settled.layout)
    folder = ROOT / "runs" / recipe.run
    run_folder.refuse_existing(folder)
    # Builds the corpus where it is absent: one rank of each host, the others wait for its lock.
    stream = open_stream(
        recipe.data, recipe.seed, recipe.seq_len, schedule, ROOT, recipe.model.vocab_size
    )
    warnings = [*composed.warnings, *settled.warnings, *stream.check(settled.last_step)]
    place = settled.layout.coordinates(process.launched_rank())
    held_out = evaluation_batches(recipe, settled.layout, stream, place.data)

    me = process.start(recipe.cluster)
    engine = build(recipe, settled.layout, settled.config, me)
    run = Run(recipe, settled, stream, place.data, held_out, engine, me, folder, warnings)
    process.first_does(lambda: run_folder.claim(folder, description(run)))
    return run


def train(run: Run) -> None:
    """The loop: one turn per step."""
    recipe, settled, engine, me = run.recipe, run.settled, run.engine, run.process
    layout, last_step = settled.layout, settled.last_step
    record = Record(run) if me.is_first else None
    clock = cuda_clock() if me.device.type == "cuda" else StepClock()
    collector = Collector(
        record.ledger if record else None, lambda own: gather_hashes(own, me.device), LEDGER_EVERY
    )
    late: Finished | None = None
    skips_in_a_row = 0

    with run.stream.prefetch(
        1, last_step, run.data_rank, layout.data, layout.micro_batch
    ) as batches:
        clock.start()
        for step in range(1, last_step + 1):
            with clock.phase("data"):
                data = next(batches)
                micro_batches = [to_device(batch, me.device) for batch in data.micro_batches]
            lr = learning_rate(step, recipe.optim, settled.warmup_steps, settled.total_steps)
            engine.set_lr(lr)
            result = engine.train_step(
                micro_batches, data.num_targets, data.num_tokens, clock.phase
            )
            val_loss = None
            if run.held_out and (step == last_step or is_due(step, recipe.eval_every)):
                with clock.phase("eval"):
                    val_loss = engine.evaluate(
                        to_device(batch, me.device) for batch in run.held_out
                    )
            finished = Finished(data, lr, result, clock.finish(), val_loss)

            collector.add(data, is_last=step == last_step)
            skips_in_a_row = skips_in_a_row + 1 if result.skipped else 0
            if record:
                if late:
                    record.write(late)
                late = finished
                if result.skipped:
                    record.skipped(data, skips_in_a_row)
            if skips_in_a_row >= recipe.optim.max_skips:
                collector.flush()
                if record:
                    record.write(finished)
                    record.close("stopped")
                raise process.Shared(stopped_by_skips(run, step, skips_in_a_row))
    if record:
        record.write(late)
        record.close("finished")


def stopped_by_skips(run: Run, step: int, in_a_row: int) -> str:
    """Why the run ended before its last step, and what to do."""
    return (
        f"stopped after step {step}: gradients were not finite in {in_a_row} steps in a row"
        f" (optim.max_skips={run.recipe.optim.max_skips}); the weights are those of step"
        f" {step - in_a_row}. Lower optim.lr, or look at the samples named in"
        f" {run.folder}/events.jsonl"
    )


def is_due(step: int, every: int) -> bool:
    """Whether something done every `every` steps is done after `step`; 0 = never."""
    return every > 0 and step % every == 0


def evaluation_batches(
    recipe: Recipe, layout: Layout, stream: Stream, data_rank: int
) -> list[Batch]:
    """One rank's held-out micro-batches, the same at every evaluation; none with eval_tokens=0."""
    if recipe.eval_tokens == 0:
        return []
    return stream.evaluation(data_rank, layout.data, layout.micro_batch, recipe.eval_tokens)


def description(run: Run) -> dict[str, str | dict]:
    """The documents of the run folder that say what the run is."""
    return {
        "recipe.yaml": recipe_yaml(run.recipe),
        "layout.json": run.settled.layout.as_dict(),
        "ds_config.json": run.settled.config,
        "environment.json": run_folder.environment(ROOT, run.process.device),
    }


@dataclass(frozen=True)
class Finished:
    """A step that was launched and whose scalars are still to be read."""

    data: StepData
    lr: float
    result: StepResult
    span: Span
    val_loss: torch.Tensor | None


class Record:
    """What rank 0 keeps of a run: metrics, events, ledger, console."""

    def __init__(self, run: Run):
        recipe, settled = run.recipe, run.settled
        self.schedule = run.stream.schedule
        self.ledger = Ledger(run.folder / "ledger")
        self.console = Console(recipe.run, settled.last_step, every=recipe.log.every)
        self.writer = MetricsWriter(
            run.folder,
            world=settled.layout.world,
            flops_per_token=settled.flops_per_token,
            peak_flops=peak_flops(
                run_folder.device_name(run.process.device), recipe.cluster.peak_tflops
            ),
            tensorboard=recipe.log.tensorboard,
            wandb=recipe.log.wandb,
            say=self.console.say,
        )
        self.writer.describe(
            hyper_parameters(recipe, settled.layout, parameters=settled.num_parameters),
            {name: (run.folder / name).read_text() for name in ("recipe.yaml", "ds_config.json")},
        )
        for line in banner(run):
            self.console.say(line)

    def write(self, finished: Finished) -> None:
        """Read the scalars of a step and put them on record."""
        data, result = finished.data, finished.result
        line = self.writer.step(
            data.step,
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=finished.lr,
            tokens=self.schedule.tokens_after(data.step),
            tokens_per_step=data.num_tokens,
            targets=data.num_targets,
            times=finished.span.times(),
            accumulation=len(data.micro_batches),
            skipped=result.skipped,
            val_loss=None if finished.val_loss is None else float(finished.val_loss),
        )
        self.console.step(line)

    def skipped(self, data: StepData, in_a_row: int) -> None:
        """Put a step whose gradients were not finite on record, with the samples that made it."""
        self.writer.event(
            "skipped",
            step=data.step,
            data_step=data.data_step,
            samples=list(data.sample_range),
            in_a_row=in_a_row,
            reason="gradients not finite",
        )

    def close(self, cause: str) -> None:
        """Finish every file and print the run's numbers."""
        self.writer.event(cause)
        summary = self.writer.finish(is_success=cause == "finished")
        self.ledger.close()
        self.console.close()
        print(summary_text(summary))


def banner(run: Run) -> list[str]:
    """What is about to happen, for a person."""
    recipe, settled = run.recipe, run.settled
    lines = [
        f"{recipe.run}: {settled.num_parameters:,} parameters, {settled.total_steps} steps of"
        f" {run.stream.schedule.sequences_at(1)} x {recipe.seq_len} tokens, {recipe.precision} on"
        f" {run.process.device.type}",
        settled.layout.describe(),
    ]
    for use in run.stream.usage(settled.last_step):
        lines.append(
            f"source {use.uid}: {use.tokens:,} tokens, {use.epochs:.2f} epochs ({use.corpus})"
        )
    lines += [f"warning: {warning}" for warning in run.warnings]
    return [*lines, f"record in {run.folder.relative_to(ROOT)}/; look at it with: make tensorboard"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
