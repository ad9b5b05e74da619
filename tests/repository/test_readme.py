"""Every command of the README works; they are run in a clone with this interpreter."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from clones import background, make_clone
from ranks import PATIENCE, ROOT, run_command

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line.partition(" #")[0].strip() for block in BLOCKS for line in block.splitlines()]
# Commands that CI runs itself, that start a server, or that another test file runs.
ELSEWHERE = {"make test", "make tensorboard"}
ELSEWHERE |= {command for command in COMMANDS if "replay" in command}  # test_spikes.py
ELSEWHERE |= {command for command in COMMANDS if "SWEEP=" in command}
# Enough of a run to see that it starts, trains and ends.
SHORT = "stop_after=2 eval_tokens=0"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("readme"))
    if (ROOT / "corpora").is_dir():
        (clone / "corpora").symlink_to(ROOT / "corpora")
    return clone


def test_there_are_commands():
    assert {"make pretrain", "make test", "make recipes"} <= set(COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_a_command_of_the_readme_works(clone, command):
    words = [*shlex.split(command), f"PYTHON={sys.executable}"]
    if words[1] == "pretrain":
        given = [word for word in words if word.startswith("OVERRIDES=")]
        words = [word for word in words if word not in given]
        words.append(f"{given[0] if given else 'OVERRIDES='} {SHORT}")
    done = run_command(words, 240, cwd=clone, PYTHONPATH=str(clone))
    assert done.returncode == 0, done.stdout
    if words[1] == "pretrain":
        assert "step   2/2" in done.stdout or "step 2/2" in done.stdout


def test_make_help_names_every_command():
    done = run_command(["make", "help"], 30)
    commands_of_make = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in done.stdout.splitlines()] == commands_of_make


def test_tensorboard_serves_the_runs(clone):
    (clone / "runs").mkdir(exist_ok=True)
    port = 6000 + time.time_ns() % 3000
    command = ["make", "tensorboard", f"PYTHON={sys.executable}", f"PORT={port}"]
    server = background(clone, command)
    try:
        for _ in range(int(120 * PATIENCE)):
            time.sleep(0.5)
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None
        assert b"TensorBoard" in page
    finally:
        subprocess.run(["kill", "-s", "TERM", "--", f"-{server.pid}"], check=False)
        server.wait(timeout=20 * PATIENCE)
