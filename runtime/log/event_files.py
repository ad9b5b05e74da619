"""TensorBoard's event files for one segment of a run: series, charts, texts, hyper-parameters.

    runs/<run>/tensorboard/segment-00/events.out.tfevents.<second>.<host>.<process>.<attempt>

Rule: the x axis of every series is the optimizer step; tokens are a series of their own. Units
stand in each series' tag, or in the card `series` of the text tab (TensorBoard's fast loader shows
no descriptions).

Records are written with the tensorboard package's own record writer and protos, synchronously, and
passed to the system after each step: a killed run loses nothing, and neither TensorFlow nor torch
is imported. The package's EventFileWriter is not used: it imports TensorFlow wherever it is
installed, keeps up to two minutes of records in memory, and its file names can sort two attempts in
the wrong order. A restart writes a SessionLog START record with its first step; readers then
forget what an earlier attempt wrote from that step on.
"""

from __future__ import annotations

import math
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as page_metadata
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import plugin_data_pb2 as hparams_pb2
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from checkpoint.lineage import lineage, read

# Field of a metrics line -> (tag, meaning). TensorBoard sorts by tag and makes one group per word
# before the slash; the groups are named so that the loss, which people look for, comes first.
SERIES = {
    "loss": ("loss/train", "mean cross-entropy per target token of the step's global batch, nats"),
    "val_loss": (
        "loss/validation",
        "mean cross-entropy per target token of held-out documents, nats",
    ),
    "bits_per_byte": (
        "validation/bits_per_byte",
        "validation loss in bits per UTF-8 byte of the held-out text; does not depend on the"
        " tokenizer",
    ),
    "memory_gib": (
        "memory/peak_gib",
        "peak of rank 0 so far, GiB: its device, or host without one",
    ),
    "state_gib": (
        "memory/state_gib",
        "training state of a rank, GiB: weights, gradients and optimizer, from the layout",
    ),
    "device_memory_gib": ("memory/device_gib", "peak allocated on rank 0's device so far, GiB"),
    "host_memory_gib": ("memory/host_gib", "peak resident memory of rank 0's process so far, GiB"),
    "communication_mib": (
        "network/mib_per_step",
        "payload of the step's collectives as rank 0 sees them, MiB",
    ),
    "grad_norm": ("optimizer/grad_norm", "global gradient norm before clipping"),
    "lr": ("optimizer/lr", "learning rate of the step"),
    "tokens": ("progress/tokens", "tokens consumed so far, all ranks"),
    "tokens_per_step": ("progress/tokens_per_step", "tokens of the step, all ranks"),
    "seq_len": ("progress/seq_len", "tokens that the model sees at once, while it is warmed up"),
    "accumulation": ("progress/accumulation", "micro-batches per rank and step"),
    "skipped_steps": (
        "progress/skipped_steps",
        "steps so far that did not move the weights",
    ),
    "attempt": (
        "progress/attempt",
        "process start that trained the step: it rises at each restart",
    ),
    "tokens_per_s": (
        "throughput/tokens_per_s",
        "all ranks; evaluation and saves excluded; low in the first step of an attempt, which warms"
        " up",
    ),
    "tokens_per_s_per_rank": ("throughput/tokens_per_s_per_rank", "evaluation and saves excluded"),
    "mfu": (
        "throughput/mfu",
        "model FLOP utilisation, 0..1: forward and backward, no recomputation / dense bf16 peak",
    ),
    "step_s": ("time/step_s", "seconds per step; evaluation and saves excluded"),
    "data_s": ("time/data_s", "seconds waiting for the batch"),
    "compute_s": ("time/compute_s", "seconds in forward and backward, all micro-batches"),
    "optimizer_s": ("time/optimizer_s", "seconds in the optimizer step"),
    "other_s": ("time/other_s", "seconds of the step outside data, compute and optimizer"),
    "checkpoint_gib": ("saves/size_gib", "size of the checkpoint of this step, GiB"),
    "checkpoint_s": ("saves/save_s", "seconds from the start of the save to its commit"),
    "checkpoint_stall_s": ("saves/stall_s", "seconds that training waited for it"),
    "checkpoint_gib_per_s": ("saves/gib_per_s", "size / seconds of the save, all ranks"),
    "goodput_useful": (
        "wall_clock/goodput",
        "share of the wall clock since the first attempt, 0..1: steps whose update is in the"
        " weights",
    ),
    "goodput_redone": ("wall_clock/redone", "share: steps trained again later"),
    "goodput_stall": ("wall_clock/stall", "share: training waited for a save or a batch"),
    "goodput_restart": (
        "wall_clock/restart",
        "share: from a failure to training again (detect, restart, start, load)",
    ),
    "eval_s": ("time/eval_s", "seconds of the evaluation after the step"),
}
EXTRA = "a number that the engine adds to the result of a step (StepResult.scalars)"
ONLY_WHEN_ANY = ("eval_s",)  # a zero at every step without an evaluation would hide the points

# field of a summary -> (tag, column of the hyper-parameters tab, which shows five at once)
RESULTS = {
    "tokens_per_s": ("result/tokens_per_s", "tokens/s, all ranks (median)"),
    "mfu": ("result/mfu", "MFU (median)"),
    "peak_memory_gib": ("result/peak_memory_gib", "peak memory of rank 0, GiB"),
    "val_loss": ("result/val_loss", "validation loss (last)"),
    "bits_per_byte": ("result/bits_per_byte", "bits per byte (last)"),
    "last_loss": ("result/train_loss", "train loss (last)"),
    "best_val_loss": ("result/best_val_loss", "validation loss (best)"),
    "step_s": ("result/step_s", "s/step (median)"),
}

# Columns of values that the hyper-parameters tab shows before anyone asks for more; it sorts them
# by name, those marked as differing first.
NUM_SHOWN = 5

# The custom-scalars page: category -> chart title -> series, a regular expression. One series per
# chart: the lines of a chart are then runs, each in its colour. Only those of GPUs and ranks share
# one, so that the odd one out is seen.
PAGE = {
    "Learning": {
        "Training loss, nats per token": "loss/train",
        "Validation loss, nats per token": "loss/validation",
        "Validation loss, bits per byte": "validation/bits_per_byte",
        "Gradient norm before clipping": "optimizer/grad_norm",
        "Learning rate": "optimizer/lr",
    },
    "Speed and memory": {
        "Throughput, tokens/s over all ranks": "throughput/tokens_per_s",
        "Model FLOP utilisation, 0..1": "throughput/mfu",
        "Training state of a rank, GiB": "memory/state_gib",
        "Peak memory of rank 0, GiB": "memory/peak_gib",
        "Communication of rank 0, MiB per step": "network/mib_per_step",
    },
    "Where the seconds of a step go": {
        "Step, s": "time/step_s",
        "Forward and backward, s": "time/compute_s",
        "Optimizer, s": "time/optimizer_s",
        "Waiting for data, s": "time/data_s",
        "Other, s": "time/other_s",
    },
    "Outside the step": {
        "Evaluation, s": "time/eval_s",
        "Training waited for the save, s": "saves/stall_s",
        "Goodput: share of the wall clock in steps that count": "wall_clock/goodput",
    },
    "The machines": {
        "Own work of each rank, s per step": "rank/.+/own_s",
        "GPU temperature, C": "node/.+/temperature_c",
        "GPU power, W": "node/.+/power_w",
        "GPU clock, MHz": "node/.+/sm_clock_mhz",
    },
}
FAMILIES = ("rank", "node")  # series that only some runs have, known when their first point comes


def segment_folder(run_folder: Path, segment: int) -> Path:
    """The folder with the event files of a segment.

    TensorBoard shows its name as the name of a run, so it sorts by number and contains the step
    after which the segment leaves the one before.
    """
    after = lineage(read(Path(run_folder)), segment).after if segment else 0
    name = f"segment-{segment:02d}" + (f"-after-{after}" if segment else "")
    return Path(run_folder) / "tensorboard" / name


class EventFiles:
    """The event file of one attempt of one segment, which goes on from `after_step`.

    Event files are only a view. A full disk costs points, which `log` reports once, and never the
    run.
    """

    def __init__(
        self, folder: Path, *, attempt: int, after_step: int, log: Callable[[str], None] = print
    ):
        self._log, self._has_warned = log, False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _next_name(folder, attempt)
        self._writer = RecordWriter(open(path, "xb"))  # noqa: SIM115 - RecordWriter closes it
        self._described: set[str] = set()
        self._write(event_pb2.Event(file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(session_log=start, step=after_step + 1))
        self._try(self._writer.flush)

    def scalars(self, step: int, line: Mapping[str, Any]) -> None:
        """Write the series of one metrics line; a field that is missing or None has no point."""
        points = []
        for field, (tag, meaning) in SERIES.items():
            number = line.get(field)
            if field in line.get("non_finite", ()):
                number = math.nan
            if number is None or (field in ONLY_WHEN_ANY and number == 0):
                continue
            points.append(self._scalar(tag, number, meaning))
        for name, number in line.get("scalars", {}).items():
            points.append(self._scalar(tag_of(name), math.nan if number is None else number, EXTRA))
        self._summary(step, points)

    def points(self, step: int, series: Mapping[str, tuple[float, str]]) -> None:
        """Write a point of each series; `series` maps tag -> (number, meaning)."""
        self._summary(step, [self._scalar(tag, *each) for tag, each in series.items()])

    def results(
        self,
        step: int,
        summary: Mapping[str, Any],
        columns: Mapping[str, tuple[str, str]] = RESULTS,
    ) -> None:
        """Write result metrics, the columns of the hyper-parameters tab."""
        self._summary(
            step,
            [
                self._scalar(tag, summary[field], title)
                for field, (tag, title) in columns.items()
                if summary.get(field) is not None
            ],
        )

    def page(self, step: int = 0, *, without: Collection[str] = ()) -> None:
        """Write the custom-scalars page, without the charts of fields that are not recorded.

        `without` contains fields of SERIES, and names of FAMILIES. TensorBoard shows the newest of
        several pages.
        """
        families = tuple(f"{name}/" for name in FAMILIES if name in without)
        empty = {SERIES[field][0] for field in without if field in SERIES}
        layout = layout_pb2.Layout()
        for category, charts in PAGE.items():
            drawn = {
                title: tag
                for title, tag in charts.items()
                if tag not in empty and not tag.startswith(families)
            }
            group = layout.category.add(title=category) if drawn else None
            for title, tag in drawn.items():
                group.chart.add(title=title).multiline.tag.append(f"^{tag}$")
        self._text_like(
            step,
            page_metadata.CONFIG_SUMMARY_TAG,
            layout.SerializeToString(),
            page_metadata.create_summary_metadata(),
        )

    def legend(self) -> None:
        """Write the text card with the meaning of each series."""
        rows = "".join(f"| {tag} | {meaning} |\n" for tag, meaning in sorted(SERIES.values()))
        self.text(0, "series", f"| series | what it is |\n|---|---|\n{rows}")

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write a text card."""
        self._text_like(
            step, tag, markdown.encode(), text_metadata.create_summary_metadata(tag, "")
        )

    def image(self, step: int, tag: str, png: bytes) -> None:
        """Write a picture; `png` is the content of a PNG file."""
        # Header of a PNG file: 8 bytes of signature, length, "IHDR", then width and height.
        width, height = struct.unpack(">II", png[16:24])
        picture = summary_pb2.Summary.Image(
            width=width, height=height, colorspace=4, encoded_image_string=png
        )
        self._summary(step, [summary_pb2.Summary.Value(tag=tag, image=picture)])

    def hyper_parameters(
        self,
        values: Mapping[str, Any],
        name: str,
        columns: Mapping[str, tuple[str, str]] = RESULTS,
    ) -> None:
        """Make `name` a row of the hyper-parameters tab, with `values`, and `columns` as metrics.

        The tab shows the first NUM_SHOWN of `values`; a check box shows each of the others.
        """
        experiment = api_pb2.Experiment()
        session = hparams_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
        for index, (key, value) in enumerate(values.items()):
            info = experiment.hparam_infos.add(name=key, differs=index < NUM_SHOWN)
            if isinstance(value, bool):
                info.type = api_pb2.DATA_TYPE_BOOL
                session.hparams[key].bool_value = value
            elif isinstance(value, float):
                info.type = api_pb2.DATA_TYPE_FLOAT64
                session.hparams[key].number_value = value
            else:  # TensorBoard would show the integer 2 as 2.0000
                info.type = api_pb2.DATA_TYPE_STRING
                session.hparams[key].string_value = str(value)
        for tag, title in columns.values():
            experiment.metric_infos.add(name=api_pb2.MetricName(tag=tag), display_name=title)
        self._hparams("experiment", experiment)
        self._hparams("session_start_info", session)

    def end_session(self, is_success: bool) -> None:
        """Mark the session as over in the hyper-parameters tab."""
        status = api_pb2.STATUS_SUCCESS if is_success else api_pb2.STATUS_FAILURE
        end = hparams_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        self._hparams("session_end_info", end)

    def close(self) -> None:
        """Close the file. Nothing is pending, because each call above has flushed its records."""
        self._try(self._writer.close)

    def _scalar(self, tag: str, number: float, meaning: str):
        # The older of the two encodings: every reader knows it, and TensorBoard's EventAccumulator
        # forgets its points at a restart, which it does not do for scalars written as tensors.
        value = summary_pb2.Summary.Value(tag=tag, simple_value=number)
        if tag not in self._described:  # readers keep the first description of a tag
            self._described.add(tag)
            value.metadata.CopyFrom(scalar_metadata.create_summary_metadata("", meaning))
        return value

    def _text_like(self, step: int, tag: str, content: bytes, metadata) -> None:
        shape = tensor_shape_pb2.TensorShapeProto()
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[content], tensor_shape=shape
        )
        self._summary(step, [summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def _hparams(self, kind: str, content) -> None:
        data = hparams_pb2.HParamsPluginData(**{kind: content}, version=0)
        plugin = summary_pb2.SummaryMetadata.PluginData(
            plugin_name="hparams", content=data.SerializeToString()
        )
        shape = tensor_shape_pb2.TensorShapeProto(
            dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=0)]
        )
        value = summary_pb2.Summary.Value(
            tag=f"_hparams_/{kind}",
            tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=shape),
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
        )
        self._summary(0, [value])

    def _summary(self, step: int, values: list) -> None:
        self._write(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))
        self._try(self._writer.flush)

    def _write(self, event) -> None:
        event.wall_time = time.time()
        self._try(lambda: self._writer.write(event.SerializeToString()))

    def _try(self, act: Callable[[], object]) -> None:
        # Python's buffer keeps whole records that the disk did not take, for the next try.
        try:
            act()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._log(f"warning: {missing(error)}")


def tag_of(name: str) -> str:
    """The tag of an extra scalar of the engine: its name, in a group `extra` if it names none."""
    return name if "/" in name else f"extra/{name}"


def missing(error: OSError) -> str:
    """The warning about an event file that cannot be written."""
    return f"TensorBoard gets no points: {error}; metrics.jsonl has them all"


def _next_name(folder: Path, attempt: int) -> str:
    """A file name that sorts after those of all earlier attempts, also where clocks differ.

    Readers take files in the order of their names. The name begins with the second of creation,
    because W&B's mirror relies on second and host name.
    """
    seconds = [
        int(found[1])
        for path in folder.iterdir()
        if (found := re.search(r"tfevents\.(\d+)", path.name))
    ]
    second = max([int(time.time()), *(known + 1 for known in seconds)])
    return f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{attempt}"
