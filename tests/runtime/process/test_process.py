"""runtime/process/process.py: the launcher's variables, and the choice of the device."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from ranks import run_command

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
