"""runtime.log.metrics, record.records, the W&B mirror: writing and reading the record of a run.

Everything runs in one process without a model: the numbers are hand-made and the clock is fake.
"""

import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from metric_lines import make_writer, write_step
from ranks import PATIENCE

from base.errors import UserError
from base.jsonl import encode
from base.units import GIB
from record.records import (
    TAIL_BYTES,
    damage,
    last_lines,
    parse_line,
    read_events,
    read_line,
    read_lines,
    read_metrics,
    record_event,
    repair,
    truncate_after,
)
from runtime.engine.memory import peak_device_gib, peak_host_gib
from runtime.log import wandb_mirror
from runtime.log.console import summary_text
from runtime.log.metrics import hyper_parameters, summary
from runtime.monitor.clock import StepTimes

REPOSITORY = Path(__file__).parent.parent.parent.parent


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `code` in another process."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )


# ---- the line file


def test_lines_can_be_made_durable_while_the_run_goes_on(tmp_path, monkeypatch):
    writer, synced = make_writer(tmp_path / "run"), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    write_step(writer, 1)
    writer.sync()
    assert synced == [str(tmp_path / "run" / "metrics.jsonl")]
    writer.close()


def test_each_step_is_one_strict_json_line_with_every_promised_field(tmp_path):
    writer = make_writer(tmp_path / "run", world=2, flops_per_token=6e6, peak_flops=1e10)
    times = StepTimes(0.5, 0.05, 0.3, 0.1, eval_s=2.0, save_s=3.0, other_s=0.05)
    returned = write_step(writer, 1, times=times, val_loss=4.5, targets=numpy.int64(90))
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # flushed already
    writer.close()
    assert parse_line(line) == returned
    memory = {
        name: returned.pop(name) for name in ("memory_gib", "host_memory_gib", "device_memory_gib")
    }
    assert memory["host_memory_gib"] > 0
    assert (memory["device_memory_gib"] is None) == (peak_device_gib() is None)
    assert memory["memory_gib"] == (memory["device_memory_gib"] or memory["host_memory_gib"])
    assert returned == dict(
        step=1,
        segment=0,
        attempt=1,
        loss=5.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=100,
        tokens_per_step=100,
        targets=90,
        tokens_per_s=200.0,
        tokens_per_s_per_rank=100.0,
        mfu=pytest.approx(200 * 6e6 / 2e10),
        step_s=0.5,
        data_s=0.05,
        compute_s=0.3,
        optimizer_s=0.1,
        other_s=0.05,
        eval_s=2.0,
        skipped=False,
        skipped_steps=0,
        accumulation=1,
        first_of_attempt=False,
        val_loss=4.5,
    )


def test_the_newest_lines_are_read_from_the_end_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_lines(path) == []
    path.write_bytes(b"")
    assert last_lines(path) == []
    lines = [{"step": step, "text": "x" * 40} for step in range(5000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 50')
    assert path.stat().st_size > TAIL_BYTES
    assert last_lines(path) == lines[-1:]
    assert last_lines(path, 20) == lines[-20:]
    found = last_lines(path, 10_000)
    assert found == lines[-len(found) :]
    assert 1000 < len(found) < 5000
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    assert last_lines(path, 5) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_null_and_named_so_that_strict_readers_pass(tmp_path, value):
    writer = make_writer(tmp_path / "run")
    write_step(writer, 1, loss=value, grad_norm=numpy.float32(value), skipped=True)
    write_step(writer, 2)
    writer.event("alarm", grad_norm=value, history=[1.0, value])
    writer.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    first, second = (json.loads(line, parse_constant=refuse) for line in text.splitlines())
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert first["non_finite"] == ["loss", "grad_norm"]
    assert "non_finite" not in second
    [alarm] = read_events(tmp_path / "run", "alarm")
    assert alarm["history"] == [1.0, None]
    assert alarm["non_finite"] == ["grad_norm", "history.1"]


def test_a_step_that_trained_on_nothing_has_no_loss_and_is_not_called_non_finite(tmp_path):
    writer = make_writer(tmp_path / "run")
    line = write_step(writer, 1, targets=0, loss=math.nan, grad_norm=math.nan, skipped=True)
    writer.close()
    assert (line["loss"], line["grad_norm"], line["tokens_per_s"]) == (None, None, None)
    assert "non_finite" not in line


def test_a_tensor_is_refused_because_reading_it_would_make_the_device_wait(tmp_path):
    writer = make_writer(tmp_path / "run")
    with pytest.raises(TypeError, match="loss is a Tensor"):
        write_step(writer, 1, loss=torch.tensor(1.0))
    writer.close()
    assert read_metrics(tmp_path / "run") == []


def test_a_half_written_last_line_is_ignored_by_readers_and_dropped_aloud_on_opening(tmp_path):
    folder = tmp_path / "run"
    writer = make_writer(folder)
    for step in (1, 2):
        write_step(writer, step)
    writer.close()
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [line["step"] for line in read_metrics(path)] == [1]
    said = []
    writer = make_writer(folder, after_step=1, log=said.append)
    write_step(writer, 2)
    writer.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert [bool(re.search(r"metrics.jsonl: dropped \d+ bytes", text)) for text in said] == [True]


def test_a_damaged_line_in_the_middle_is_passed_over_and_named_by_file_and_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"loss": NaN}\n{"step": 3}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 3}]
    assert "metrics.jsonl: a line is damaged and left out" in damage(path)
    assert "(line 2: NaN is no JSON value)" in damage(path)


def test_a_flipped_bit_anywhere_in_a_line_is_found():
    fields = {"kind": "saved", "step": 10, "checkpoint_stall_s": 0.5}
    line = encode(fields).rstrip()
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << bit % 8
        found = read_line(bytes(flipped))
        if isinstance(found, dict):  # in the digest's own name: all else is as it was
            assert found.items() >= fields.items(), flipped


def test_a_damaged_record_stops_no_start_and_is_reported_once(tmp_path):
    folder, said = tmp_path / "run", []
    writer = make_writer(folder)
    for step in (1, 2, 3):
        write_step(writer, step)
    writer.close()
    bad = b"<<<<<<< HEAD"
    for name in ("events.jsonl", "metrics.jsonl"):
        lines = (folder / name).read_bytes().split(b"\n")
        (folder / name).write_bytes(b"\n".join([lines[0], bad, *lines[2:]]))
    (folder / "ranks.jsonl").mkdir()
    for attempt in (2, 3):
        make_writer(folder, after_step=2, log=said.append).close()
        assert read_events(folder)[-1]["attempt"] == attempt
    found = [event["text"] for event in read_events(folder, "damaged_record")]
    assert [text.split(": ")[0] for text in found[:2]] == ["metrics.jsonl", "events.jsonl"]
    assert found[2].startswith("metrics.jsonl lacks 1 of the steps up to 2")
    assert [text for text in said if "warning" in text][1:] == [f"warning: {one}" for one in found]
    assert "ranks.jsonl could not be read (Is a directory)" in said[0]
    assert (folder / "ranks.jsonl.before-1").is_dir()
    for name in ("events.jsonl", "metrics.jsonl"):
        assert bad in (folder / name).read_bytes()
    (folder / "events.jsonl").write_bytes(b"")
    writer = make_writer(folder, after_step=1)
    write_step(writer, 2)
    writer.close()
    (folder / "events.jsonl").write_bytes(b"")
    make_writer(folder, after_step=2).close()
    assert [event["attempt"] for event in read_events(folder, "began")] == [3]  # no step has it yet
    found = [event["text"] for event in read_events(folder, "damaged_record")]
    assert found[-1] == "events.jsonl lacks the attempts before attempt 3"


def test_repair_leaves_a_whole_file_and_a_missing_one_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert not repair(path)
    path.write_text('{"step": 1}\n')
    assert not repair(path)
    assert path.read_text() == '{"step": 1}\n'


# ---- restarts


def test_a_step_stands_there_once_after_a_restart_with_the_later_attempts_numbers(tmp_path):
    folder = tmp_path / "run"
    writer = make_writer(folder)
    for step in range(1, 8):
        write_step(writer, step, skipped=step in (3, 7))
    writer.close()
    writer = make_writer(folder, after_step=5)
    for step in range(6, 11):
        write_step(writer, step, loss=100.0 + step)
    writer.close()
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["attempt"] for line in lines] == [1] * 5 + [2] * 5
    assert lines[6]["loss"] == 107.0
    # the skip of step 7 went with its line, the skip of step 3 is still counted
    assert lines[-1]["skipped_steps"] == 1
    began = read_events(folder, "began")
    assert [(event["attempt"], event["after_step"]) for event in began] == [(1, 0), (2, 5)]
    [attempt] = read_events(
        folder, "attempt"
    )  # the first one's, whose launcher is not there to write it
    assert (attempt["attempt"], attempt["cause"], attempt["from_step"]) == (1, "killed", 0)
    assert not list(folder.glob("*.new"))


def test_a_roll_back_inside_one_process_forgets_the_steps_past_it(tmp_path):
    writer = make_writer(tmp_path / "run")
    for step in range(1, 5):
        write_step(writer, step)
    writer.resume(2)
    write_step(writer, 3, loss=9.0)
    writer.close()
    lines = read_metrics(tmp_path / "run")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 5.0), (2, 2.5), (3, 9.0)]


def test_truncating_one_segment_leaves_the_others_untouched(tmp_path):
    folder = tmp_path / "run"
    for segment in (0, 1):
        writer = make_writer(folder, segment=segment, after_step=2 * segment)
        for step in range(1 + 2 * segment, 6):
            write_step(writer, step)
        writer.close()
    path = folder / "metrics.jsonl"
    assert truncate_after(path, 1, 3) == 2
    assert [line["step"] for line in read_metrics(path, 0)] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in read_metrics(path, 1)] == [3]
    before = path.read_bytes()
    assert truncate_after(path, 1, 3) == 0
    assert path.read_bytes() == before


def test_a_reader_keeps_the_later_attempt_where_a_step_stands_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, 1, 1), (2, 1, 2), (2, 2, 3), (1, 2, 4), (1, 1, 5)]  # step, attempt, loss
    path.write_text(
        "".join(
            json.dumps(dict(segment=0, step=step, attempt=attempt, loss=loss)) + "\n"
            for step, attempt, loss in rows
        )
    )
    assert [line["loss"] for line in read_metrics(path)] == [4, 3]


# ---- one writer


def test_events_carry_utc_time_kind_and_attempt_in_order(tmp_path):
    record_event(tmp_path, "alarm", attempt=3, step=7, reason="loss is not finite")
    record_event(tmp_path, "verdict", attempt=3, action="skip")
    alarm, verdict = read_events(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", alarm.pop("time"))
    assert alarm == dict(kind="alarm", attempt=3, step=7, reason="loss is not finite")
    assert [event["action"] for event in read_events(tmp_path, "verdict")] == ["skip"]
    assert verdict["kind"] == "verdict"


def test_metrics_are_written_without_importing_torch_or_tensorflow():
    code = "import sys, runtime.log.metrics, runtime.log.event_files, runtime.log.console\n"
    code += "print([m for m in ('torch', 'tensorflow', 'deepspeed', 'wandb') if m in sys.modules])"
    found = python(code)
    assert found.stdout.strip() == "[]", found.stderr


# ---- a run in numbers


def test_the_summary_has_medians_with_spread_without_the_first_step_of_each_attempt(tmp_path):
    folder = tmp_path / "run"
    writer = make_writer(folder)
    for step, seconds in enumerate([50.0, 1.0, 2.0, 4.0], start=1):
        write_step(writer, step, times=StepTimes(seconds, is_first=step == 1))
    writer.close()
    writer = make_writer(folder, after_step=4)
    write_step(writer, 5, times=StepTimes(40.0, is_first=True), val_loss=3.0, skipped=True)
    write_step(writer, 6, times=StepTimes(5.0), val_loss=3.5, loss=math.nan)
    result = writer.finish()
    assert result == summary(folder) == summary(folder / "metrics.jsonl")
    # steady: 100, 50, 25, 20 tokens/s
    assert result["tokens_per_s"] == 37.5
    assert (result["tokens_per_s_p25"], result["tokens_per_s_p75"]) == (23.75, 62.5)
    assert result["step_s"] == 3.0
    assert (result["first_loss"], result["last_loss"]) == (5.0, None)
    assert (result["val_loss"], result["best_val_loss"], result["best_val_step"]) == (3.5, 3.0, 5)
    assert (result["last_step"], result["tokens"], result["skipped_steps"]) == (6, 600, 1)
    assert result["peak_memory_gib"] > 0
    assert result["mfu"] is None


def test_the_summary_of_a_run_without_a_steady_step_has_no_speed(tmp_path):
    writer = make_writer(tmp_path / "run")
    write_step(writer, 1)
    result = writer.finish()
    assert result["tokens_per_s"] is None
    assert "only the first step was timed" in summary_text(result)
    empty = make_writer(tmp_path / "empty").finish()
    assert empty["last_step"] is None
    assert summary_text(empty) == "no step was recorded"


def test_host_memory_is_this_process_peak_in_gib():
    before = peak_host_gib()
    block = numpy.ones(200 * 2**20, dtype=numpy.uint8)
    grown = peak_host_gib() - before
    assert block.nbytes / GIB == pytest.approx(0.195, abs=1e-3)
    assert peak_host_gib() >= before
    assert grown <= 0.25  # the unit: in KiB or bytes it would be a million


def test_hyper_parameters_are_flat_plain_values_from_recipe_and_layout():
    optim = types.SimpleNamespace(lr=3e-4, schedule="cosine")
    recipe = types.SimpleNamespace(
        zero=2,
        batch_tokens=[[0, 1024], [10, 2048]],
        seq_len=128,
        precision="bf16",
        recompute="none",
        compile=False,
        warmup=0.01,
        seed=7,
        optim=optim,
    )
    layout = types.SimpleNamespace(world=4, data=2, tensor=2, pipeline=1, context=1, micro_batch=2)
    found = hyper_parameters(recipe, layout, num_parameters=8_000_000)
    assert found["zero"] == "2"
    assert found["batch_tokens"] == "[[0, 1024], [10, 2048]]"
    assert (found["ranks"], found["data_parallel"], found["tensor_parallel"]) == (4, 2, 2)
    assert found["num_parameters"] == 8_000_000
    assert all(isinstance(value, (bool, int, float, str)) for value in found.values())


# ---- Weights & Biases, secrets


def test_a_mirror_without_wandb_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_mirror.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as refusal:
        make_writer(tmp_path / "run", wandb="my-project")
    [problem] = refusal.value.problems
    assert problem.startswith("log.wandb=my-project: the package wandb is not installed")
    assert "pip install wandb" in problem
    assert "log.wandb=null" in problem


@pytest.fixture
def fake_wandb(monkeypatch):
    """A module in wandb's place that records what it is given."""
    wandb = types.ModuleType("wandb")
    wandb.Error = type("Error", (Exception,), {})
    wandb.given = {}
    config = types.SimpleNamespace(update=lambda values: wandb.given.update(config=values))
    run = types.SimpleNamespace(config=config, finish=lambda: wandb.given.update(finished=True))

    def init(**options):
        wandb.given.update(init=options)
        return run

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb_mirror.importlib.util, "find_spec", lambda name: object())
    return wandb


def test_wandb_mirrors_the_event_files_and_gets_no_key(tmp_path, monkeypatch, fake_wandb):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789-secret-key")
    folder = tmp_path / "run"
    writer = make_writer(folder, wandb="my-project", tensorboard=True)
    json_with_key = '{\n  "comet": {\n    "api_key": "abcdef"\n  }\n}'
    writer.describe({"lr": 0.1}, {"ds_config.json": json_with_key})
    write_step(writer, 1)
    writer.finish()
    assert fake_wandb.given["init"] == dict(
        project="my-project",
        name="run-attempt-1",
        group="run",
        dir=str(folder),
        sync_tensorboard=True,
    )
    assert fake_wandb.given["config"] == {"lr": 0.1}
    assert fake_wandb.given["finished"]
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"secret-key" not in written
    assert b"abcdef" not in written


def test_a_refusal_by_wandb_is_a_users_mistake_not_a_crash(tmp_path, fake_wandb):
    def init(**options):
        raise fake_wandb.Error("api_key not configured (no-tty)")

    fake_wandb.init = init
    with pytest.raises(UserError, match=r"wandb refused .*WANDB_MODE=offline"):
        make_writer(tmp_path / "run", wandb="my-project")


def test_a_service_that_fails_later_costs_the_mirror_and_not_the_run(tmp_path, fake_wandb):
    def fail(*values, **options):
        raise fake_wandb.Error("no network")

    said = []
    writer = make_writer(tmp_path / "run", wandb="p", tensorboard=True, log=said.append)
    writer._mirror._run.finish = fail
    write_step(writer, 1)
    writer.finish()
    fake_wandb.init = fail  # gone when the run goes on
    writer = make_writer(tmp_path / "run", after_step=1, wandb="p", log=said.append)
    write_step(writer, 2)
    assert writer.finish()["last_step"] == 2
    assert said == ["warning: log.wandb=p: no network; going on without the mirror"] * 2


def test_final_speeds_do_not_mix_attempts_with_different_ranks(tmp_path):
    folder = tmp_path / "run"
    writer = make_writer(folder, world=1)
    for step in range(1, 5):
        write_step(writer, step, times=StepTimes(1.0, is_first=step == 1))
    assert not summary(folder)["other_ranks"]
    writer.close()
    writer = make_writer(folder, world=4, after_step=4)
    for step in range(5, 9):
        write_step(writer, step, times=StepTimes(0.25, is_first=step == 5))
    result = writer.finish()
    assert (result["ranks"], result["other_ranks"], result["num_steady_steps"]) == (4, True, 3)
    assert result["tokens_per_s"] == 400.0
    assert "only the steps on 4 ranks" in summary_text(result)


def test_a_validation_loss_of_an_earlier_step_names_its_step_at_the_end(tmp_path):
    writer = make_writer(tmp_path / "run")
    for step in range(1, 4):
        write_step(writer, step, val_loss=3.25 if step == 2 else None)
    assert "validation 3.2500 (step 2)" in summary_text(writer.finish())
