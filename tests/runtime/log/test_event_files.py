"""runtime.log.event_files: read back with TensorBoard's own readers."""

import errno
import io
import math
import re

import pytest
from metric_lines import make_writer, write_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata as hparams

from record.records import read_metrics
from runtime.log import event_files
from runtime.log.event_files import FAMILIES, ONLY_WHEN_ANY, PAGE, RESULTS, SERIES, segment_folder
from runtime.log.metrics import MetricsWriter, StepNumbers
from runtime.monitor.clock import StepTimes


def train(folder, first, last, *, after_step, loss_offset=0.0, tokens_of=lambda step: 100, **given):
    """One attempt that records steps first..last; evaluates at every third, saves at every
    fifth.
    """
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(
        folder, world=2, after_step=after_step, flops_per_token=1e6, peak_flops=1e9, **given
    )
    for step in range(first, last + 1):
        times = StepTimes(
            step_s=0.5,
            data_s=0.1,
            compute_s=0.2,
            optimizer_s=0.1,
            other_s=0.1,
            eval_s=1.0 if step % 3 == 0 else 0.0,
            save_s=2.0 if step % 5 == 0 else 0.0,
            is_first=step == first,
        )
        writer.step(
            StepNumbers(
                step,
                loss=loss_offset + step,
                grad_norm=math.nan if step == 2 else 1.0,
                lr=1e-3,
                tokens=sum(tokens_of(number) for number in range(1, step + 1)),
                tokens_per_step=tokens_of(step),
                targets=tokens_of(step),
                times=times,
                accumulation=2,
                skipped=step == 2,
                val_loss=loss_offset + step + 0.5 if step % 3 == 0 else None,
                bits_per_byte=1.5 if step % 3 == 0 else None,
            )
        )
    return writer


def read(folder, segment=0) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(segment_folder(folder, segment)), size_guidance={"scalars": 0}
    )
    return accumulator.Reload()


def points(accumulator, tag) -> dict[int, float]:
    """step -> value of a series; a step that stands there twice fails."""
    events = accumulator.Scalars(tag)
    found = {event.step: event.value for event in events}
    assert len(found) == len(events), f"{tag}: a step has two values"
    return found


def text_of(accumulator, tag) -> str:
    return accumulator.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def test_x_is_the_optimizer_step_for_every_series_also_when_the_batch_changes(tmp_path):
    """Two ranks, accumulation 2, a batch ramp at step 3: x never jumps, tokens have a series."""
    folder = tmp_path / "run"
    ramp = lambda step: 100 if step < 3 else 400  # noqa: E731
    train(folder, 1, 6, after_step=0, tokens_of=ramp).close()
    accumulator = read(folder)
    others = ("saves/", "wall_clock/")  # of saves, and of attempts
    tags = {tag for tag, _ in SERIES.values() if not tag.startswith(others)}
    # Not in this run: a device, counted communication, a layout, a warm-up of the length.
    tags -= {"memory/device_gib", "network/mib_per_step", "memory/state_gib", "progress/seq_len"}
    seen = {tag for tag in accumulator.Tags()["scalars"] if not tag.startswith("wall_clock/")}
    assert seen - {"memory/device_gib"} == tags
    sparse = {SERIES[field][0] for field in (*ONLY_WHEN_ANY, "val_loss", "bits_per_byte")}
    for tag in tags - sparse:
        assert list(points(accumulator, tag)) == [1, 2, 3, 4, 5, 6], tag
    assert list(points(accumulator, "progress/tokens").values()) == [
        100,
        200,
        600,
        1000,
        1400,
        1800,
    ]
    assert points(accumulator, "loss/validation") == {3: 3.5, 6: 6.5}
    assert points(accumulator, "time/eval_s") == {3: 1.0, 6: 1.0}
    assert points(accumulator, "throughput/tokens_per_s")[6] == 800.0
    assert points(accumulator, "throughput/mfu")[6] == pytest.approx(0.4)
    assert math.isnan(points(accumulator, "optimizer/grad_norm")[2])


def test_a_reader_sees_one_value_per_step_those_of_the_resumed_attempt(tmp_path):
    """Killed after step 7, saved at 5, run again to 10."""
    folder = tmp_path / "run"
    train(folder, 1, 7, after_step=0).close()
    train(folder, 6, 10, after_step=5, loss_offset=100).close()
    accumulator = read(folder)
    expected = {step: step + (0.0 if step <= 5 else 100.0) for step in range(1, 11)}
    assert points(accumulator, "loss/train") == expected
    assert points(accumulator, "loss/validation") == {3: 3.5, 6: 106.5, 9: 109.5}
    attempts = points(accumulator, "progress/attempt")
    assert attempts == {step: 1 if step <= 5 else 2 for step in range(1, 11)}


def test_a_restart_is_marked_with_its_first_step(tmp_path):
    folder = tmp_path / "run"
    train(folder, 1, 3, after_step=0).close()
    train(folder, 3, 4, after_step=2).close()
    starts = []
    for path in sorted(segment_folder(folder, 0).iterdir()):
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                starts.append(event.step)
    assert starts == [1, 3]


def test_files_of_later_attempts_sort_last_even_where_a_clock_stands_still_or_goes_back(
    tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    for attempt, second in enumerate([2_000_000_000, 2_000_000_000, 1_900_000_000], start=1):
        monkeypatch.setattr(event_files.time, "time", lambda second=second: second)
        monkeypatch.setattr(event_files.os, "getpid", lambda attempt=attempt: 1000 // attempt)
        train(folder, 1, 3, after_step=0, loss_offset=100 * attempt).close()
    assert points(read(folder), "loss/train") == {1: 301, 2: 302, 3: 303}


def test_a_killed_run_loses_no_step(tmp_path):
    """Nothing is closed or flushed by the test: each step is in the file when it was recorded."""
    folder = tmp_path / "run"
    writer = train(folder, 1, 4, after_step=0)
    assert list(points(read(folder), "loss/train")) == [1, 2, 3, 4]
    writer.close()


def test_a_disk_that_takes_no_points_for_a_while_costs_nothing_but_a_line(tmp_path):
    class Full(io.FileIO):
        is_full = False

        def write(self, data):
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    reported = []
    files = event_files.EventFiles(tmp_path / "one", attempt=1, after_step=0, log=reported.append)
    [path] = (tmp_path / "one").iterdir()
    disk = Full(path, "a")
    files._writer = event_files.RecordWriter(io.BufferedWriter(disk))
    for step in range(1, 6):
        disk.is_full = step in (2, 3)
        files.scalars(step, {"loss": step})
    assert len(reported) == 1
    assert "TensorBoard gets no points: [Errno 28]" in reported[0]
    shown = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    assert list(points(shown, "loss/train")) == [1, 2, 3, 4, 5]
    disk.is_full = True
    files.scalars(6, {"loss": 6})
    files.close()


def test_where_no_event_file_can_be_made_the_record_is_kept_all_the_same(tmp_path):
    reported, folder = [], tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("no folder")
    train(folder, 1, 3, after_step=0, log=reported.append).finish()
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3]
    assert len(reported) == 1
    assert "TensorBoard gets no points" in reported[0]


def test_only_one_event_file_is_written_per_attempt_and_segment(tmp_path):
    folder = tmp_path / "run"
    train(folder, 1, 2, after_step=0).close()
    train(folder, 2, 3, after_step=1, segment=1).close()
    assert [len(list(segment_folder(folder, segment).iterdir())) for segment in (0, 1)] == [1, 1]
    assert list(points(read(folder, 0), "loss/train")) == [1, 2]
    assert list(points(read(folder, 1), "loss/train")) == [2, 3]


def test_without_tensorboard_no_event_file_is_written(tmp_path):
    writer = train(tmp_path / "run", 1, 2, after_step=0, tensorboard=False)
    writer.describe({"lr": 0.1}, {"recipe.yaml": "seed: 1\n"})
    writer.finish()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_hyper_parameters_have_their_values_and_the_result_metrics_of_the_run(tmp_path):
    folder = tmp_path / "run"
    writer = train(folder, 1, 6, after_step=0)
    values = {"zero": "2", "lr": 3e-4, "compile": True, "ranks": 2, "seed": 1, "seq_len": 64}
    writer.describe(values, {})
    result = writer.finish()
    accumulator = read(folder)
    content = accumulator.PluginTagToContent("hparams")
    experiment = hparams.parse_experiment_plugin_data(content[hparams.EXPERIMENT_TAG])
    assert [info.name for info in experiment.hparam_infos] == list(values)
    assert [info.differs for info in experiment.hparam_infos] == [True] * 5 + [False]
    metric_tags = [info.name.tag for info in experiment.metric_infos]
    assert metric_tags == [tag for tag, _ in RESULTS.values()]
    start = hparams.parse_session_start_info_plugin_data(content[hparams.SESSION_START_INFO_TAG])
    assert start.hparams["zero"].string_value == "2"
    assert start.hparams["ranks"].string_value == "2"  # a number would be shown as 2.0000
    assert start.hparams["lr"].number_value == 3e-4
    assert start.hparams["compile"].bool_value is True
    assert start.group_name == "run"
    end = hparams.parse_session_end_info_plugin_data(content[hparams.SESSION_END_INFO_TAG])
    assert end.status == 1  # success
    for field, (tag, _) in RESULTS.items():
        assert points(accumulator, tag) == {6: pytest.approx(result[field], rel=1e-6)}
    rewound = train(folder, 7, 7, after_step=6, segment=1)
    rewound.describe(values, {})
    rewound.close()
    content = read(folder, 1).PluginTagToContent("hparams")
    start = hparams.parse_session_start_info_plugin_data(content[hparams.SESSION_START_INFO_TAG])
    assert start.group_name == "run.1 after 0"  # no history says where the segment leaves


def test_the_custom_page_draws_only_series_that_exist(tmp_path):
    """Those of ranks and GPUs, which not every run has, from their first point on."""
    folder = tmp_path / "run"
    writer = train(folder, 1, 2, after_step=0)
    writer.describe({}, {}, unrecorded=["val_loss", "eval_s"])
    charts = charts_of(read(folder))
    missing = {"loss/validation", "time/eval_s"}
    missing |= {tag for charts in PAGE.values() for tag in charts.values() if ".+" in tag}
    assert set(charts) == {tag for titles in PAGE.values() for tag in titles.values()} - missing
    writer.ranks(2, [0.1, 0.2])
    assert set(charts_of(read(folder))) - set(charts) == {"rank/.+/own_s"}
    writer.devices(2, "a", [{"index": 0, "temperature_c": 60, "power_w": 600.0}])
    writer.close()
    found = charts_of(read(folder))
    tags = read(folder).Tags()["scalars"]
    assert set(charts) < set(found)
    assert [tag for tag in tags if re.search(found["node/.+/power_w"], tag)] == [
        "node/a/gpu/0/power_w"
    ]
    assert len([tag for tag in tags if re.search(found["rank/.+/own_s"], tag)]) == 2
    for tag in {tag for tag, _ in SERIES.values()}:
        assert [each for each in found if re.search(found[each], tag)] in ([], [tag])


def charts_of(accumulator) -> dict[str, str]:
    """Series of PAGE -> the expression of its chart on the newest page."""
    page = layout_pb2.Layout()
    page.ParseFromString(
        accumulator.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    )
    return {
        PAGE[category.title][chart.title]: chart.multiline.tag[0]
        for category in page.category
        for chart in category.chart
    }


def test_no_group_of_series_sorts_before_the_loss():
    assert min(tag for tag, _ in SERIES.values()).startswith("loss/")
    assert all(f"{family}/" > "loss/" for family in FAMILIES)


def test_columns_that_stay_empty_are_not_shown(tmp_path):
    writer = MetricsWriter(tmp_path, world=1, flops_per_token=1e6, peak_flops=None)
    writer.describe({"zero": "2"}, {}, unrecorded=["val_loss"])
    writer.close()
    content = read(tmp_path).PluginTagToContent("hparams")[hparams.EXPERIMENT_TAG]
    shown = {info.name.tag for info in hparams.parse_experiment_plugin_data(content).metric_infos}
    assert shown == {
        tag
        for field, (tag, _) in RESULTS.items()
        if field not in ("mfu", "val_loss", "best_val_loss")
    }


def test_recipe_and_deepspeed_json_are_shown_as_text(tmp_path):
    folder = tmp_path / "run"
    writer = train(folder, 1, 2, after_step=0)
    writer.describe({}, {"recipe.yaml": "seed: 1\n", "ds_config.json": '{"a": 1}'})
    writer.close()
    accumulator = read(folder)
    legend = text_of(accumulator, "series")
    assert all(f"| {tag} | {meaning} |" in legend for tag, meaning in SERIES.values())
    assert text_of(accumulator, "recipe/recipe.yaml") == "```yaml\nseed: 1\n```"
    assert text_of(accumulator, "recipe/ds_config.json") == '```json\n{"a": 1}\n```'


def test_extra_scalars_of_the_engine_get_a_series_each(tmp_path):
    folder = tmp_path / "run"
    writer = make_writer(folder, tensorboard=True, state_gib=0.25)
    for step in (1, 2):
        extra = {"router/z_loss": 0.5 * step, "drops": math.nan if step == 2 else 3.0}
        line = write_step(writer, step, scalars=extra)
    assert line["scalars"] == {"router/z_loss": 1.0, "drops": None}
    assert line["non_finite"] == ["scalars.drops"]
    writer.close()
    accumulator = read(folder)
    assert [point.value for point in accumulator.Scalars("router/z_loss")] == [0.5, 1.0]
    assert [math.isnan(point.value) for point in accumulator.Scalars("extra/drops")] == [
        False,
        True,
    ]
    assert [point.value for point in accumulator.Scalars("memory/state_gib")] == [0.25, 0.25]
