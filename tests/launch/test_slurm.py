"""launch/slurm.sbatch under a fake srun that behaves as the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clones import SMALL, make_clone
from ranks import ROOT, run_command

SCRIPT = ROOT / "launch" / "slurm.sbatch"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("a submission"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, clone) -> dict[str, str]:
    """The environment of a batch script on the first node of gpu[01-02]."""
    tools = tmp_path_factory.mktemp("slurm")
    srun = tools / "srun"
    srun.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/workers/fake_srun.py "$@"\n')
    srun.chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(clone),
        "SLURM_JOB_ID": str(40_000 + os.getpid() % 10_000),
        "SLURM_JOB_NODELIST": "gpu[01-02]",
        "SLURM_CPUS_PER_TASK": "2",
        "FAKE_ALLOCATION": "gpu01,gpu02",
    }


def sbatch(tmp_path: Path, variables: dict[str, str], *words: str, timeout_s: float = 120):
    """Run the script as slurmd does: a copy in the spool, elsewhere than the submission."""
    spool = tmp_path / "slurm_script"
    shutil.copy(SCRIPT, spool)
    return run_command(["bash", str(spool), *words], timeout_s, cwd=tmp_path, **variables)


def test_the_script_is_good_shell():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on this machine (Debian: shellcheck)")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_directives_come_before_the_first_command():
    lines = SCRIPT.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives
    assert max(directives) < first


@pytest.mark.parametrize(
    ("words", "change", "part"),
    [
        (["zero=3"], {}, "'zero=3' is not one of RECIPE="),
        ([], {"SLURM_SUBMIT_DIR": "/"}, "is not the folder of the project"),
        (["PYTHON=/nowhere"], {}, "/nowhere cannot be run"),
        (["RECIPE=tinny", "NPROC=1"], {}, "tinny"),
        (["NPROC=many"], {}, "NPROC='many'"),
        ([], {"SLURM_JOB_NODELIST": "gpu[01"}, "brackets do not match"),
        ([], {}, "give the ranks per host: NPROC="),
        (["NPROC=1", "OVERRIDES=run=$(touch /tmp/never);x"], {}, "run="),
        (["NPROC=1", "INCLUDE=gpu09"], {}, "'gpu09' is not one of the hosts"),
    ],
)
def test_wrong_words_are_refused_with_93(tmp_path, slurm, words, change, part):
    words = (
        words
        if any(w.startswith("PYTHON=") for w in words)
        else [*words, f"PYTHON={sys.executable}"]
    )
    done = sbatch(tmp_path, slurm | change, *words)
    assert done.returncode == 93, done.stdout
    assert part in done.stdout
    assert "Traceback" not in done.stdout


def test_outside_of_slurm_it_says_what_to_use(tmp_path):
    done = sbatch(tmp_path, {})
    assert done.returncode != 0
    assert "make pretrain HOSTFILE=" in done.stdout


def test_a_run_on_two_hosts_of_a_job(tmp_path, slurm, clone):
    overrides = " ".join([*SMALL[1:], "run=job", "steps=3", "zero=2"])
    words = ["RECIPE=tiny", "NPROC=1", f"OVERRIDES={overrides}", f"PYTHON={sys.executable}"]
    done = sbatch(tmp_path, slurm, *words)
    assert done.returncode == 0, done.stdout
    assert "it carries the connection to gpu01" in done.stdout
    assert "step 3/3" in done.stdout
    run = clone / "runs" / "job"
    assert json.loads((run / "layout.json").read_text())["data"] == 2
    assert {path.name for path in (run / "logs").iterdir()} == {
        "rank-00000.log",
        "rank-00001.log",
    }
