"""Folders that strangers may change are refused; those of teams and containers are not."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
from pathlib import Path

import pytest

from base.errors import UserError
from record import trust
from record.run_folder import refuse_busy
from record.trust import Access, judge, keep_to_owner, refuse_unsafe

ME, CODER, STRANGER, TEAM = 1000, 1001, 1002, 500
CODE = Access(Path("code"), CODER, 10, 0o40755)
NOBODY = 65534


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "code_mode", "code_gid", "risk"),
    [
        (ME, 10, 0o755, 0o755, 10, None),
        (0, 10, 0o755, 0o755, 10, None),  # root may do all anyway
        (CODER, 10, 0o755, 0o755, 10, None),  # may change the code itself: a bind mount, and root
        (STRANGER, 10, 0o755, 0o755, 10, f"user {STRANGER}"),
        (ME, 10, 0o777, 0o755, 10, "everyone"),
        (ME, 10, 0o1777, 0o755, 10, "everyone"),  # sticky: others still add files
        (ME, 10, 0o777, 0o777, 10, None),  # everybody may change the code anyway: vfat, /mnt/c
        (ME, TEAM, 0o775, 0o755, 10, f"group {TEAM}"),
        (ME, TEAM, 0o775, 0o775, TEAM, None),  # a checkout of the team, umask 002
        (ME, TEAM, 0o775, 0o775, 10, f"group {TEAM}"),
        (ME, 10, 0o775, 0o755, 10, None),  # a private group, umask 002
        (ME, 77, 0o2775, 0o755, 10, None),  # a number without a name: fsGroup of Kubernetes
    ],
)
def test_who_is_trusted_with_a_run(monkeypatch, uid, gid, mode, code_mode, code_gid, risk):
    known = {TEAM: {"me", "alice"}, 10: {"me"}}
    monkeypatch.setattr(trust, "members", lambda gid: known.get(gid, set()))
    monkeypatch.setattr(trust, "_name", lambda uid: "me" if uid == ME else str(uid))
    code = Access(Path("code"), CODER, code_gid, 0o40000 | code_mode)
    place = Access(Path("run"), uid, gid, 0o40000 | mode)
    assert judge(place, code, {0, ME, CODER}) == risk


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "r"
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001").mkdir()
    for step in (1, 2):
        (folder / "checkpoints" / f"step-0000000{step}" / "MANIFEST.json").touch()
    (folder / "ledger").mkdir()
    for name in ("history.jsonl", "recipe.yaml", "ledger/steps.jsonl"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    "name",
    [
        ".", "checkpoints", "checkpoints/step-00000002/MANIFEST.json",
        "checkpoints/step-00000001/MANIFEST.json", "history.jsonl", "recipe.yaml", "ledger",
        "ledger/steps.jsonl",
    ],
)  # fmt: skip
def test_what_everyone_may_write_is_refused_with_the_way_out(run, name):
    refuse_busy(run)
    (run / name).chmod(0o777)
    with pytest.raises(UserError) as caught:
        refuse_busy(run)
    assert f"{run / name} may be written by everyone" in str(caught.value)
    assert f"chmod -R o-w {run}" in str(caught.value)
    os.system(f"chmod -R o-w {run}")
    refuse_busy(run)
    assert not list(run.glob(".probe-*"))


def test_file_systems_that_map_users_or_keep_no_modes_are_no_strangers(run, monkeypatch):
    """NFS with root_squash shows what root makes as nobody's; vfat shows all as 0777."""
    real = trust.access

    def squashed(path):
        found = real(path)
        return (
            Access(path, NOBODY, found.gid, found.mode | 0o777)
            if run in (path, *path.parents)
            else found
        )

    monkeypatch.setattr(trust, "access", squashed)
    refuse_unsafe(run)
    monkeypatch.setattr(trust, "own_access", lambda folder: None)  # cannot be told
    with pytest.raises(UserError, match=r"belongs to user nobody.*chown -R"):
        refuse_unsafe(run)


def test_a_folder_that_is_not_there_is_no_problem(tmp_path):
    refuse_unsafe(tmp_path / "runs" / "new")


def test_what_is_made_is_written_by_its_owner_only_whatever_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        keep_to_owner()
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def _as_nobody(run, results):
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        refuse_busy(run)
        results.put("taken")
    except UserError as error:
        results.put(str(error))


def as_nobody(run):
    """What another user is told who starts the run."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_as_nobody, args=(run, results))
    process.start()
    process.join(60)
    return results.get()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_two_users_of_one_machine_do_not_write_each_others_run():
    """LCH-21: a permission error names the path; a run that was made for all is refused to both."""
    with tempfile.TemporaryDirectory(prefix="two-users-") as name:  # pytest's are closed to others
        runs = Path(name)
        run = runs / "r"
        (run / "checkpoints").mkdir(parents=True)
        (run / "metrics.jsonl").touch()
        paths = [run, *run.rglob("*")]
        runs.chmod(0o755)
        assert f"no permission to write {run}" in as_nobody(run)
        for path in paths:
            path.chmod(0o777)
        assert f"{run} may be written by everyone" in as_nobody(run)
        with pytest.raises(UserError, match="may be written by everyone"):
            refuse_busy(run)
        for path in paths:
            path.chmod(0o755)
            os.chown(path, NOBODY, NOBODY)
        with pytest.raises(UserError, match=f"{run} belongs to user nobody"):
            refuse_busy(run)
        assert as_nobody(run) == "taken"
