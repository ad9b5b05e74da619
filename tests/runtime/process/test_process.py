"""runtime/process/process.py: the launcher's variables, and the choice of the device."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from clones import make_clone
from ranks import PATIENCE, ROOT, run_command

from base.errors import Shared, UserError
from recipes.schema import Cluster
from runtime.process import process

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_ID",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_rank():
    assert (process.launched_world(), process.launched_rank()) == (1, 0)


def test_torchruns_variables_come_first(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert (process.launched_world(), process.launched_rank()) == (8, 3)


def test_a_shell_inside_a_slurm_job_is_not_a_rank(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert process.launched_world() == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-04,9]-ib", "gpu03-ib"),
        ("gpu7", "gpu7"),
        ("a1,b2", "a1"),
        ("n[1,5-8]", "n1"),
        ("rack1-n[01-16],rack2-n[01-16]", "rack1-n01"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_the_meeting_point(monkeypatch, nodes, first):
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    assert process._slurm_first_host() == first


def test_a_gpu_that_this_torch_cannot_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(process, "visible_gpus", lambda: ["/dev/nvidia0"])
    with pytest.raises(UserError, match=r"/dev/nvidia0.*CPU build.*PYTHON="):
        process.choose_device(Cluster(), 0, 1)
    assert process.choose_device(Cluster(device="cpu"), 0, 1).type == "cpu"


def test_threads_are_the_recipes_else_those_of_the_environment_else_a_share(monkeypatch):
    monkeypatch.setattr(process, "usable", lambda: 8)
    for value, threads in (("3", 3), ("3,2", 3), ("0", 4), ("x", 4), ("", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert process.num_threads(Cluster(), 2) == threads
        assert process.num_threads(Cluster(threads=5), 2) == 5


def test_more_ranks_than_gpus_on_a_host_are_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for local_rank in range(4):
        with pytest.raises(UserError, match="NPROC=2"):
            process.choose_device(Cluster(), local_rank, 4)
    assert process.choose_device(Cluster(), 1, 2) == torch.device("cuda", 1)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(process, "visible_gpus", list)
    with pytest.raises(UserError, match=r"cluster\.device=cuda"):
        process.choose_device(Cluster(device="cuda"), 0, 1)


def test_a_problem_is_printed_once_where_all_ranks_share_it(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        process.report(UserError("one", "two"))
        process.report(Shared("three"))
    assert capsys.readouterr().err.splitlines() == [
        "refused: one",
        "refused: two",
        "refused: three",
    ]


def test_leaving_flushes_what_was_said_and_skips_the_interpreters_shutdown():
    code = (
        "import atexit, os\nfrom runtime.process import process\n"
        "atexit.register(os.abort)\nprint('said')\nprocess.leave(7)"
    )
    done = run_command([sys.executable, "-c", code], timeout_s=60)
    assert (done.returncode, done.stdout) == (7, "said\n")


def test_a_problem_that_only_a_later_rank_of_a_host_has_is_printed(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "FIRST_REPORTS_S", 0.2)
    process.report(UserError("only here"))
    assert capsys.readouterr().err == "refused: rank 2: only here\n"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "abc", "RANK='abc' in the environment is not a number"),
        ("LOCAL_RANK", "x", "LOCAL_RANK='x' in the environment is not a number"),
        ("RANK", "2", "RANK=2 is not below WORLD_SIZE=2"),
    ],
)
def test_variables_that_name_no_rank_are_refused_and_reported(
    monkeypatch, capsys, name, value, words
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words) as caught:
        process.check_launcher()
    process.report(caught.value)
    assert words in capsys.readouterr().err


def test_a_user_without_home_and_name_builds_nothing_into_a_folder_called_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    process.have_home()
    assert os.environ["HOME"] == "/home/somebody"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it gives without a name
    process.have_home()
    assert os.environ["HOME"] == str(process.CACHE / "home")


def report_from_rank(rank: int, code: str) -> str:
    """What a process prints that is rank `rank` of two, alone on its host."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    text = (
        f"import sys\nfrom base.errors import Shared\nfrom runtime.process import process\n{code}"
    )
    return run_command([sys.executable, "-c", text], 60, **variables).stdout


def test_a_shared_problem_that_rank_0_does_not_report_is_printed_by_another_rank():
    """DeepSpeed refuses rank 1 alone: an empty end with status 93 would hide the reason."""
    code = "process.SHARED_REPORT_S = 0.2\nprocess.report(Shared('DeepSpeed refuses the JSON: x'))"
    assert report_from_rank(1, code) == "refused: rank 1: DeepSpeed refuses the JSON: x\n"
    assert report_from_rank(0, code) == "refused: DeepSpeed refuses the JSON: x\n"


def test_a_rank_that_waits_for_others_names_the_variables_that_make_it_wait():
    code = (
        "import time\nprocess.FIRST_WAIT_S = 0.1\n"
        "with process.report_wait(0, 2, 0, 600.0):\n    time.sleep(1)\n"
        "with process.report_wait(0, 1, 0, 600.0):\n    time.sleep(0.5)\n"
    )
    line = report_from_rank(0, code)
    assert line.startswith("rank 0 waits for the other 1 of 2 ranks, 600 s at most")
    assert "unset WORLD_SIZE RANK LOCAL_RANK, or make pretrain" in line
    assert line.count("waits") == 1


def test_half_a_description_of_a_rank_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE=2 is set in the environment and RANK is not"):
        process.check_launcher()


def test_what_mpirun_left_does_not_reach_deepspeed(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    process.check_launcher()
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
    assert capsys.readouterr().err.count("OMPI_COMM_WORLD_LOCAL_RANK") == 1


def test_a_rank_that_sees_one_gpu_takes_it_whatever_its_local_rank(monkeypatch):
    """As with srun --gpus-per-task=1; DeepSpeed gets the number of the GPU, not of the rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for local_rank in range(4):
        assert process.choose_device(Cluster(), local_rank, 4) == torch.device("cuda", 0)
    monkeypatch.setattr(process, "have_home", lambda: None)
    monkeypatch.setattr(process.builds, "prepare", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    process._export(3, 4, 3, 4, 29500, torch.device("cuda", 0))
    assert os.environ["LOCAL_RANK"] == "0"
    store = dist.HashStore()
    for gpu in ("node-0/a", "node-0/b", "node-1/a"):
        process.claim_gpu(store, gpu)
    with pytest.raises(UserError, match="shows 1 GPU; start at most 1 on it"):
        process.claim_gpu(store, "node-0/b")


def test_every_process_group_has_the_time_limit_of_the_cluster():
    """Also groups that somebody creates without one: parallel.mesh, DeepSpeed."""
    code = """
import datetime
import torch
import torch.distributed as dist
from recipes.schema import Cluster
from runtime.process import process

process.start(Cluster(device="cpu", timeout_s=77))
from runtime.engine.deepspeed_import import join_deepspeed

join_deepspeed(torch.device("cpu"))
import deepspeed.comm

for group in (dist.group.WORLD, dist.new_group([0]), deepspeed.comm.new_group([0])):
    limit = group._get_backend(torch.device("cpu")).options._timeout
    assert limit == datetime.timedelta(seconds=77), limit
process.leave(0)
"""
    done = run_command([sys.executable, "-c", code], 120, cwd=ROOT, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout


def test_a_rank_that_fails_alone_shows_its_traceback_and_leaves_at_once():
    """On NCCL the end of the process group waits for the other ranks: here it never returns."""
    code = """
import runpy
import sys
import time
import torch.distributed as dist
from runtime.telemetry import Telemetry

def fails(self, step):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

Telemetry.begin = fails
dist.destroy_process_group = lambda *group: time.sleep(1000)
sys.argv = ["pretrain.py", *sys.argv[1:]]
runpy.run_path("pretrain.py", run_name="__main__")
"""
    words = ["recipe=tiny", "data=synthetic", "model.vocab_size=64", "eval_tokens=0"]
    with tempfile.TemporaryDirectory() as folder:
        clone = make_clone(Path(folder) / "clone")
        command = [sys.executable, "-c", code, *words, "run=alone"]
        began = time.monotonic()
        done = run_command(command, 200, cwd=clone, PYTHONPATH=str(clone))
        assert time.monotonic() - began < 180 * PATIENCE
    assert done.returncode == 1, done.stdout
    assert "RuntimeError: CUDA out of memory" in done.stdout
