"""Damage to the files of a checkpoint: found before use, by all ranks, and passed over."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from manifests import folder, rewritten
from rank_threads import run_threads
from saves_on_threads import load_on_all, save_on_all
from small_fragments import cut_flat, full_tensors

from checkpoint.format.blocks import KINDS, Damaged, Problem
from checkpoint.format.epochs import Fenced
from checkpoint.format.manifest import committed
from checkpoint.load import choosing
from checkpoint.load.choosing import verify
from checkpoint.load.restoring import load
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep, best, removable
from record.records import read_events, record_event
from runtime.log.rank0_record import RunRecord

WORLD = 3
FILES = ["MANIFEST.json", "rank-00000.bin", "rank-00001.bin", "rank-00002.bin", "rank-00001.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a run with checkpoints of steps 100 and 1000."""
    run = tmp_path_factory.mktemp("made")
    for step in (100, 1000):
        assert save_on_all(run, step, world=WORLD)[0].ok
    return run


@pytest.fixture
def newest(made):
    """The newest checkpoint; it is restored afterwards."""
    where = folder(made, 1000)
    before = {path: path.read_bytes() for path in where.iterdir()}
    yield where
    for path in where.iterdir():
        path.unlink()
    for path, data in before.items():
        path.write_bytes(data)


def passed_over(run):
    """Load on all ranks: all find the same damage of step 1000, which is returned, and load 100."""
    results, same = load_on_all(run, WORLD)
    assert same
    assert {result.step for result in results} == {100}
    lines = {str(result.damaged) for result in results}
    assert len(lines) == 1
    ((where, problems),) = results[0].damaged
    assert where.name == "step-00001000"
    return {problem.kind for problem in problems}


def flip(path, draw):
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(path, draw):
    os.truncate(path, draw.randrange(path.stat().st_size))


def grow(path, draw):
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 99)))


def drop(path, draw):
    path.unlink()


def link(path, draw):
    target = path.parent.parent / f"{path.name}-{draw.random()}"
    path.rename(target)
    path.symlink_to(target)


def pipe(path, draw):
    path.unlink()
    os.mkfifo(path)


CHANGES = {flip: {"flipped"}, cut: {"truncated"}, grow: {"grown", "flipped", "truncated"},
           drop: {"missing"}, link: {"unsafe"}, pipe: {"unsafe"}}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_damage_to_every_file_has_its_own_name(made, newest, change, name):
    seed = time.time_ns()
    print("seed of the place:", seed)  # shown when the test fails
    draw = random.Random(seed)
    change(newest / name, draw)
    kinds = passed_over(made)
    # A manifest has no size or digest but its own: its last byte lost or changed looks alike.
    alike = {"flipped", "truncated"} if name == "MANIFEST.json" and change in (flip, cut) else set()
    assert kinds <= CHANGES[change] | alike
    assert len(kinds) == 1


def test_swapped_ranks_a_name_that_leads_away_and_a_failing_disk(made, newest, monkeypatch):
    """CKP-04, and damage that no byte of the file shows."""
    one, two = newest / "rank-00000.bin", newest / "rank-00001.bin"
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    assert passed_over(made) <= {"flipped", "truncated", "grown"}
    one.write_bytes(data[0])
    two.write_bytes(data[1])
    real = os.preadv

    def failing(descriptor, *args):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(two):
            raise OSError(5, "Input/output error")
        return real(descriptor, *args)

    monkeypatch.setattr(os, "preadv", failing)
    assert passed_over(made) == {"unreadable"}
    monkeypatch.undo()

    def leave(body):
        body["files"]["../../outside.bin"] = body["files"].pop("rank-00001.bin")

    rewritten(made, leave)
    assert passed_over(made) == {"unsafe"}
    rewritten(made, lambda body: body["files"].update(x=body["files"].pop("../../outside.bin")))
    assert passed_over(made) == {"unsafe"}


def test_files_that_no_manifest_names_are_said_and_harm_nothing(made, newest):
    (newest / "notes.pt").write_bytes(b"?")
    assert verify(newest, "full") == []
    assert choosing.unnamed(newest) == ["notes.pt"]
    results, same = load_on_all(made, WORLD)
    assert same
    assert results[0].step == 1000
    assert results[0].unnamed == ["notes.pt"]


def test_a_problem_keeps_its_kind_on_the_way_to_other_ranks():
    damage = Damaged("a", Problem("b", "missing"), kind="flipped")
    assert [p.kind for p in pickle.loads(pickle.dumps(damage.problems))] == ["flipped", "missing"]


def test_each_kind_is_an_event_of_its_own(made, newest, tmp_path):
    """An attempt that passes a checkpoint over records why."""
    flip(newest / "rank-00000.bin", random.Random(1))
    drop(newest / "rank-00001.bin", None)
    results, _ = load_on_all(made, WORLD)
    damaged = results[0].damaged
    assert {problem.kind for problem in damaged[0][1]} == {"missing"}  # sizes are looked at first
    drop(newest / "rank-00002.json", None)
    problems = [*verify(newest, "full"), *damaged[0][1]]
    said, told = [], []

    def event(kind, **fields):
        record_event(tmp_path, kind, attempt=1, **fields)

    record = SimpleNamespace(
        writer=SimpleNamespace(event=event),
        console=SimpleNamespace(log=said.append),
        _pass_on=lambda kind, text: told.append(kind),
    )
    loaded = SimpleNamespace(
        damaged=[(newest, problems)], unnamed=["x.pt"], step=1, seconds=1.0, bytes=1
    )
    RunRecord.resumed(record, loaded, [])
    events = read_events(tmp_path, "damaged_checkpoint")
    assert {one["damage"] for one in events} == {"flipped", "missing"} <= set(KINDS)
    assert all(one["damage"] != "flipped" or "rank-00000.bin" in str(one) for one in events)
    assert read_events(tmp_path, "unnamed_files")[0]["files"] == ["x.pt"]
    assert "damaged and was passed over" in said[0]
    assert told == ["damaged_checkpoint"]  # people, by the alert's command


# Which checkpoints go


def state(loss, skipped=0):
    return {"health": {"val_loss": loss, "skipped_since_save": skipped}}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, None),
        ({1: {}, 2: {"health": {}}}, None),
        ({1: state(3.0), 2: state(2.0), 3: state(2.5)}, 2),
        ({1: state(3.0), 2: state(2.0, skipped=1), 3: state(2.5)}, 3),
        ({1: state(2.0), 2: state(2.0)}, 2),
        ({1: state(None), 2: state(float("nan")), 3: state(True), 4: state("1"), 5: state(9)}, 5),
    ],
)
def test_the_best_checkpoint_is_the_lowest_validation_loss_without_a_skipped_step(states, expected):
    assert best(states) == expected


def test_the_best_one_stays_and_what_is_newer_than_the_verified_one_does_not_count():
    keep = Keep(newest=2, every=10)
    assert removable([1, 2, 3, 4], keep, 4, healthiest=2) == [1]
    assert removable([1, 2, 3, 10, 11, 12], keep, 12) == [1, 2, 3]
    # 90 and 95 are of a segment that was left: they do not push the run's own out.
    assert removable([4, 6, 8, 90, 95], keep, 8) == [4]


def test_a_run_keeps_its_healthiest_checkpoint(tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 6.0, 6: 7.0}
    for step, loss in losses.items():
        ranks = cut_flat(full_tensors({"w": (8, 3)}, seed=step), 2)
        values = state(loss, skipped=step == 4)

        def one(comm, ranks=ranks, step=step, values=values):
            keep = Keep(newest=1)
            return save(tmp_path, step, ranks[comm.rank], values, comm, keep=keep)

        assert all(report.ok for report in run_threads(2, one))
    assert [step for step, _ in committed(tmp_path / "checkpoints")] == [2, 6]


def test_all_ranks_hear_that_the_run_is_another_lifes(tmp_path):
    class Lost:
        epoch = 4

        def __init__(self, after):
            self.left = after

        def check(self):
            self.left -= 1
            if self.left < 0:
                raise Fenced("epoch 5 has it")

    for after in range(3):  # at prepare, at the commit, at the hint
        results = save_on_all(tmp_path, 7 + after, fence=Lost(after))
        assert [type(result) for result in results] == [Fenced] * 3, after
        assert {str(result) for result in results} == {"epoch 5 has it"}
    assert [step for step, _ in committed(tmp_path / "checkpoints")] == [9]
    for result in run_threads(1, lambda comm: load(tmp_path, [], comm)):
        assert result.step == 9
    assert json.loads((folder(tmp_path, 9) / "MANIFEST.json").read_text())["epoch"] == 4


def test_a_rank_that_sees_a_new_folder_late_waits_for_it(tmp_path, monkeypatch):
    """Network file systems show names late; rank 0 alone decides which checkpoints exist."""
    real, lies = Path.is_dir, []

    def lagging(path, **options):
        if ".tmp-" in path.name and len(lies) < 3:
            lies.append(path)
            return False
        return real(path, **options)

    monkeypatch.setattr(Path, "is_dir", lagging)
    assert all(report.ok for report in save_on_all(tmp_path, 1))
    assert len(lies) == 3
