"""Whole runs, started as a user starts them, in a clone whose path contains a blank."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clones import SMALL, background, make_clone, start
from ranks import PATIENCE, environment, run_command
from warm_starts import Warm

from data.stream.ledger import read_ledger
from record.records import read_events, read_metrics

FINISHED, REQUEUE, REFUSED = 0, 75, 93


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("a clone"))


@pytest.fixture(scope="module")
def warm(clone) -> Iterator[Warm]:
    """Starts for tests of anything but the start itself."""
    with Warm(clone) as server:
        yield server


@pytest.fixture(scope="module")
def pair(clone) -> Path:
    """A finished run on two ranks."""
    done = start(clone, "run=pair", "steps=12", "zero=2", nproc=2)
    assert done.returncode == FINISHED, done.stdout
    assert "step  1/12" in done.stdout
    assert "step 12/12" in done.stdout
    return clone / "runs" / "pair"


def test_a_run_leaves_the_folder_that_is_promised(pair):
    names = {path.name for path in pair.iterdir()}
    assert names - {"ranks.jsonl"} == {  # comes with the first four steps that are looked at
        ".beat",
        ".launcher",
        ".lock",
        "recipe.yaml",
        "layout.json",
        "ds_config.json",
        "plan.json",
        "environment.json",
        "metrics.jsonl",
        "events.jsonl",
        "lease",
        "ledger",
        "tensorboard",
        "history.jsonl",
        "checkpoints",
        "logs",
    }
    logs = {path.name for path in (pair / "logs").iterdir()}
    assert logs == {"rank-00000.log", "rank-00001.log"}
    config = json.loads((pair / "ds_config.json").read_text())
    assert config["zero_optimization"]["stage"] == 2
    assert config["train_batch_size"] == 8
    assert json.loads((pair / "layout.json").read_text())["data"] == 2
    assert json.loads((pair / "environment.json").read_text())["torch"]
    kinds = ["began", "notice", "first_step", "saved", "finished", "attempt"]
    assert [event["kind"] for event in read_events(pair)] == kinds


def test_each_step_is_recorded_once_with_matching_numbers(pair):
    lines = read_metrics(pair / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 12]
    assert [line["tokens"] for line in lines] == [512 * step for step in range(1, 13)]
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(2 * line["tokens_per_s_per_rank"])
        assert line["accumulation"] == 2
        assert not line["skipped"]
    ledger = list(read_ledger(pair / "ledger"))
    assert [(line["step"], line["samples"]) for line in ledger] == [
        (step, [8 * (step - 1), 8 * step]) for step in range(1, 13)
    ]
    assert [line["targets"] for line in ledger] == [line["targets"] for line in lines]


def test_only_rank_0_writes(pair):
    assert len(list((pair / "tensorboard").rglob("*tfevents*"))) == 1


def test_the_recorded_recipe_gives_the_same_run_under_another_layout(clone, pair):
    words = ["recipe=runs/pair/recipe.yaml", "run=again", "zero=3", "micro_batch=8"]
    command = [sys.executable, "pretrain.py", *words]
    done = run_command(command, 120, cwd=clone, PYTHONPATH=str(clone))
    assert done.returncode == FINISHED, done.stdout
    again = clone / "runs" / "again"
    for one, two in zip(
        read_metrics(pair / "metrics.jsonl"), read_metrics(again / "metrics.jsonl"), strict=True
    ):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert two["lr"] == one["lr"]
        assert two.get("val_loss", 0) == pytest.approx(one.get("val_loss", 0), rel=1e-6)
    assert [line["batch_hash"] for line in read_ledger(pair / "ledger")] == [
        line["batch_hash"] for line in read_ledger(again / "ledger")
    ]


def test_a_ramp_changes_the_batch_in_the_middle_of_a_run(clone, warm):
    done = warm.start("run=ramp", "steps=5", "batch_tokens=[[0,128],[3,512]]", "eval_tokens=0")
    assert done.returncode == FINISHED, done.stdout
    lines = read_metrics(clone / "runs" / "ramp" / "metrics.jsonl")
    assert [line["tokens_per_step"] for line in lines] == [128, 128, 128, 512, 512]
    assert [line["accumulation"] for line in lines] == [1, 1, 1, 4, 4]


def test_stop_after_ends_early_on_the_same_schedule(clone, warm):
    for run, extra in (("whole", []), ("part", ["stop_after=3"])):
        done = warm.start(f"run={run}", "steps=6", "eval_tokens=0", *extra)
        assert done.returncode == FINISHED, done.stdout
    whole, part = (
        read_metrics(clone / "runs" / run / "metrics.jsonl") for run in ("whole", "part")
    )
    assert [line["lr"] for line in part] == [line["lr"] for line in whole][:3]
    assert [line["loss"] for line in part] == [line["loss"] for line in whole][:3]


REFUSALS = {
    "batch_tokens=500": ["batch_tokens=500", "448 or 512"],
    "zero=0": ["stage 0"],
    "zero=4": ["zero=4"],
    "precision=fp16": ["fp16"],
    "warmup=50": ["warmup=50", "12"],
    "optim.weight_deccay=1": ["optim.weight_deccay", "did you mean optim.weight_decay"],
    "ds.gradient_cliping=1": ["gradient_cliping", "gradient_clipping"],
    "ds.zero_optimization.stag=1": ["stag", "stage"],
    "ds.zero_optimization.reduce_bucket_size=0": ["reduce_bucket_size"],
    "parallel.tensor=2": ["world=1", "nearest: 2 ranks"],
    "model.vocab_size=32": ["32"],
    "run=../x": ["run="],
    "model=llama-900b": ["llama-900b"],
    "data.sources.synthetic.corpus=corpora/nowhere data.sources.synthetic.build=null": ["nowhere"],
    "log.wandb=project": ["wandb"],
    "cluster.device=cuda": ["cuda"],
}


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_input_is_refused_and_leaves_nothing(clone, warm, words, pair):
    before = sorted(path.name for path in (clone / "runs").iterdir())
    done = warm.check("run=refused", "steps=12", *words.split())
    assert done.returncode == REFUSED, done.stdout
    for part in REFUSALS[words]:
        assert part in done.stdout
    assert "Traceback" not in done.stdout
    assert sorted(path.name for path in (clone / "runs").iterdir()) == before


def test_a_refusal_on_two_ranks_prints_one_message_and_ends_all(clone, pair):
    """Started by torchrun directly, where no launcher checks first."""
    words = [*SMALL, "run=refused", "steps=12", "zero=4"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "pretrain.py", *words]
    done = run_command(command, 120, cwd=clone, PYTHONPATH=str(clone))
    assert done.returncode != 0
    # By whichever rank is first to know that no other says it, and once.
    assert len(re.findall("^refused: (?:rank 1: )?zero=4", done.stdout, re.M)) == 1, done.stdout
    assert not (clone / "runs" / "refused").exists()


def test_make_passes_the_failure_on(clone):
    command = ["make", f"PYTHON={sys.executable}", "pretrain", "OVERRIDES=zerro=3 run=refused"]
    done = run_command(command, 60, cwd=clone, PYTHONPATH=str(clone))
    assert done.returncode == 2
    assert "did you mean zero" in done.stdout
    assert not (clone / "runs" / "refused").exists()


def test_an_interpreter_of_ones_own_must_be_there_and_comes_with_its_pythonpath(clone, tmp_path):
    done = run_command(["make", "recipes", "PYTHON=/no/such/python"], 60, cwd=clone)
    assert done.returncode == 2
    assert "refused: PYTHON=/no/such/python: no such program" in done.stdout
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nprint('of my own', sys.flags.utf8_mode)\n"
    )
    command = ["make", f"PYTHON={sys.executable}", "python-given"]
    done = run_command(command, 60, cwd=clone, PYTHONPATH=str(tmp_path))
    assert done.stdout == "of my own 1\n"


def test_nothing_given_to_make_is_read_by_a_shell(clone, tmp_path):
    seen = tmp_path / "seen"
    for word in (
        f"OVERRIDES=`touch {seen}`",
        f"RECIPE=x;touch {seen}",
        f"NPROC=$$(touch {seen})",
        f"HOSTFILE=-x'\"; touch {seen}",
    ):
        command = ["make", "-s", f"PYTHON={sys.executable}", "pretrain", word]
        done = run_command(command, 60, cwd=clone, PYTHONPATH=str(clone))
        assert done.returncode == 2
        assert "refused: " in done.stdout
        assert "Traceback" not in done.stdout
    assert not seen.exists()


def test_a_run_of_another_recipe_is_never_overwritten(warm, pair):
    before = (pair / "metrics.jsonl").read_bytes()
    done = warm.check("run=pair", "steps=3", "optim.lr=1", "seed=5", "zero=2")
    assert done.returncode == REFUSED
    for part in ("steps: 12 in the checkpoint, 3 now", "allow=[optim.lr]", "seed: 1234"):
        assert part in done.stdout
    assert (pair / "metrics.jsonl").read_bytes() == before


def test_a_traceback_of_the_entry_alone_shows_no_secret(clone, tmp_path):
    """Under torchrun no launcher of ours reads the output of a rank."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "def fail(*_): raise RuntimeError('cannot open with ' + os.environ['MY_PASSWORD'])\n"
        "import recipes.compose\n"
        "recipes.compose.compose_command = fail\n"
    )
    done = run_command(
        [sys.executable, "pretrain.py", *SMALL, "run=leak"],
        120,
        cwd=clone,
        PYTHONPATH=f"{tmp_path}:{clone}",
        MY_PASSWORD="planted-91-secret",
    )
    assert done.returncode == 1
    assert "RuntimeError: cannot open with ***" in done.stdout
    assert "planted-91-secret" not in done.stdout


def test_a_folder_of_something_else_is_left_alone(clone, warm):
    (clone / "runs" / "mine").mkdir(parents=True)
    (clone / "runs" / "mine" / "thesis.txt").write_text("years")
    done = warm.check("run=mine", "steps=3")
    assert done.returncode == REFUSED
    assert "is not the folder of a run" in done.stdout
    assert [path.name for path in (clone / "runs" / "mine").iterdir()] == ["thesis.txt"]


def test_two_runs_of_one_name_in_the_same_second_do_not_mix(clone):
    command = [sys.executable, "pretrain.py", *SMALL, "run=twins", "steps=9000", "eval_tokens=0"]
    options = dict(
        cwd=clone,
        env=environment(PYTHONPATH=str(clone)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    twins = [subprocess.Popen(command, **options) for _ in range(2)]
    deadline = time.monotonic() + 60 * PATIENCE
    while all(twin.poll() is None for twin in twins) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = clone / "runs" / "twins" / "metrics.jsonl"
    while not lines.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for twin in twins:
        twin.terminate()  # the one that is left saves and ends
    outputs = [twin.communicate(timeout=120 * PATIENCE)[0] for twin in twins]
    assert sorted(twin.returncode for twin in twins) == [REQUEUE, REFUSED], outputs
    steps = [line["step"] for line in read_metrics(lines)]
    assert steps == list(range(1, len(steps) + 1))


def test_srun_variables_are_understood(clone):
    """Two processes with the variables that srun sets, without our launcher."""
    command = [sys.executable, "pretrain.py", *SMALL, "run=slurm", "steps=2", "eval_tokens=0"]
    processes = []
    for rank in range(2):
        slurm = dict(
            SLURM_STEP_ID="0",
            SLURM_JOB_ID=str(10_000 + os.getpid() % 5_000),
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS="2",
            SLURM_TASKS_PER_NODE="2",
            SLURM_STEP_NODELIST="localhost",
        )
        processes.append(
            subprocess.Popen(
                command,
                cwd=clone,
                env=environment(PYTHONPATH=str(clone), **slurm),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120 * PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [FINISHED, FINISHED], outputs
    layout = json.loads((clone / "runs" / "slurm" / "layout.json").read_text())
    assert layout["data"] == 2


def test_a_damaged_block_ends_every_rank_before_it_is_used(clone, pair):
    """One flipped byte in the middle of the tokens: sizes and index still fit."""
    damaged = clone / "corpora" / "damaged"
    subprocess.run(["cp", "-r", str(clone / "corpora" / "synthetic"), str(damaged)], check=True)
    (shard,) = damaged.glob("train-*.bin")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = start(
        clone,
        "run=damaged",
        "steps=12",
        "data.sources.synthetic.corpus=corpora/damaged",
        nproc=2,
    )
    assert done.returncode != 0
    assert f"{shard.name}" in done.stdout
    assert "expected" in done.stdout
    metrics = clone / "runs" / "damaged" / "metrics.jsonl"
    assert not metrics.exists() or not read_metrics(metrics)


def test_a_damaged_block_is_the_cause_on_record(clone, warm, pair):
    done = warm.start("run=cause", "steps=12", "data.sources.synthetic.corpus=corpora/damaged")
    assert done.returncode == REFUSED
    (event,) = read_events(clone / "runs" / "cause", "gave_up")
    assert "expected" in event["reason"]


def test_variables_of_a_cluster_left_in_the_shell_do_not_hang_a_single_rank(clone):
    done = start(clone, "run=stray", "steps=2", WORLD_SIZE="2", RANK="1")
    assert done.returncode == FINISHED, done.stdout


@pytest.mark.parametrize("words", ["zero=3", "OVERIDES=zero=3"])
def test_a_misspelt_make_variable_is_refused(clone, words):
    command = ["make", f"PYTHON={sys.executable}", "show", words]
    done = run_command(command, 60, cwd=clone, PYTHONPATH=str(clone))
    assert done.returncode == 2
    assert "OVERRIDES=" in done.stdout


def test_no_rank_outlives_a_killed_launcher(clone):
    command = [sys.executable, "-m", "commands.pretrain", "--nproc", "2", "--", *SMALL]
    command += ["run=orphans", "steps=100000", "eval_tokens=0"]
    launcher = background(clone, command)
    metrics = clone / "runs" / "orphans" / "metrics.jsonl"
    deadline = time.monotonic() + 120 * PATIENCE
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20 * PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def children(pid: int) -> list[int]:
    """Process ids of the child processes that run pretrain.py."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            is_entry = b"pretrain.py" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and is_entry:
            found.append(int(folder.name))
    return found


def test_a_file_where_runs_should_be_is_refused(clone, warm):
    (clone / "runs").mkdir(exist_ok=True)
    (clone / "runs" / "afile").write_text("x")
    (clone / "runs" / "dangling").symlink_to("nowhere")
    for name in ("afile", "dangling"):
        done = warm.check(f"run={name}", "steps=2")
        assert done.returncode == REFUSED
        assert "is no folder" in done.stdout


def test_a_terminal_that_is_closed_preempts_the_run_with_a_save(clone):
    """SIGHUP comes to make alone, as under `ssh -t`, which only waits; and what the rank and the
    launcher print from then on is an error."""
    words = ["run=closed", "steps=100000", "checkpoint.interval=50000", "log.tensorboard=false"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(clone)
        given = {"PYTHON": sys.executable, "OVERRIDES": shlex.join([*SMALL[1:], *words])}
        command = ["make", "pretrain", *(f"{name}={value}" for name, value in given.items())]
        os.execvpe("make", command, environment())
    shown = b""
    while b" tokens/s" not in shown:
        shown += os.read(terminal, 100_000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGHUP
    [attempt] = read_events(clone / "runs" / "closed", "attempt")
    assert (attempt["cause"], attempt["status"]) == ("preempted", REQUEUE)
    assert attempt["saved_step"] == attempt["last_step"]
