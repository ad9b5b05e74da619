"""A lock names its holder, since when, and the way out; it leaves no file, and no endless wait."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from ranks import PATIENCE

from base.errors import UserError
from data.corpus import build_lock
from data.corpus.build_lock import locked

HOLD = """
import sys, time
from pathlib import Path
from data.corpus.build_lock import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=30 * PATIENCE)


def test_a_lock_is_removed_with_its_work_also_after_an_error(tmp_path):
    with locked(tmp_path / "lock", print):
        written = json.loads((tmp_path / "lock").read_text())
        assert (written["pid"], written["host"]) == (os.getpid(), socket.gethostname())
    with pytest.raises(ValueError, match="refused"), locked(tmp_path / "lock", print):
        raise ValueError("refused")
    assert not list(tmp_path.iterdir())


def test_who_waits_is_told_the_holder_again_and_again_and_gets_the_lock(
    tmp_path, holder, monkeypatch
):
    monkeypatch.setattr(build_lock, "LOG_EVERY_S", 0.3)
    logged = []

    def log(text):
        logged.append(text)
        if len(logged) == 2:
            os.kill(holder.pid, signal.SIGSTOP)
        if len(logged) == 4:
            os.kill(holder.pid, signal.SIGKILL)

    with locked(tmp_path / "lock", log):
        assert len(logged) >= 4
    name = f"pid {holder.pid} on {socket.gethostname()}"
    year = time.strftime("%Y-", time.localtime())
    for text in logged:
        assert f"another process is building it; waiting for {name}" in text
        assert f"since {year}" in text
        assert f"(its lock is {tmp_path / 'lock'}); if that process hangs, end it" in text
    assert "a stopped process" in logged[3]
    assert "a stopped process" not in logged[0]
    assert not list(tmp_path.iterdir())


def test_a_holder_without_a_sign_of_life_ends_the_waiting(tmp_path, holder):
    start = time.monotonic()
    with (
        pytest.raises(UserError, match=rf"held by pid {holder.pid} on .*reported nothing for"),
        locked(tmp_path / "lock", lambda text: None, silent_s=1.0),
    ):
        pass
    assert time.monotonic() - start >= 0.5
    assert holder.poll() is None  # nobody's process is ended by those who wait


def test_many_processes_take_turns_and_never_hold_a_lock_together(tmp_path):
    code = """
import sys, time
from pathlib import Path
from data.corpus.build_lock import locked
root = Path(sys.argv[1])
for _ in range(20):
    with locked(root / "lock", lambda text: None):
        (root / "inside").mkdir()
        time.sleep(0.002)
        (root / "inside").rmdir()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    crowd = [subprocess.Popen(command, env=os.environ) for _ in range(4)]
    assert [process.wait(timeout=120 * PATIENCE) for process in crowd] == [0] * 4
    assert not list(tmp_path.iterdir())
