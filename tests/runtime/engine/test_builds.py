"""runtime/engine/builds.py: a lock in torch's cache of extensions never blocks a start in
silence.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks import PATIENCE, ROOT
from torch.utils.file_baton import FileBaton

from base.errors import UserError
from launch.hosts import facts
from runtime.engine import builds

HOLDER = """
import sys, time, types
from runtime.engine import builds
builds.acquire(types.SimpleNamespace(lock_file_path=sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path) -> Path:
    folder = tmp_path / "pin_memory"
    folder.mkdir()
    return folder / "lock"


def hold(lock: Path) -> subprocess.Popen:
    """Another process that builds for ever."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_each_environment_builds_in_a_folder_of_its_own_unless_the_user_chose_one(monkeypatch):
    monkeypatch.setattr(FileBaton, "try_acquire", FileBaton.try_acquire)
    monkeypatch.setenv(builds.VARIABLE, "")  # to be put back afterwards
    monkeypatch.delenv(builds.VARIABLE)
    builds.prepare()
    chosen = Path(os.environ[builds.VARIABLE])
    assert chosen.parent == ROOT / ".cache" / "torch_extensions"
    import deepspeed
    import torch

    for version in (torch.__version__, deepspeed.__version__, f"py3.{sys.version_info[1]}"):
        assert version in chosen.name
    assert chosen in facts.extension_folders({})
    builds.prepare()
    assert os.environ[builds.VARIABLE] == str(chosen)
    monkeypatch.setenv(builds.VARIABLE, "/elsewhere")
    builds.prepare()
    assert os.environ[builds.VARIABLE] == "/elsewhere"


def test_a_folder_that_cannot_be_made_leaves_torchs_own_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(FileBaton, "try_acquire", FileBaton.try_acquire)
    monkeypatch.setenv(builds.VARIABLE, "")
    monkeypatch.delenv(builds.VARIABLE)
    (tmp_path / "file").touch()
    monkeypatch.setattr(builds, "CACHE", tmp_path / "file")
    builds.prepare()
    assert builds.VARIABLE not in os.environ


def test_a_live_build_is_waited_for_aloud_and_the_lock_of_a_killed_one_is_taken_over(
    lock, monkeypatch
):
    monkeypatch.setattr(builds, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(builds, "LOOK_EVERY_S", 0.02)
    other = hold(lock)
    said: list[str] = []
    waiting = threading.Event()

    def log(text: str) -> None:
        said.append(text)
        waiting.set()

    baton = FileBaton(str(lock))
    mine = threading.Thread(target=builds.acquire, args=(baton, log))
    mine.start()
    assert waiting.wait(60 * PATIENCE)
    assert "pin_memory is being built by another process" in said[0]
    assert str(lock) in said[0]
    assert not builds.remove_abandoned(lock)
    other.kill()
    other.wait()
    mine.join(60)
    assert not mine.is_alive()
    assert "a killed build left its lock behind" in said[-1]
    assert lock.exists()
    baton.release()
    assert not lock.exists()


def test_a_build_that_ends_hands_its_lock_on(lock, monkeypatch):
    monkeypatch.setattr(builds, "LOOK_EVERY_S", 0.02)
    first, second = FileBaton(str(lock)), FileBaton(str(lock))
    assert builds.acquire(first)
    threading.Timer(0.2, first.release).start()
    assert builds.acquire(second)
    second.release()


def test_a_lock_of_torchs_own_that_nothing_moves_beside_is_refused_by_name(lock):
    lock.touch()
    long_ago = time.time() - 2 * builds.IDLE_LIMIT_S
    for path in (lock, lock.parent):
        os.utime(path, (long_ago, long_ago))
    with pytest.raises(UserError, match=r"holds .*pin_memory/lock and has built nothing for 30"):
        builds.acquire(FileBaton(str(lock)))
    assert lock.exists()
    assert builds.IDLE_LIMIT_S == facts.STALE_S
