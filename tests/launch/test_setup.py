"""launch/setup.py: the virtual environment, and what a given interpreter must have."""

from __future__ import annotations

import importlib.metadata
import sys
import threading

import pytest
from ranks import PATIENCE, run_command

from launch import setup


@pytest.fixture
def lacking(monkeypatch):
    """Name packages that are then not there."""
    gone: set[str] = set()
    known = importlib.metadata.version

    def version(name):
        if name in gone:
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return gone


def test_a_run_needs_no_package_of_the_tests(lacking, capsys):
    lacking |= {"pytest-xdist", "megatron-core"}
    assert setup.main(["--check"]) == 0
    assert setup.main(["--check", "tests"]) == 93
    said = capsys.readouterr().err
    assert "lacks pytest-xdist>=" in said
    assert f"{sys.executable} -m pip install 'pytest-xdist>=" in said


def test_what_a_run_needs_is_named_with_the_command_that_installs_it(lacking, capsys):
    lacking |= {"hydra-core", "torch"}
    assert setup.main(["--check"]) == 93
    said = capsys.readouterr().err
    assert "lacks torch>=2.11, hydra-core>=" in said
    assert "or leave PYTHON out" in said


def test_verbs_that_use_the_tests_ask_for_their_packages():
    for command, asked in (("test", True), ("lint", True), ("crash", True), ("pretrain", False)):
        done = run_command(["make", "-n", command, f"PYTHON={sys.executable}"], 30)
        assert ("--check tests" in done.stdout) is asked, command


def test_two_first_calls_at_once_fill_it_one_after_the_other(tmp_path, monkeypatch):
    folder, said, installed = tmp_path / ".venv", [], []
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    is_waiting, is_inside = threading.Event(), threading.Event()

    def log(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            is_waiting.set()

    def pip(python, *what: str) -> bool:
        installed.append(what)
        is_inside.set()
        return is_waiting.wait(30 * PATIENCE)

    monkeypatch.setattr(setup, "_log", log)
    monkeypatch.setattr(setup, "_pip", pip)
    monkeypatch.setattr(setup.venv, "create", lambda folder, **options: None)
    monkeypatch.setattr(
        setup.subprocess, "run", lambda *words, **options: type("Done", (), {"returncode": 0})
    )
    statuses = []
    first = threading.Thread(target=lambda: statuses.append(setup.make_venv(folder)))
    first.start()
    assert is_inside.wait(30 * PATIENCE)
    statuses.append(setup.make_venv(folder))
    first.join()
    assert statuses == [0, 0]
    assert len(installed) == 1  # the requirements, by the first of them
    assert (folder / "ready").exists()


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    (tmp_path / "file").touch()
    assert setup.main([str(tmp_path / "file" / ".venv")]) != 0
    said = capsys.readouterr().err
    assert said.startswith(f"refused: {tmp_path}/file/.venv: Not a directory")
    assert "PYTHON=" in said


def test_set_up_shows_what_pip_does_and_is_never_silent_for_long(tmp_path, monkeypatch, capsys):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho Collecting torch; sleep 0.5; echo '  Downloading torch.whl (190 MB)'\n"
        "echo Requirement already satisfied: numpy\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(setup, "SILENCE_S", 0.1)
    assert setup._pip(python, "torch")
    shown = capsys.readouterr().err
    assert " s  Collecting torch\n" in shown
    assert " s  still at: Collecting torch\n" in shown
    assert " s  Downloading torch.whl (190 MB)\n" in shown
    assert "satisfied" not in shown.partition("still at")[0]


def test_what_pip_said_last_is_shown_where_it_fails(tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no matching distribution >&2; exit 1\n")
    python.chmod(0o755)
    assert not setup._pip(python, "torch")
    shown = capsys.readouterr().err
    assert "no matching distribution" in shown
    assert "pip could not install torch; its last lines are above" in shown
