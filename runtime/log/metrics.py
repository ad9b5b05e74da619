"""The record of a run, written by one rank, and the summary computed from it.

    loop -> MetricsWriter.step(numbers) -> metrics.jsonl, exact   -> summary(): a run in numbers
                                        -> runtime.log.event_files (TensorBoard)
                                           -> runtime.log.wandb_mirror, where log.wandb asks for it
                                        -> returns the line       -> runtime.log.console

Rule: a number is computed once, here, and every place that prints it prints this one. Only the rank
that has the loss (global rank 0) makes a writer, under the lock of the run folder.

Units: seconds, tokens, GiB (2**30 bytes), tokens/s over all ranks unless the name says per rank;
mfu is 0..1. No speed includes evaluation or saves. `tokens` counts what the run has consumed up to
and including the step.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base import jsonl
from base.redaction import redact, secret_values
from base.run_variables import LAUNCH
from base.units import GIB, MIB
from base.values import counted
from checkpoint.lineage import lineage_of
from record import attempts, goodput, records
from record.predictions import ranks_of
from record.records import DEVICES, METRICS, METRICS_HAVE, RANKS, read_metrics
from runtime.engine import memory
from runtime.log import wandb_mirror
from runtime.monitor import speed
from runtime.monitor.clock import StepTimes
from runtime.monitor.device_table import throttle_names

# Fields of metrics.jsonl from which `summary` computes a run's numbers.
SUMMED = (
    "first_of_attempt", "val_loss", "bits_per_byte",
    "device_memory_gib", "memory_gib", "tokens_per_s", "tokens",
    "tokens_per_s_per_rank",
    "mfu",
    "step_s", "skipped_steps", "loss",
)  # fmt: skip
# Field of a reading -> its meaning. Each GPU's series are node/<host>/gpu/<index>/<field>.
GPU_SERIES = {
    "temperature_c": "degrees Celsius",
    "memory_temperature_c": "temperature of the memory, degrees Celsius",
    "power_w": "W",
    "sm_clock_mhz": "clock of the processors, MHz",
    "memory_clock_mhz": "clock of the memory, MHz",
    "utilization_percent": "share of the time in which a kernel ran, percent",
    "memory_used_gib": "memory used by all programs, GiB",
    "throttle": "bit mask of the reasons for lower clocks; 4 is the power cap",
    "ecc_corrected": "memory errors since the driver was loaded",
    "ecc_uncorrected": "memory errors since the driver was loaded",
    "pcie_replays": "repeated transfers since the driver was loaded",
}


@dataclass(frozen=True)
class StepNumbers:
    """One finished step in plain numbers, read from the device one step late.

    A tensor in it is a TypeError when it is written: to read it there would make the device wait.
    """

    step: int
    loss: float | None  # mean cross-entropy per target token, nats
    grad_norm: float | None  # before clipping
    lr: float
    tokens: int  # running total of tokens_per_step
    tokens_per_step: int  # of the global batch
    targets: int  # tokens of the global batch that the loss was taken on
    times: StepTimes
    accumulation: int  # micro-batches per rank
    skipped: bool = False
    val_loss: float | None = None
    bits_per_byte: float | None = None  # of the same targets
    communication_bytes: Mapping[str, int] | None = None  # by kind (runtime.engine.communication)
    seq_len: int | None = None  # where it changes from step to step
    flops_per_token: float | None = None  # of this step, where seq_len changes
    scalars: Mapping[str, float] = field(default_factory=dict)  # more numbers from the engine


class MetricsWriter:
    """Writes the record of one run; one writer per run, on the rank that has the loss.

    `after_step` is the step from which this process goes on (0 = from the start): later lines of
    this segment are removed, and readers of the event files forget them. `flops_per_token` comes
    from model.cost, `peak_flops` is one device's (runtime.monitor.speed.peak_flops); without either
    of them `mfu` is null. `planned` = numbers of steps (last_step, total_steps) for the event that
    begins the attempt; `state_gib` = training state of a rank.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: int,
        segment: int = 0,
        after_step: int = 0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        tensorboard: bool = True,
        wandb: str | None = None,
        log: Callable[[str], None] = print,
        planned: Mapping[str, int] = {},
        state_gib: float | None = None,
    ):
        self.folder = Path(folder)
        self.segment, self.world = segment, world
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._tensorboard, self._log, self._state_gib = tensorboard, log, state_gib
        self._file = self._events = self._mirror = None
        self._first_step: int | None = None  # the first step of this attempt
        self._uncharted: set[str] = set()  # fields and families without a chart
        for name in records.HAVE:
            records.make_way(self.folder / name, log)
            records.repair(self.folder / name, log)
        attempts.complete(self.folder)
        self.attempt = attempts.next_number(self.folder)
        if wandb is not None:
            self._mirror = wandb_mirror.Mirror(wandb, self.folder, self.segment, self.attempt, log)
        launch = {"launch": os.environ[LAUNCH]} if LAUNCH in os.environ else {}
        self.event(
            "began",
            segment=segment,
            after_step=after_step,
            world=world,
            started_unix_s=attempts.process_began_unix_s(),
            **planned,
            **launch,
        )
        self.resume(after_step)
        self._report_damage()

    def resume(self, after_step: int) -> None:
        """Go on from `after_step`: remove what this segment wrote past it, also in TensorBoard."""
        self._close_files()
        path = self.folder / METRICS
        removed = records.truncate_after(path, self.segment, after_step)
        if removed:
            self._log(
                f"{path}: removed {counted(removed, 'line')} past step {after_step}, to be"
                " trained again"
            )
        chain = lineage_of(self.folder)
        before = (
            line
            for _, line in records.newest_records(path, METRICS_HAVE)
            if isinstance(line, dict)
            and line["step"] <= after_step
            and chain.holds(line["segment"], line["step"])
        )
        self._skipped_steps = next(before, {}).get("skipped_steps", 0)
        self._after_step = after_step
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open while the run lasts
        if self._tensorboard:
            from runtime.log.event_files import EventFiles, missing, segment_folder

            where = segment_folder(self.folder, self.segment)
            try:
                self._events = EventFiles(
                    where, attempt=self.attempt, after_step=after_step, log=self._log
                )
            except OSError as error:
                self._log(f"warning: {missing(error)}")

    def _report_damage(self) -> None:
        """Record, once, which lines of the record are damaged or missing; the run goes on."""
        known = {event.get("text") for event in records.read_events(self.folder, "damaged_record")}
        for text in records.losses(self.folder, self._after_step):
            if text not in known:
                self.event("damaged_record", text=text)
                self._log(f"warning: {text}")

    def describe(
        self,
        hyper_parameters: Mapping[str, Any],
        texts: Mapping[str, str],
        unrecorded: Collection[str] = (),
    ) -> None:
        """Write the run's description into TensorBoard: hyper-parameters, page of charts, `texts`.

        `hyper_parameters` is a flat mapping (`hyper_parameters()` below makes it); `texts` maps
        file name -> content (recipe.yaml, ds_config.json). Values of knobs that hold secrets are
        masked. Fields in `unrecorded` get no chart and no column, and neither does mfu where the
        peak is not known. Series of GPUs and ranks get their charts with their first point.
        """
        if self._events is None:
            return
        has_mfu = self._flops_per_token is not None and self._peak_flops is not None
        from runtime.log.event_files import FAMILIES, RESULTS, segment_folder

        self._uncharted = {*unrecorded, *([] if has_mfu else ["mfu"]), *FAMILIES}
        self._events.page(without=self._uncharted)
        self._events.legend()
        # Short, because the tab shows only about twelve letters of it.
        session, folder = self.folder.name, segment_folder(self.folder, self.segment)
        if self.segment:
            session += f".{self.segment} after {folder.name.rpartition('-')[2]}"
        columns = {
            field: column
            for field, column in RESULTS.items()
            if field.removeprefix("best_") not in self._uncharted
        }
        self._events.hyper_parameters(hyper_parameters, session, columns)
        for name, content in texts.items():
            language = Path(name).suffix.lstrip(".")
            fenced = f"```{language}\n{redact(content, secret_values(os.environ)).rstrip()}\n```"
            self._events.text(self._after_step, f"recipe/{name}", fenced)
        if self._mirror is not None:
            self._mirror.describe(hyper_parameters)

    def step(self, numbers: StepNumbers) -> dict[str, Any]:
        """Record one finished step and return its line."""
        self._skipped_steps += bool(numbers.skipped)
        written = jsonl.encode(self._line(numbers))
        jsonl.append(self._file, written)
        line = records.parse_line(written)
        if self._events is not None:
            self._events.scalars(numbers.step, line)
        if numbers.times.is_first:
            self._first_step = numbers.step
            self.event("first_step", step=numbers.step)
            if self._events is not None:
                self._events.scalars(numbers.step, goodput.series(self.folder))
        return line

    def _line(self, numbers: StepNumbers) -> dict[str, Any]:
        """The fields of a step's line in metrics.jsonl."""
        times, loss, grad_norm = numbers.times, numbers.loss, numbers.grad_norm
        device_gib, host_gib = memory.peak_device_gib(), memory.peak_host_gib()
        per_s = speed.tokens_per_s(numbers.tokens_per_step, times.step_s)
        if not numbers.targets:  # no target: there is no loss, and null must not read as not finite
            loss = grad_norm = per_s = None
        flops_per_token = numbers.flops_per_token or self._flops_per_token
        line = {
            "step": numbers.step,
            "segment": self.segment,
            "attempt": self.attempt,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": numbers.lr,
            "tokens": numbers.tokens,
            "tokens_per_step": numbers.tokens_per_step,
            "targets": numbers.targets,
            "tokens_per_s": per_s,
            "tokens_per_s_per_rank": None if per_s is None else per_s / self.world,
            "mfu": speed.mfu(per_s, flops_per_token, self._peak_flops, self.world),
            "step_s": times.step_s,
            "data_s": times.data_s,
            "compute_s": times.compute_s,
            "optimizer_s": times.optimizer_s,
            "other_s": times.other_s,
            "eval_s": times.eval_s,
            "memory_gib": host_gib if device_gib is None else device_gib,
            "host_memory_gib": host_gib,
            "device_memory_gib": device_gib,
            "skipped": bool(numbers.skipped),
            "skipped_steps": self._skipped_steps,
            "accumulation": numbers.accumulation,
            "first_of_attempt": times.is_first,
        }
        if self._state_gib is not None:
            line["state_gib"] = self._state_gib
        if numbers.val_loss is not None:
            line["val_loss"] = numbers.val_loss
        if numbers.bits_per_byte is not None:
            line["bits_per_byte"] = numbers.bits_per_byte
        if numbers.seq_len is not None:
            line["seq_len"] = numbers.seq_len
        if numbers.communication_bytes is not None:
            line["communication_mib"] = sum(numbers.communication_bytes.values()) / MIB
            line["communication_bytes"] = dict(numbers.communication_bytes)
        if numbers.scalars:
            line["scalars"] = dict(numbers.scalars)
        return line

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl: an alarm, a verdict, a save, ..."""
        fields = {"segment": self.segment} | fields
        records.record_event(self.folder, kind, attempt=self.attempt, **fields)

    def devices(self, step: int, host: str, gpus: list[dict[str, Any]]) -> None:
        """Record a reading of one host's GPUs: a line per GPU in devices.jsonl, and its series."""
        width = len(str(len(gpus) - 1))
        for gpu in gpus:
            fields = {"step": step, "host": host, **gpu}
            fields["throttle_names"] = throttle_names(gpu.get("throttle", 0))
            records.record(
                self.folder / DEVICES, segment=self.segment, attempt=self.attempt, **fields
            )
            if self._events is not None:
                place = f"node/{host}/gpu/{gpu['index']:0{width}d}"
                series = {
                    f"{place}/{field}": (gpu[field], meaning)
                    for field, meaning in GPU_SERIES.items()
                    if field in gpu
                }
                self._events.points(step, series)
                self._chart(step, "node")

    def ranks(self, step: int, own_s: list[float | None]) -> None:
        """Record each rank's own seconds of a step, in order of rank.

        They become one line in ranks.jsonl and one point in each rank's series.
        """
        fields = {"step": step, "own_s": own_s}
        records.record(self.folder / RANKS, segment=self.segment, attempt=self.attempt, **fields)
        if self._events is not None:
            width = len(str(len(own_s) - 1))
            meaning = "seconds of a step in the rank's own work, without waiting for others"
            series = {
                f"rank/{rank:0{width}d}/own_s": (seconds, meaning)
                for rank, seconds in enumerate(own_s)
                if seconds is not None
            }
            self._events.points(step, series)
            self._chart(step, "rank")

    def _chart(self, step: int, family: str) -> None:
        """Add the charts of a family of series to the page, now that it has a point."""
        if family in self._uncharted:
            self._uncharted.remove(family)
            self._events.page(step, without=self._uncharted)

    def card(self, step: int, kind: str, text: str) -> None:
        """Write an alarm into TensorBoard's text tab."""
        if self._events is not None:
            self._events.text(step, f"alarms/{kind}", text)

    def saved(self, step: int, size_bytes: int, seconds: float, stall_s: float) -> None:
        """Record a save: bytes over all ranks, its seconds, and those that training waited."""
        size_gib = size_bytes / GIB
        fields = {
            "checkpoint_gib": size_gib,
            "checkpoint_s": seconds,
            "checkpoint_stall_s": stall_s,
            "checkpoint_gib_per_s": size_gib / seconds if seconds > 0 else None,
        }
        self.event("saved", step=step, **fields)
        if self._events is not None:
            self._events.scalars(step, fields)

    def sync(self) -> None:
        """Make all lines of steps durable. May be called beside `step`, from another thread."""
        os.fsync(self._file.fileno())

    def finish(self, is_success: bool = True) -> dict[str, Any]:
        """The last call: write the result metrics, close everything, return the summary."""
        result = summary(self.folder, self.segment)
        if self._events is not None:
            step = result["last_step"] or self._after_step
            if step != self._first_step:  # the first step has its point already
                self._events.scalars(step, goodput.series(self.folder))
            self._events.results(step, result)
            self._events.end_session(is_success)
        self.close()
        return result

    def close(self) -> None:
        """Close the files without a result, as after a failure; closing twice is harmless."""
        self._close_files()
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    def _close_files(self) -> None:
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file = self._events = None


def summary(path: Path, segment: int | None = None) -> dict[str, Any]:
    """A run in numbers: its newest segment, or `segment`. `path` = its folder or metrics.jsonl.

    Speeds are medians over steps without the first step of each attempt, which compiles, allocates
    and fills caches; the quartiles show their spread. They are None where no other step was
    recorded. Where attempts had different numbers of ranks, speeds are those of the newest number
    (`ranks`), and `other_ranks` is true. Peak memory is the device's, or the host's where there is
    no device (`memory_of` says which). Losses are None where they were not finite.
    """
    lines = read_metrics(path, segment, SUMMED)
    if segment is None and lines:
        lines = [line for line in lines if line["segment"] == lines[-1]["segment"]]
    worlds = [ranks_of(line) for line in lines]
    ranks = next((world for world in reversed(worlds) if world), None)
    steady = [
        line
        for line, world in zip(lines, worlds, strict=True)
        if not line["first_of_attempt"] and world in (ranks, None)
    ]
    evaluated = [line for line in lines if line.get("val_loss") is not None]
    best = min(evaluated, key=lambda line: line["val_loss"], default={})
    on_device = any(line["device_memory_gib"] is not None for line in lines)
    p25, median, p75 = quartiles([line["tokens_per_s"] for line in steady])
    last = lines[-1] if lines else {}
    return {
        "first_step": lines[0]["step"] if lines else None,
        "last_step": last.get("step"),
        "tokens": last.get("tokens", 0),
        "skipped_steps": last.get("skipped_steps", 0),
        "first_loss": lines[0]["loss"] if lines else None,
        "last_loss": last.get("loss"),
        "val_loss": evaluated[-1]["val_loss"] if evaluated else None,
        "bits_per_byte": evaluated[-1].get("bits_per_byte") if evaluated else None,
        "val_step": evaluated[-1]["step"] if evaluated else None,
        "best_val_loss": best.get("val_loss"),
        "best_val_step": best.get("step"),
        "tokens_per_s": median,
        "tokens_per_s_p25": p25,
        "tokens_per_s_p75": p75,
        "mfu": quartiles([line["mfu"] for line in steady])[1],
        "step_s": quartiles([line["step_s"] for line in steady])[1],
        "peak_memory_gib": max((line["memory_gib"] for line in lines), default=None),
        "memory_of": "device" if on_device else "host",
        "num_steady_steps": len(steady),
        "ranks": ranks,
        "other_ranks": any(world not in (ranks, None) for world in worlds),
    }


def quartiles(values: list[float | None]) -> tuple[float | None, float | None, float | None]:
    """25th percentile, median, 75th percentile of the values that are known."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return (known[0],) * 3 if known else (None,) * 3
    return tuple(statistics.quantiles(known, n=4, method="inclusive"))


def hyper_parameters(recipe, layout, **facts: Any) -> dict[str, Any]:
    """The values by which runs differ, as a flat mapping for the hyper-parameters tab.

    They come from the recipe and the layout, with `facts` added (num_parameters, swept knobs). The
    tab shows only the first few at once; the whole recipe is in TensorBoard's text tab.
    """
    return {
        "zero": str(recipe.zero),
        "ranks": layout.world,
        "micro_batch": layout.micro_batch,
        "precision": recipe.precision,
        "lr": recipe.optim.lr,
        "data_parallel": layout.data,
        "tensor_parallel": layout.tensor,
        "pipeline_stages": layout.pipeline,
        "context_parallel": layout.context,
        "batch_tokens": str(recipe.batch_tokens),
        "seq_len": recipe.seq_len,
        "recompute": recipe.recompute,
        "compile": recipe.compile,
        "schedule": recipe.optim.schedule,
        "warmup": str(recipe.warmup),
        "seed": recipe.seed,
        **facts,
    }
