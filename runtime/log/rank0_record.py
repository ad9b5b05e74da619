"""The record that rank 0 keeps of a run while it trains: metrics, events, ledger, console.

    loop -> add(finished step)             -> the step before: metrics.jsonl, TensorBoard, console
         -> bad_step, saved, close         -> events.jsonl
         -> hardware                       -> devices.jsonl, ranks.jsonl, alarms

Rule: only this file reads device scalars, one step after they were made, so that the device never
waits for the host. Units as in runtime.log.metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from base.errors import UserError
from base.units import GIB
from base.values import counted
from checkpoint.format.epochs import Fenced
from checkpoint.load.allowed_changes import RecipeChange
from checkpoint.save.commit import SaveReport
from data.stream.ledger import Ledger
from model.cost import flops_per_token
from parallel.layout import parameters_per_stage
from recipes.schema import Recipe
from record import run_folder
from record.alerts import AlertSender
from record.failure import failure_of
from record.heartbeat import HEART
from record.predictions import EARLY, event_of
from record.requests import AskedEarly
from runtime.ds_config.state_bytes import of_layout
from runtime.engine.engine import StepResult
from runtime.health.verdict import Judgement, Verdict
from runtime.log.console import Console, summary_text
from runtime.log.held_out_loss import Validation
from runtime.log.long_step import LongStep
from runtime.log.metrics import MetricsWriter, StepNumbers, hyper_parameters
from runtime.monitor.clock import TimeSpan
from runtime.monitor.readings import DeviceReading, News, RankTimes
from runtime.monitor.speed import peak_flops
from runtime.process.process import Process
from runtime.resolve import Resolved
from runtime.save_writers import Note

# Kinds of notes at a save that people must learn at once, through the alert command.
PASSED_ON = ("save_stuck", "drift")


@dataclass(frozen=True)
class Finished:
    """A step that was launched and whose scalars are not read yet; `data` is its StepData."""

    data: Any
    lr: float
    result: StepResult
    span: TimeSpan
    losses: torch.Tensor | None  # of the evaluation after it, as Engine.evaluate returns them
    communication_bytes: dict[str, int] | None = None  # by kind, where log.communication counts


class RunRecord:
    """The files and the console of one attempt of a run, from the step after `after_step` on."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        resolved: Resolved,
        process: Process,
        ledger: Ledger,
        tokens_after: Callable[[int], int],
        after_step: int,
        segment: int,
        validation: Validation,
    ):
        self._validation = validation
        self.ledger, self.tokens_after = ledger, tokens_after
        self._folder, self._after_step = folder, after_step
        self.is_closed = False
        self._has_warned = self._is_failing = False
        self._late: Finished | None = None  # the newest step; its scalars are not read yet
        name = recipe.run + (f" segment {segment}" if segment else "")
        self.console = Console(
            name, resolved.last_step, after_step=after_step, every=recipe.log.every
        )
        self._long_step = LongStep(self.console, HEART, resolved.last_step)
        self._warms_up = bool(recipe.seq_len_warmup)
        self._flops_per_token = functools.cache(functools.partial(flops_per_token, recipe.model))
        device = run_folder.device_name(process.device)
        self.writer = MetricsWriter(
            folder,
            world=resolved.layout.world,
            segment=segment,
            after_step=after_step,
            flops_per_token=resolved.flops_per_token,
            peak_flops=peak_flops(device, recipe.cluster.peak_tflops),
            tensorboard=recipe.log.tensorboard,
            wandb=recipe.log.wandb,
            log=self.console.log,
            planned={"last_step": resolved.last_step, "total_steps": resolved.total_steps},
            state_gib=state_gib(recipe, resolved),
        )
        self.alert = AlertSender(recipe.run, recipe.alerts, self.writer.event, self.console.log)
        self.writer.describe(
            hyper_parameters(recipe, resolved.layout, parameters=resolved.num_parameters),
            {name: (folder / name).read_text() for name in ("recipe.yaml", "ds_config.json")},
            unrecorded=[
                *(() if recipe.eval_tokens else ("val_loss", "bits_per_byte", "eval_s")),
                *(() if recipe.log.communication else ("communication_mib",)),
            ],
        )
        self._long_step.start()

    def log(self, lines: Iterable[str]) -> None:
        """Print each text as a line of its own."""
        for line in lines:
            self.console.log(line)

    def add(self, finished: Finished) -> None:
        """Record the step before this one, and keep this one until the next, or until `flush`."""
        self.flush()
        self._late = finished

    def flush(self) -> None:
        """Record the newest step now: read its scalars, which may make the host wait."""
        if self._late is not None:
            late, self._late = self._late, None
            self._write(late)

    def _write(self, finished: Finished) -> None:
        data, result = finished.data, finished.result
        val_loss = bits_per_byte = None
        scalars = {name: float(value) for name, value in result.scalars.items()}
        if finished.losses is not None:
            val_loss, bits_per_byte, by_source = self._validation.numbers(finished.losses.tolist())
            scalars |= by_source
        numbers = StepNumbers(
            data.step,
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=finished.lr,
            tokens=self.tokens_after(data.step),
            tokens_per_step=data.num_tokens,
            targets=result.targets,
            times=finished.span.times(),
            accumulation=len(data.micro_batches),
            skipped=result.skipped,
            val_loss=val_loss,
            bits_per_byte=bits_per_byte,
            communication_bytes=finished.communication_bytes,
            seq_len=data.length if self._warms_up else None,
            flops_per_token=self._flops_per_token(data.length),
            scalars=scalars,
        )
        self.console.step(self.writer.step(numbers))
        if data.step == self._after_step + 1 + EARLY:  # the first one is warm-up
            self.compare_prediction(data.step)

    def compare_prediction(self, step: int | None, peaks_gib: Sequence[float] = ()) -> None:
        """Record and print what the plan predicted beside what was measured so far."""
        found = event_of(self._folder, [peak for peak in peaks_gib if peak is not None])
        if found is not None:
            self.writer.event("prediction", step=step, **found)
            self.console.log(found["text"])

    def sync(self) -> None:
        """Make the lines of all steps durable.

        After a power cut they must be there if the checkpoint of a later step is.
        """
        self.writer.sync()
        self.ledger.sync()

    def hardware(self, step: int, news: Iterable[News]) -> None:
        """Record news about GPUs and ranks; `step` is the step that was launched last."""
        try:
            self._hardware(step, news)
        except OSError as error:  # a full disk costs these readings, not the run
            if not self._has_warned:
                self._has_warned = True
                self.console.log(f"warning: readings of the hardware are not recorded: {error}")

    def _hardware(self, step: int, news: Iterable[News]) -> None:
        for one in news:
            if isinstance(one, DeviceReading):
                self.writer.devices(step, one.host, one.gpus)
            elif isinstance(one, RankTimes):
                self.writer.ranks(one.step, one.own_s)
            else:
                facts = {"step": step, **one.facts}
                if one.kind == "notice" or one.is_quiet:
                    facts |= {"is_quiet": True} if one.is_quiet else {}
                    self.writer.event(one.kind, text=one.text, **facts)
                    if not one.is_quiet:
                        self.console.log(f"warning: {one.text}")
                else:
                    self.alert(one.kind, one.text, **facts)
                    self.writer.card(facts["step"], one.kind, one.text)

    def resumed(self, loaded: Any, changes: Iterable[RecipeChange]) -> None:
        """Record from which checkpoint this attempt goes on, and which knobs differ from it."""
        for path, problems in loaded.damaged:
            for kind in sorted({problem.kind for problem in problems}):
                lines = [problem for problem in problems if problem.kind == kind]
                self.writer.event(
                    "damaged_checkpoint", checkpoint=path.name, damage=kind, problems=lines
                )
            text = f"{path.name} is damaged and was passed over: {problems[0]}"
            self.console.log(f"warning: {text}")
            self._pass_on("damaged_checkpoint", text)
        if loaded.unnamed:
            self.writer.event("unnamed_files", step=loaded.step, files=loaded.unnamed)
            self.console.log(
                f"warning: in the checkpoint of step {loaded.step} lie files that are none of its"
                f" own and were not read: {', '.join(loaded.unnamed[:3])}"
            )
        changed = {change.key: [change.stored, change.now] for change in changes}
        self.writer.event(
            "resumed",
            step=loaded.step,
            load_s=round(loaded.seconds, 3),
            bytes_of_rank_0=loaded.bytes,
            changes=changed,
        )
        self.console.log(f"going on from checkpoint step {loaded.step} ({loaded.seconds:.1f} s)")
        for key, (stored, now) in changed.items():
            self.console.log(f"changed since the checkpoint: {key} {stored} -> {now}")

    def quarantined(self, data: Any) -> None:
        """Record the samples of a step that touch a damaged block of their corpus."""
        self.writer.event(
            "quarantined", step=data.step, data_step=data.data_step, samples=list(data.quarantined)
        )
        self.console.log(
            f"warning: step {data.step}: {counted(len(data.quarantined), 'sample')} in a damaged"
            " block of the corpus: no loss is taken there (data.on_damage=quarantine)"
        )

    def bad_step(self, data: Any, was_skipped: bool, judgement: Judgement) -> None:
        """Record a step that did not move the weights, or is an outlier, with its samples.

        Other verdicts concern several steps and are recorded elsewhere.
        """
        if not was_skipped and judgement.verdict != Verdict.GO_ON:
            return
        reason = judgement.reason
        if not data.is_update:
            reason = "no target is left" if not data.num_targets else "data.skip"
        self.writer.event(
            "skipped" if was_skipped else "outlier",
            step=data.step,
            data_step=data.data_step,
            samples=list(data.sample_range),
            in_a_row=judgement.health.skips_in_a_row if data.is_update else 0,
            reason=reason,
            verdict=str(judgement.verdict),
        )
        if data.is_update:
            done = "skipped" if was_skipped else "not skipped (health.outliers=keep)"
            self.console.log(f"step {data.step}: {reason}: {done}")

    def report(self, news: SaveReport | Note) -> None:
        """Record what became of a save, or a note that was made at one."""
        if isinstance(news, SaveReport):
            self.saved(news)
        else:
            self.writer.event(news.kind, **news.facts)
            loud = "" if news.kind == "interval" else "warning: "
            self.console.log(f"{loud}{news.text}")
            if news.kind in PASSED_ON:
                self._pass_on(news.kind, news.text)

    def saved(self, report: SaveReport) -> None:
        """Record a save (size, time, stall, bandwidth), or why it failed."""
        was_failing, self._is_failing = self._is_failing, not report.ok
        if report.ok:
            self.writer.saved(report.step, report.bytes, report.seconds, report.stall_s)
            for note in report.notes:
                self.console.log(f"checkpoint step {report.step}: {note}")
        else:
            self.writer.event("save_failed", step=report.step, problem=report.problem)
            text = f"no checkpoint of step {report.step}: {report.problem}"
            self.console.log(f"warning: {text}")
            if not was_failing:  # only for the first of several in a row
                self._pass_on("save_failed", text)

    def _pass_on(self, kind: str, text: str) -> None:
        """Start the alert command for what is on record and shown already."""
        self.alert.pass_on(kind, f"{self.alert.run}: {text}")

    def ended(self, error: BaseException) -> None:
        """Record why this attempt ends before its last step, unless its end is recorded already."""
        self._long_step.close()
        if self.is_closed:
            return
        if isinstance(error, Fenced):  # the record belongs to another attempt now
            self.console.close()
            return
        # The newest step is finished and may be the last that this attempt trained. Its scalars
        # cannot be read where the device itself has failed.
        with contextlib.suppress(Exception):
            self.flush()
        cause = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if isinstance(error, UserError):
            cause = "gave_up"  # it had begun, and another start would end in the same way
        if isinstance(error, AskedEarly):
            cause = error.ending.cause
        facts, failure = {}, HEART.failure or failure_of(error)
        if cause in ("failed", "gave_up"):
            facts["error"] = dataclasses.asdict(failure)
        with contextlib.suppress(OSError):  # the disk may be what failed
            if cause != "failed" or not failure.is_consequence:
                self.writer.event(cause, reason=failure.text or failure.type, **facts)
            self.alert.close()
            self.writer.close()
        self.console.close()

    def close(self, cause: str, **facts: Any) -> None:
        """Record the end with `facts`, finish every file, and print the run's numbers."""
        self._long_step.close()
        self.compare_prediction(facts.get("step"), facts.get("peak_memory_gib", ()))
        self.writer.event(cause, **facts)
        self.is_closed = True
        self.alert.close()
        summary = self.writer.finish(is_success=cause == "finished")
        self.ledger.close()
        self.console.close()
        self.console.log(summary_text(summary))
        if cause != "finished" and "is_saved" in facts:
            saved = "saved" if facts["is_saved"] else "not saved"
            self.console.log(
                f"{cause} after step {facts['step']}, {saved}; the same command goes on"
            )


def state_gib(recipe: Recipe, resolved: Resolved) -> float:
    """Training state of a rank of the first pipeline stage, GiB, from the layout."""
    bytes_per_parameter = of_layout(recipe, resolved.layout, resolved.engine)
    parameters = parameters_per_stage(recipe.model, resolved.layout)[0]
    return sum(bytes_per_parameter.values()) * parameters / GIB
