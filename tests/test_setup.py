"""launch/setup.py: the virtual environment is filled once."""

from __future__ import annotations

import threading

from launch import setup


def test_two_first_calls_at_once_fill_it_one_after_the_other(tmp_path, monkeypatch):
    folder, said, installed = tmp_path / ".venv", [], []
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    is_waiting, is_inside = threading.Event(), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            is_waiting.set()

    def pip(python, *what: str) -> bool:
        installed.append(what)
        is_inside.set()
        return is_waiting.wait(30)

    monkeypatch.setattr(setup, "_say", say)
    monkeypatch.setattr(setup, "_pip", pip)
    monkeypatch.setattr(setup.venv, "create", lambda folder, **options: None)
    monkeypatch.setattr(
        setup.subprocess, "run", lambda *words, **options: type("Done", (), {"returncode": 0})
    )
    statuses = []
    first = threading.Thread(target=lambda: statuses.append(setup.make_venv(folder)))
    first.start()
    assert is_inside.wait(30)
    statuses.append(setup.make_venv(folder))
    first.join()
    assert statuses == [0, 0]
    assert len(installed) == 1  # the requirements, by the first of them
    assert (folder / "ready").exists()
