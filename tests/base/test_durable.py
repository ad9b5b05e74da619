"""base.durable: content is synced before the name that makes it valid."""

from __future__ import annotations

import errno
import os

import pytest

from base.durable import replace_file, sync_folder, sync_tree


@pytest.fixture
def synced(monkeypatch):
    """What was synced and renamed, in order."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def spied(descriptor):
        seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new):
        seen.append(f"-> {os.path.basename(new)}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", spied)
    monkeypatch.setattr(os, "replace", renamed)
    return seen


def test_a_file_is_on_disk_before_its_name_and_the_name_before_the_call_returns(tmp_path, synced):
    (tmp_path / "a.json").write_text("old")
    replace_file(tmp_path / "a.json", b"new")
    assert synced == [".a.json.new", "-> a.json", tmp_path.name]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"new"


def test_every_file_and_folder_of_a_tree_is_synced(tmp_path, synced):
    (tmp_path / "run" / "ledger").mkdir(parents=True)
    for name in ("run/recipe.yaml", "run/ledger/steps.jsonl"):
        (tmp_path / name).write_text("x")
    sync_tree(tmp_path / "run")
    assert synced == ["recipe.yaml", "run", "steps.jsonl", "ledger"]


def test_an_error_of_the_disk_names_the_folder(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError) as error:
        sync_folder(tmp_path)
    assert error.value.filename == str(tmp_path)
