"""The benchmarks' arithmetic, their guard, their processes, and the GPU command's dry run."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
import warnings

import pytest
from ranks import PATIENCE, ROOT, environment, run_command

from benchmarks import gpu, report, start, step, syncs
from benchmarks.gpu import BUDGETS_S, LIMIT_S, Worker
from benchmarks.processes import Contender, ContenderError, Missing
from benchmarks.start_probe import LAZY, PROBED, STEPS, Timeline, find
from benchmarks.workload import SHAPE_8M, Workload, count_targets, micro_batches
from model.cost import num_parameters

TINY = Workload(
    threads=1,
    seq_len=16,
    micro_batch=2,
    accumulation=2,
    document_tokens=5,
    shape=SHAPE_8M | dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1),
)


def turn(seconds: list[float], phases: list[dict] | None = None) -> dict:
    """What a contender answers after a turn."""
    return {
        "losses": [1.0] * len(seconds),
        "seconds": seconds,
        "cpu_s": [2 * s for s in seconds],
        "phases": phases or [],
        "peak_host_gib": 0.5,
    }


def test_quartiles_of_known_numbers():
    assert report.quartiles([5, 1, 3, 2, 4]) == (2, 3, 4)
    assert report.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_a_machine_that_slows_down_in_between_does_not_change_a_ratio():
    turns = {
        "torch": [turn([2.0, 2.0]), turn([20.0, 20.0]), turn([4.0, 4.0])],
        "ours": [turn([1.0, 1.0]), turn([10.0, 10.0]), turn([2.0, 2.0])],
    }
    found = report.summary(turns, tokens=100)
    assert found["ours"]["ratios"]["torch"]["wall"] == (2.0, 2.0, 2.0)
    assert found["ours"]["ratios"]["torch"]["cpu"] == (2.0, 2.0, 2.0)
    assert found["torch"]["ratios"] == {}
    assert found["ours"]["tokens_per_s"][1] == 50.0
    assert found["ours"]["steps"] == 6


def test_the_split_of_a_step_is_the_median_over_steps_of_phases_that_took_time():
    phases = [
        {"step_s": 3.0, "compute_s": c, "eval_s": 0.0, "is_first": False} for c in (1.0, 2.0, 9.0)
    ]
    assert report.phase_medians([turn([3.0] * 3, phases)]) == {"compute_s": 2.0}
    assert report.phase_medians([turn([3.0])]) == {}


def test_contenders_with_other_losses_are_not_compared():
    same = {"torch": [9.0, 8.0], "ours": [9.0005, 8.0], "documents": [7.0, 6.0]}
    report.check_same_losses(same, "fp32")
    with pytest.raises(report.NotTheSame, match="step 2: ours"):
        report.check_same_losses({"torch": [9.0, 8.0], "ours": [9.0, 8.01]}, "fp32")
    with pytest.raises(report.NotTheSame, match="nan"):
        report.check_same_losses({"torch": [9.0], "ours": [float("nan")]}, "bf16")


def test_the_goal_is_missed_where_one_baseline_is_faster_by_either_time():
    fast, slow = [turn([1.0, 1.0])], [turn([2.0, 2.0])]
    met = report.summary({"torch": slow, "trainer": slow, "ours": fast}, tokens=1)
    assert report.goal_line(met).endswith(": met.")
    missed = report.summary({"torch": slow, "trainer": fast, "ours": slow}, tokens=1)
    line = report.goal_line(missed)
    assert "0.50 x (b) by wall time; 0.50 x (b) by cpu time" in line
    assert "(a)" not in line


class Recorder:
    """A contender that notes when it was asked."""

    def __init__(self, name: str, order: list[str]):
        self.name, self.order = name, order

    def turn(self, steps: int) -> dict:
        self.order.append(self.name)
        return turn([1.0] * steps)


def test_rounds_interleave_and_begin_with_another_contender_each_time():
    order: list[str] = []
    contenders = {name: Recorder(name, order) for name in "abc"}
    turns = step.take_rounds(contenders, seconds=0, steps=2)
    assert "".join(order) == "abcbcacab"
    assert {len(given) for given in turns.values()} == {3}


def test_the_report_says_how_to_install_a_missing_contender():
    measured = {
        "workload": {
            "precision": "fp32",
            "world": 1,
            "threads": 2,
            "accumulation": 1,
            "micro_batch": 1,
            "seq_len": 8,
        },
        "parameters": 8_000_000,
        "load_before": [0.1],
        "load_after": [0.2],
        "rounds": 1,
        "steps_per_turn": 2,
        "compared_steps": 3,
        "missing": {"trainer": "accelerate"},
        "has_bf16_units": False,
        "contenders": report.summary(
            {"torch": [turn([2.0, 2.0])], "ours": [turn([1.0, 1.0])]}, tokens=8
        ),
        "ops": {"ours": {"aten::mm": 0.25}},
    }
    result = {"command": "x", "commit": "y", "machine": {"cores": 2}, "measurements": [measured]}
    text = report.markdown(result)
    assert "pip install accelerate" in text
    assert "each baseline): met." in text
    assert report.NO_BF16_UNITS not in text
    assert "**2.00** [2.00 .. 2.00], 2.00" in text
    assert "| `aten::mm` | 250.0 |" in text


def test_every_contender_gets_the_same_targets_and_the_shape_is_about_8_million():
    assert 7.5e6 < num_parameters(Workload().shape_object) < 8.5e6
    plain, cut = (micro_batches(TINY, 0, attend) for attend in ("across", "within"))
    for batch, other in zip(plain, cut, strict=True):
        assert (batch.input_ids == other.input_ids).all()
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:]).all()
        assert other.segment_ids.max() > 0 == batch.segment_ids.max()
    assert count_targets(TINY, "across") == TINY.rows * (TINY.seq_len - 1)
    assert count_targets(TINY, "within") < count_targets(TINY, "across")


def test_our_engine_and_the_bare_torch_loop_take_turns_and_have_equal_losses():
    with Contender("torch", TINY) as plain, Contender("ours", TINY) as ours:
        for contender in (plain, ours):
            contender.wait_ready()
        replies = [contender.turn(3) for contender in (plain, ours, plain, ours)]
        profiled = ours.turn(1, profile=True)
    for first in (0, 2):
        a, b = replies[first]["losses"], replies[first + 1]["losses"]
        report.check_same_losses({"torch": a, "ours": b}, "fp32")
    assert replies[0]["losses"][0] > replies[3]["losses"][-1]
    assert {"data_s", "compute_s", "optimizer_s"} <= set(replies[1]["phases"][0])
    assert profiled["ops"]["aten::mm"] > 0
    assert all(rank.returncode == 0 for rank in [*plain.ranks, *ours.ranks])


class Answering(Contender):
    """A contender whose only answer is `line`."""

    def __init__(self, line: str):
        self.line = line
        super().__init__("ours", TINY)

    def launch(self, rank: int, port: int) -> subprocess.Popen:
        answer = f"sys.stdout.write({self.line!r})"
        code = f"import sys; print('what it printed', file=sys.stderr); {answer}"
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=self.log, text=True
        )


def test_a_contender_that_fails_or_lacks_a_package_says_so():
    with Answering('{"error": "KeyError: fp8"}') as contender:
        with pytest.raises(ContenderError, match=r"ours: KeyError: fp8\nwhat it printed"):
            contender.wait_ready()
    with Answering("") as contender, pytest.raises(ContenderError, match="no answer"):
        contender.wait_ready()
    with Answering('{"missing": "accelerate"}') as contender:
        with pytest.raises(Missing, match="accelerate"):
            contender.wait_ready()


def test_the_trainer_without_accelerate_is_reported_as_missing():
    code = (
        "import sys; sys.modules['accelerate'] = None; from benchmarks.worker import main;"
        " sys.exit(main('trainer', sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, TINY.to_json()],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=True,
    )
    assert json.loads(done.stdout) == {"missing": "accelerate"}


def test_parts_of_a_start_add_up_over_exec(tmp_path):
    out = tmp_path / "marks.json"
    before = Timeline(out)
    before.mark("launcher")
    before.save()
    after = Timeline(out)
    after.mark("run")
    after.mark("launcher")
    assert [name for name, _, _ in after.marks] == ["launcher", "run", "launcher"]
    marks = [("a", 11.0, 0.5), ("b", 13.0, 1.0), ("a", 14.0, 1.5)]
    assert start.add_up(10.0, marks) == {"a": (2.0, 1.0), "b": (2.0, 0.5)}


def test_our_share_of_a_start_is_what_torch_deepspeed_and_the_steps_do_not_take():
    parts = {"launcher": (1.0, 0.8), "import torch": (2.0, 1.9), LAZY: (1.0, 1.0)}
    probed = parts | {"import transformers": (1.5, 1.4), STEPS: (4.0, 4.0)}
    bare = {"import torch": (2.0, 2.0), LAZY: (1.0, 1.0)}
    found = start.summary([probed], [bare])
    assert found["first_line_s"] == 9.5
    assert found["ready_s"] == 5.5
    assert found["ours_s"] == 2.5
    assert found["ours_cpu_s"] == pytest.approx(2.2)


def test_a_wrapped_function_is_timed_apart_from_what_came_before(tmp_path):
    timeline = Timeline(tmp_path / "marks.json")
    assert timeline.wrap(lambda x: x + 1, "adding")(1) == 2
    assert [name for name, _, _ in timeline.marks] == ["other code of ours", "adding"]


def test_every_function_that_the_start_benchmark_times_exists():
    for module, name, _ in PROBED:
        owner, attribute = find(module, name)
        assert callable(getattr(owner, attribute)), f"{module}.{name}"
    for module, name in (("commands.pretrain", "start_here"), ("pretrain", "build")):
        find(module, name)


def frame(path: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(path, 7, "f")


def test_a_host_sync_belongs_to_the_innermost_frame_of_deepspeed_or_ours():
    ours, benchmark = frame(f"{ROOT}/runtime/engine.py"), frame(f"{ROOT}/benchmarks/gpu_speed.py")
    deepspeed, torch = (
        frame("/x/site-packages/deepspeed/z.py"),
        frame("/x/site-packages/torch/t.py"),
    )
    inside = frame(f"{ROOT}/.venv/lib/site-packages/torch/t.py")
    assert syncs.owner_of([benchmark, ours, torch]) == ("ours", "engine.py:7")
    assert syncs.owner_of([ours, deepspeed, inside]) == ("deepspeed", "z.py:7")
    assert syncs.owner_of([benchmark, torch]) == ("torch", "")


def test_warnings_of_the_sync_debug_mode_are_counted_and_others_are_not():
    with syncs.counted() as seen:
        for _ in range(4):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)")
        warnings.warn("something else")
    assert seen.per_step(2, "ours") == 2.0
    assert seen.per_step(2, "deepspeed") == 0.0
    assert "ours test_benchmarks.py" in seen.describe(2)


ROW = '{"row": {"name": "n", "value": 1.0, "unit": "", "rule": "0", "is_ok": %s}}'


def worker(body: str) -> Worker:
    """A worker that answers the first check with `body`."""
    return Worker("cpu", [sys.executable, "-u", "-c", f"import time; input(); {body}"])


def test_a_check_that_hangs_is_stopped_at_its_limit_and_keeps_its_rows():
    one = worker(f"print('{ROW % 'true'}'); print('{ROW % 'true'}'); time.sleep(10**6)")
    limit_s = 3.0 * PATIENCE
    result = one.run("x", limit_s=limit_s)
    assert len(result["rows"]) == 2
    assert f"limit of {limit_s:.0f} s" in result["error"]
    assert result["seconds"] < limit_s + 7 * PATIENCE
    assert not one.is_alive
    assert not gpu.is_good({"x": result})


def test_a_check_whose_process_dies_is_reported():
    one = worker(f"print('{ROW % 'true'}'); raise SystemExit(5)")
    result = one.run("x", limit_s=20.0)
    one.close()
    assert len(result["rows"]) == 1
    assert "status 5" in result["error"]


def test_a_broken_bound_fails_the_command_and_is_shown(monkeypatch, tmp_path, capsys):
    row = json.loads(ROW % "false")["row"]
    results = {
        "syncs": {"rows": [row], "error": None, "seconds": 1.0},
        "mfu": {"rows": [], "error": "out of memory\ntraceback", "seconds": 1.0},
    }
    monkeypatch.setattr(gpu, "run_checks", lambda *_: results)
    assert gpu.main(["--out", str(tmp_path / "gpu")]) == 1
    shown = capsys.readouterr().out
    assert "**BROKEN**" in shown
    assert "did not end: mfu; bounds broken in: syncs" in shown
    assert json.loads((tmp_path / "gpu.json").read_text())["checks"] == results


def test_the_time_limits_of_the_gpu_checks_fit_into_five_minutes():
    assert sum(BUDGETS_S.values()) <= LIMIT_S <= 300


@pytest.mark.slow
def test_every_gpu_check_runs_whole_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu"]
    done = run_command([*command, "--out", str(tmp_path / "gpu")], timeout_s=240)
    assert done.returncode == 0, done.stdout
    assert "all bounds kept" in done.stdout
    checks = json.loads((tmp_path / "gpu.json").read_text())["checks"]
    assert checks.keys() == BUDGETS_S.keys()
    assert all(result["rows"] for result in checks.values())
