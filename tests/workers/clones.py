"""Copies the project into another folder, so that tests of whole runs never write to runs/ here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from ranks import ROOT, environment, run_command

# A model of 50,000 parameters on the Markov source: a step takes milliseconds.
SMALL = [
    "recipe=tiny",
    "data=synthetic",
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "seq_len=64",
    "batch_tokens=512",
    "micro_batch=2",
    "eval_every=5",
    "eval_tokens=2048",
]

# What DeepSpeed has passed once (runtime.ds_config.confirm) need not be asked again in each clone.
MEMO = Path(".cache", "engine_check.json")
CLONES: list[Path] = []  # that this process made


def make_clone(folder: Path) -> Path:
    """Copy the files that git tracks into `folder`, with uncommitted changes."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.splitlines()):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    known = [earlier / MEMO for earlier in (ROOT, *CLONES) if (earlier / MEMO).is_file()]
    passed = dict.fromkeys(key for memo in known for key in json.loads(memo.read_text()))
    (folder / MEMO).parent.mkdir()
    (folder / MEMO).write_text(json.dumps(list(passed)))
    CLONES.append(folder)
    return folder


def start(
    clone: Path, *words: str, nproc: int = 1, timeout_s: float = 120, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Start the program of `make pretrain` in `clone`; the overrides of a small run come first."""
    command = [
        sys.executable,
        "-m",
        "commands.pretrain",
        "--nproc",
        str(nproc),
        "--",
        *SMALL,
        *words,
    ]
    return run_command(command, timeout_s, cwd=clone, PYTHONPATH=str(clone), **extra)


def background(clone: Path, command: list[str]) -> subprocess.Popen:
    """Start `command` in `clone` in a new session and do not wait; its output is dropped."""
    return subprocess.Popen(
        command,
        cwd=clone,
        env=environment(PYTHONPATH=str(clone)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
