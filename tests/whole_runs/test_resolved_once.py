"""A recipe is resolved once: attempts and ranks get what the launcher composed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from clones import SMALL, make_clone
from ranks import PATIENCE, environment

from base.exits import DO_NOT_RETRY, FINISHED
from launch.hosts.network import free_port
from record.records import read_events, read_metrics

FROM_THE_ENVIRONMENT = "optim.lr=${oc.env:LR,1e-3}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("resolved") / "clone")


def test_a_restart_trains_the_recipe_of_the_start_whatever_has_changed_since(clone):
    """A file of recipes/ is edited while the run goes on, and a rank is killed."""
    words = [*SMALL, FROM_THE_ENVIRONMENT, "run=once", "steps=400", "checkpoint.interval=20"]
    words += ["eval_tokens=0", "resume=fresh"]
    command = [sys.executable, "-m", "commands.pretrain", "--nproc", "2", "--", *words]
    launcher = subprocess.Popen(
        command, cwd=clone, env=environment(PYTHONPATH=str(clone), LR="0.0005"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    run, file = clone / "runs" / "once", clone / "recipes" / "tiny.yaml"
    deadline = time.monotonic() + 60 * PATIENCE
    while not list(run.glob("checkpoints/step-*/MANIFEST.json")):
        assert time.monotonic() < deadline
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.02)
    before = file.read_text()
    file.write_text(before + "\nseed: 4321\n")
    try:
        [rank] = [pid for pid in ranks_of(clone) if variable(pid, "RANK") == "1"]
        os.kill(rank, signal.SIGKILL)
        output, _ = launcher.communicate(timeout=120 * PATIENCE)
    finally:
        file.write_text(before)
    assert launcher.returncode == FINISHED, output
    assert [event["cause"] for event in read_events(run, "attempt")] == ["killed", "finished"]
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 401))
    assert max(line["lr"] for line in lines) == 0.0005
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (recipe["optim"]["lr"], recipe["seed"]) == (0.0005, 1234)
    assert "resume" not in recipe
    assert "fresh" not in output


def ranks_of(clone: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_rank = f"{clone}/pretrain.py".encode() in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if is_rank:
            found.append(int(folder.name))
    return found


def variable(pid: int, name: str) -> str | None:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair).get(name)


def test_ranks_that_compose_different_recipes_are_refused_with_knob_and_values(clone):
    """Without our launcher each rank composes for itself, here with its own environment."""
    port, processes = free_port(), []
    for rank in range(2):
        own = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LR": f"0.00{rank + 1}",
        }  # fmt: skip
        variables = {name: str(value) for name, value in own.items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, "pretrain.py", *SMALL, FROM_THE_ENVIRONMENT, "run=apart"],
                cwd=clone, env=environment(PYTHONPATH=str(clone), **variables),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=60 * PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [DO_NOT_RETRY] * 2, outputs
    assert "optim.lr=0.001 on rank 0 (" in outputs[0]
    assert "0.002 on rank 1 (" in outputs[0]
    assert not (clone / "runs" / "apart").exists()
