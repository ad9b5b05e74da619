"""Saving as a transaction: whoever fails or dies, whenever, a whole checkpoint is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time

import pytest
from rank_threads import Killed, run_threads
from ranks import PATIENCE, ROOT, run_ranks
from saves_on_threads import WORLD, load_on_all, save_on_all, steps, tensors
from small_fragments import cut_flat

from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import read_manifest
from checkpoint.load.choosing import verify
from checkpoint.save import commit
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep


def test_a_save_is_loaded_by_the_same_and_by_other_numbers_of_ranks(tmp_path):
    reports = save_on_all(tmp_path, 7)
    assert all(report.ok for report in reports), reports
    assert reports[0].bytes == sum(f.stat().st_size for f in reports[0].folder.glob("rank-*"))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000007\n"
    for world in (1, 2, 3, 4):
        results, same = load_on_all(tmp_path, world)
        assert same
        assert {result.step for result in results} == {7}
        assert results[0].state == {"step": 7}
        assert (results[0].local is None) == (world != WORLD)
        assert results[0].damaged == []


def test_a_save_that_could_not_be_read_back_leaves_nothing_and_is_made_again(tmp_path, monkeypatch):
    real, tries = commit.check_rank, []

    def unread(folder, rank, files, depth):
        assert not os.path.lexists(tmp_path / "checkpoints" / "step-00000007")
        tries.append(rank)
        if rank == 1 and tries.count(1) == 1:
            raise Damaged("a block differs from its digest")
        real(folder, rank, files, depth)

    monkeypatch.setattr(commit, "check_rank", unread)
    assert "a block differs" in save_on_all(tmp_path, 7)[0].problem
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert all(report.ok for report in save_on_all(tmp_path, 7))
    assert steps(tmp_path) == [7]


def test_a_byte_that_flips_on_the_disk_after_the_write_is_found_before_the_commit(tmp_path):
    assert save_on_all(tmp_path, 1)[0].ok

    def point(name, rank):
        if name == "exchange write" and rank == 2:
            path = next((tmp_path / "checkpoints").glob("*.tmp-*")) / "rank-00002.bin"
            data = bytearray(path.read_bytes())
            data[5] ^= 1
            path.write_bytes(data)

    reports = save_on_all(tmp_path, 7, point)
    assert "verify: rank 2: " in reports[0].problem
    assert "differs from its digests" in reports[0].problem
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step-00000001",
    ]


def test_a_name_that_could_not_be_made_durable_is_set_aside_by_the_next_try(tmp_path, monkeypatch):
    real, failed = commit.sync_folder, []

    def sync(folder):
        if (folder / "step-00000007").is_dir() and not failed:
            failed.append(folder)
            raise OSError(errno.EIO, "Input/output error", str(folder))
        real(folder)

    monkeypatch.setattr(commit, "sync_folder", sync)
    assert "Input/output error" in save_on_all(tmp_path, 7)[0].problem
    assert "saved already" in save_on_all(tmp_path, 7)[0].problem
    assert all(report.ok for report in save_on_all(tmp_path, 7, again=True))
    assert steps(tmp_path) == [7]
    assert (tmp_path / "checkpoints" / "step-00000007.damaged-1").is_dir()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("step", {"step": 8}),
        ("segment", {"segment": 1}),
        ("tokens", {"tokens": 65}),
        ("recipe_hash", {"recipe_hash": "b"}),
        ("verify", {"verify": "full"}),
        ("again", {"again": True}),
        ("run folder", {"run": "elsewhere"}),
    ],
)
def test_a_save_whose_arguments_differ_over_the_ranks_is_refused_before_the_first_byte(
    name, change, tmp_path
):
    """A name that two ranks understand differently would mix two states in one checkpoint."""
    ranks = cut_flat(tensors(7), WORLD)

    def one(comm):
        own = change if comm.rank == 2 else {}
        step = own.get("step", 7)
        keys = ("segment", "tokens", "recipe_hash")
        state = {"segment": 0, "tokens": 64, "recipe_hash": "a"}
        state |= {key: own[key] for key in keys if key in own}
        options = {key: own[key] for key in ("verify", "again") if key in own}
        run = tmp_path / own.get("run", "run")
        return save(run, step, ranks[comm.rank], state, comm, **options)

    reports = run_threads(WORLD, one)
    assert len({report.problem for report in reports}) == 1
    assert "rank 2 and rank 0 are about to save different things" in reports[0].problem
    assert f"{name} " in reports[0].problem
    assert list(tmp_path.rglob("*")) == []


def test_a_run_without_a_checkpoint_loads_nothing(tmp_path):
    (tmp_path / "checkpoints" / "step-00000005.tmp-0").mkdir(parents=True)
    assert load_on_all(tmp_path) == ([None] * WORLD, None)


def moments(run):
    """Every (moment, rank, how often before) of a save that also removes an old checkpoint."""
    seen, lock = [], threading.Lock()

    def point(name, rank):
        with lock:
            seen.append((name, rank, sum(one[:2] == (name, rank) for one in seen)))

    assert all(report.ok for report in save_on_all(run, 1))
    assert all(report.ok for report in save_on_all(run, 2, point, keep=Keep(newest=1)))
    assert steps(run) == [2]
    return sorted(seen)


def test_a_rank_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """Every open, write, fsync, rename, exchange, commit x every rank: old or new, not mixed."""
    found = moments(tmp_path / "probe")
    names = {name.split()[0] for name, _, _ in found}
    assert names == {"open", "write", "fsync", "rename", "remove", "commit", "exchange"}
    assert {rank for _, rank, _ in found} == set(range(WORLD))
    outcomes = set()
    for number, (name, victim, occurrence) in enumerate(found):
        run = tmp_path / str(number)
        assert all(report.ok for report in save_on_all(run, 1))
        count = []

        def point(at, rank, name=name, victim=victim, occurrence=occurrence, count=count):
            if (at, rank) == (name, victim):
                count.append(at)
                if len(count) == occurrence + 1:
                    raise Killed

        results = save_on_all(run, 2, point, keep=Keep(newest=1))
        assert isinstance(results[victim], Killed)
        assert not any(getattr(r, "ok", False) for i, r in enumerate(results) if i != victim)
        loaded, same = load_on_all(run)
        assert same, (name, victim)
        outcomes.add(loaded[0].step)
        assert verify(loaded[0].folder, "full") == []
        hint = (run / "checkpoints" / "latest").read_text().strip()
        assert hint in ("step-00000001", loaded[0].folder.name)
        # The relaunched run goes on: leftovers are swept, the next save works.
        assert all(report.ok for report in save_on_all(run, 3)), (name, victim)
        assert not list((run / "checkpoints").glob("*.*-*"))
    assert outcomes == {1, 2}
    print(f"\n{len(found)} kill points on {WORLD} ranks")


def test_no_checkpoint_vouches_for_a_record_that_is_not_durable(tmp_path):
    def refuse():
        raise OSError(errno.EIO, os.strerror(errno.EIO), "metrics.jsonl")

    reports = save_on_all(tmp_path, 1, sync_record=refuse)
    assert {report.problem for report in reports} == {
        "commit: rank 0: metrics.jsonl: Input/output error"
    }
    assert steps(tmp_path) == []
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("moment", ["open data", "write data", "fsync index"])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_the_next_one_works(
    tmp_path, victim, moment
):
    assert all(report.ok for report in save_on_all(tmp_path, 1))

    def point(name, rank):
        if (name, rank) == (moment, victim):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reports = save_on_all(tmp_path, 2, point)
    assert len({report.problem for report in reports}) == 1
    for report in reports:
        assert not report.ok
        assert f"rank {victim}" in report.problem
        assert "No space left on device" in report.problem
        assert f"rank-0000{victim}" in report.problem
    assert steps(tmp_path) == [1]
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))
    assert all(report.ok for report in save_on_all(tmp_path, 3))
    assert steps(tmp_path) == [1, 3]


@pytest.mark.parametrize(
    "moment", ["write manifest", "rename manifest", "commit", "open folder", "rename hint"]
)
def test_a_failure_of_rank_0_is_everyones_failure(tmp_path, moment):
    def point(name, rank):
        if name == moment:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    reports = save_on_all(tmp_path, 1, point)
    assert len({(report.ok, report.problem, report.notes) for report in reports}) == 1
    if moment == "rename hint":  # no run depends on the hint
        assert reports[0].ok
        assert "latest" in reports[0].notes[0]
    else:
        assert "Input/output error" in reports[0].problem
        assert steps(tmp_path) == []


def test_a_checkpoint_is_never_overwritten(tmp_path):
    assert all(report.ok for report in save_on_all(tmp_path, 5))
    before = (tmp_path / "checkpoints" / "step-00000005" / "MANIFEST.json").read_bytes()
    reports = save_on_all(tmp_path, 5)
    assert not reports[1].ok
    assert "step-00000005: this step is saved already" in reports[1].problem
    assert before == (tmp_path / "checkpoints" / "step-00000005" / "MANIFEST.json").read_bytes()


def test_pieces_that_do_not_make_whole_tensors_are_never_committed(tmp_path):
    ranks = cut_flat(tensors(1), WORLD)
    ranks[1] = [f for f in ranks[1] if f.name != "norm"]
    reports = run_threads(WORLD, lambda comm: save(tmp_path, 1, ranks[comm.rank], {}, comm))
    assert "norm (weight): 8 elements stored, it has 12" in reports[2].problem
    assert steps(tmp_path) == []


def test_the_pointer_moves_only_after_every_file_is_durable(tmp_path):
    """CKP-25: while any rank still writes, `latest` and the newest checkpoint are the old ones."""
    assert all(report.ok for report in save_on_all(tmp_path, 1))
    seen = []

    def point(name, rank):
        committed_now = steps(tmp_path)
        seen.append((name, (tmp_path / "checkpoints" / "latest").read_text(), committed_now))
        if rank == 2 and name == "write data":
            time.sleep(0.3)

    assert all(report.ok for report in save_on_all(tmp_path, 2, point))
    for name, hint, there in seen:
        if name.split()[0] in ("open", "write", "fsync") and "data" in name:
            assert (hint, there) == ("step-00000001\n", [1])
    assert seen[-1][2] == [1, 2]


def test_old_checkpoints_go_only_after_the_new_one_is_read_back(tmp_path):
    keep = Keep(newest=2, every=4)
    removed = []
    for step in range(1, 7):
        reports = save_on_all(tmp_path, step, keep=keep)
        assert all(report.ok for report in reports)
        removed += reports[0].removed
    assert removed == [1, 2, 3]
    assert steps(tmp_path) == [4, 5, 6]

    def rot(name, rank):  # between write and read-back
        path = tmp_path / "checkpoints" / "step-00000007.tmp-0" / "rank-00001.bin"
        if (name, rank) == ("exchange write", 1):
            path.write_bytes(path.read_bytes()[:-1])

    reports = save_on_all(tmp_path, 7, rot, keep=keep)
    assert "rank-00001.bin" in reports[2].problem
    assert steps(tmp_path) == [4, 5, 6]
    assert not list((tmp_path / "checkpoints").glob("step-00000007*"))
    loaded, same = load_on_all(tmp_path)
    assert same
    assert loaded[0].step == 6
    assert loaded[0].damaged == []


def test_what_cannot_be_removed_fails_neither_this_save_nor_the_next(tmp_path, monkeypatch):
    assert all(report.ok for report in save_on_all(tmp_path, 1))

    def stuck(path, *args, **kwargs):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(shutil, "rmtree", stuck)
    reports = save_on_all(tmp_path, 2, keep=Keep(newest=1))
    assert all(report.ok for report in reports), reports[0].problem
    assert "not removed" in reports[0].notes[0]
    assert "step-00000001.gone-0: Device or resource busy" in reports[2].notes[0]
    assert all(report.ok for report in save_on_all(tmp_path, 3))
    assert steps(tmp_path) == [2, 3]


def test_an_old_checkpoint_loses_its_name_before_its_first_file(tmp_path):
    """Half removed, it could otherwise be taken for one that was damaged."""
    assert all(report.ok for report in save_on_all(tmp_path, 1))
    seen = []

    def point(name, rank):
        if name == "remove old":
            seen.append(steps(tmp_path))

    assert save_on_all(tmp_path, 2, point, keep=Keep(newest=1))[0].removed == (1,)
    assert seen == [[2]]


def test_a_manifest_names_layout_free_facts_and_no_pickle_is_written(tmp_path):
    save_on_all(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.world, manifest.state) == (1, WORLD, {"step": 1})
    names = {path.name for path in folder.iterdir()}
    assert names == set(manifest.files) | {"MANIFEST.json"}
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    values = sum(tensor.numel() for tensor in tensors(1).values())
    assert sum(path.stat().st_size for path in folder.glob("*.bin")) == 4 * values


def test_every_file_is_durable_before_its_name_is_and_the_commit_before_the_hint(
    tmp_path, monkeypatch
):
    """What SIGKILL does not show: after a power cut only what was synced is there."""
    assert save_on_all(tmp_path, 1, world=1)[0].ok
    steps_taken, paths = [], {}

    def seen(name, call):
        def wrapped(first, *args, **options):
            where = paths.get(first, first)
            result = call(first, *args, **options)
            if name == "open":
                paths[result] = str(first)
            steps_taken.append((name, str(where), str(args[0]) if name == "rename" else ""))
            return result

        return wrapped

    for name in ("open", "write", "fsync", "rename", "mkdir"):
        monkeypatch.setattr(os, name, seen(name, getattr(os, name)))

    def sync_record():
        steps_taken.append(("record", "", ""))

    options = dict(keep=Keep(newest=1), sync_record=sync_record)
    assert save_on_all(tmp_path, 2, world=1, **options)[0].ok
    monkeypatch.undo()

    def last(name, end, to=""):
        return max(
            i for i, (what, path, target) in enumerate(steps_taken)
            if what == name and path.endswith(end) and target.endswith(to)
        )  # fmt: skip

    commit = last("rename", ".tmp-0", "step-00000002")
    assert last("record", "") < commit
    for name in ("rank-00000.bin", "rank-00000.json", "MANIFEST.json.new"):
        assert last("write", name) < last("fsync", name) < commit
    assert last("rename", "MANIFEST.json.new") < last("fsync", ".tmp-0") < commit
    hint, old = last("rename", "latest.new"), last("rename", "step-00000001")
    assert any(commit < i < hint for i, one in enumerate(steps_taken)
               if one[:2] == ("fsync", str(tmp_path / "checkpoints")))  # fmt: skip
    assert last("fsync", "latest.new") < hint < old  # the old one goes last


def test_saving_on_rank_0_only_ends_with_a_hint_and_real_ranks_commit_together(tmp_path):
    """CKP-07, and the collective of torch.distributed in the same launch."""
    script = ROOT / "tests" / "workers" / "commit_worker.py"
    out = run_ranks(script, 2, 90, str(tmp_path / "out.json"), str(tmp_path / "run"))
    assert out["reports"] == [[True, None], [True, None]]
    assert out["loaded"] == [4, 4]
    assert "never under a condition on the rank" in out["alone"]
    assert out["waited_s"] < 20 * PATIENCE
