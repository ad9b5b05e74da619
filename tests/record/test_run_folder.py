"""A folder that cannot be written is refused before the work starts, with the path."""

from __future__ import annotations

import os
import re

import pytest

from base.errors import UserError
from commands import compare, corpus_import, doctor, profile, tokenizer
from record.run_folder import refuse_busy

MODE_OF_OTHERS = 0o555


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder as seen by a user to whom modes matter, which they do not to root."""
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o200))
    folder = tmp_path / "shared"
    for name in ("checkpoints", "ledger", "tensorboard/segment0", "logs"):
        (folder / name).mkdir(parents=True)
    for name in (".lock", "metrics.jsonl", "ledger/steps.jsonl", "recipe.yaml", "logs/rank-0.log"):
        (folder / name).touch()
    yield folder
    for path in folder.rglob("*"):  # so that pytest can remove them
        path.chmod(0o755)


def test_a_folder_that_can_be_written_is_taken(run):
    for name in ("recipe.yaml", "logs/rank-0.log", "logs"):  # replaced, or not needed
        (run / name).chmod(MODE_OF_OTHERS)
    refuse_busy(run)


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "metrics.jsonl",
        "checkpoints",
        "ledger",
        "ledger/steps.jsonl",
        "tensorboard",
        "tensorboard/segment0",
    ],
)
def test_what_a_resumed_run_adds_to_must_be_writable(run, name):
    (run / name).chmod(MODE_OF_OTHERS)
    with pytest.raises(UserError, match=f"no permission to write {re.escape(str(run / name))};"):
        refuse_busy(run)


def test_several_places_are_one_line_with_their_number(run):
    for name in ("checkpoints", "ledger", "tensorboard"):
        (run / name).chmod(MODE_OF_OTHERS)
    with pytest.raises(UserError, match=r"checkpoints and 2 more; have their owner"):
        refuse_busy(run)


def test_a_tokenizer_is_not_trained_where_it_cannot_be_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "train", lambda *_: pytest.fail("it was trained"))
    (tmp_path / "closed").touch()
    out = tmp_path / "closed" / "tokenizer"
    assert tokenizer.main(["--in", "x", "--vocab", "300", "--out", str(out)]) == 93
    assert f"OUT={out}: {tmp_path / 'closed'}: " in capsys.readouterr().err


def test_an_import_says_where_it_may_not_write(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.foreign.importing.find_foreign", lambda *_: [])
    monkeypatch.setattr(os, "access", lambda *_: False)
    words = ["--in", "x", "--out", str(tmp_path / "c"), "vocab_size=9", "eod_id=0"]
    assert corpus_import.main(words) == 93
    assert f"OUT={tmp_path / 'c'}: {tmp_path}: Permission denied" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "inner", "words"),
    [
        (doctor, "examine", []),
        (compare, "compare_variants", ["--sweep", "zero=1,2"]),
        (profile, "prepare", ["--run", "x"]),
    ],
)
def test_a_closed_folder_is_a_line_and_no_traceback(command, inner, words, monkeypatch, capsys):
    def closed(*_):
        raise PermissionError(13, "Permission denied", "/of/another/user")

    monkeypatch.setattr(command, inner, closed)
    assert command.main(words) != 0
    said = capsys.readouterr().err
    assert "/of/another/user" in said
    assert "Permission denied" in said
