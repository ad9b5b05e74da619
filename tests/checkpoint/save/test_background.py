"""Saves beside training: what changes after the call is in no file, and nothing waits unseen."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import signal
import threading

import pytest
import torch
from rank_threads import Gone, Killed, run_threads
from ranks import PATIENCE
from saves_on_threads import load_on_all, steps, tensors
from small_fragments import cut_flat

from checkpoint.comm import Alone
from checkpoint.format.state import random_states
from checkpoint.save.background import Background
from checkpoint.save.commit import save

WORLD = 2
LONG = 60.0 * PATIENCE


def begin_on_all(
    run, step, then=lambda fragments: None, point=lambda name, rank: None, world=WORLD
):
    """Begin a save with `world` ranks, do `then` on each, and take the reports."""
    ranks = cut_flat(tensors(step), world)

    def one(comm):
        background = Background(comm)
        background.begin(run, step, ranks[comm.rank], {"step": step}, point=point)
        then(ranks[comm.rank])
        return background.take(LONG)

    return run_threads(world, one)


def files_of(run, step):
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_changes_after_the_call_reaches_no_file_and_the_files_are_those_of_a_save_in_the_step(
    tmp_path,
):
    """Weights, moments, counts, nested state and random states, while the writer has yet to
    start."""
    torch.manual_seed(3)
    ranks = cut_flat(tensors(5), WORLD)
    update_gate, changed = threading.Event(), threading.Barrier(WORLD)
    random_now = random_states()

    def one(comm, background):
        own = ranks[comm.rank]
        state = {"step": 5, "optimizer_step": 4, "health": {"skipped_steps": 1, "norms": [1.0]}}
        local = {"random": copy.deepcopy(random_now)}
        if not background:
            return save(tmp_path / "sync", 5, own, state, comm, local=local)
        saver = Background(comm)

        def hold(name, rank):
            if name == "exchange prepare":
                update_gate.wait(LONG)

        saver.begin(tmp_path / "async", 5, own, state, local=local, point=hold)
        for fragment in own:
            fragment.tensor.fill_(float("nan"))
        state["optimizer_step"] = 99
        state["health"]["skipped_steps"] = 99
        state["health"]["norms"].append(99.0)
        local["random"]["torch"] = "99"
        local["random"]["numpy"][2] = 99
        torch.rand(10)
        changed.wait(LONG)
        assert saver.in_flight == 5
        assert saver.take() is None
        update_gate.set()
        return saver.take(LONG)

    assert all(r.ok for r in run_threads(WORLD, lambda comm: one(comm, background=False)))
    reports = run_threads(WORLD, lambda comm: one(comm, background=True))
    assert all(report.ok for report in reports), reports
    assert all(0 < report.stall_s < report.seconds for report in reports)
    assert files_of(tmp_path / "sync", 5) == files_of(tmp_path / "async", 5)


def test_the_pointer_moves_only_after_every_file_is_durable(tmp_path):
    """CKP-25: while any rank still writes, and training goes on, the newest checkpoint is old."""
    assert all(report.ok for report in begin_on_all(tmp_path, 1))
    update_gate, seen = threading.Event(), []

    def point(name, rank):
        if (name, rank) == ("fsync data", WORLD - 1):
            update_gate.wait(LONG)

    def look(fragments):
        hint = (tmp_path / "checkpoints" / "latest").read_text()
        seen.append((hint, steps(tmp_path), load_on_all(tmp_path)[0][0].step))
        if len(seen) == WORLD:
            update_gate.set()

    reports = begin_on_all(tmp_path, 2, look, point)
    assert all(report.ok for report in reports)
    assert seen == [("step-00000001\n", [1], 1)] * WORLD
    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000002\n"


@pytest.mark.parametrize("victim", range(WORLD))
def test_what_fails_on_one_rank_fails_the_save_on_all_and_the_next_one_works(tmp_path, victim):
    """In the writer, and in the copy: memory that cannot be had."""
    ranks = cut_flat(tensors(2), WORLD)

    def point(name, rank):
        if (name, rank) == ("write data", victim):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Refusing:
        def take(self, fragments):
            raise RuntimeError("no memory for the copy")

    def one(comm):
        background = Background(comm)
        background.begin(tmp_path, 1, ranks[comm.rank], {}, point=point)
        reports = [background.take(LONG)]
        snapshot = background._snapshot
        background._snapshot = Refusing() if comm.rank == victim else snapshot
        background.begin(tmp_path, 2, ranks[comm.rank], {})
        reports.append(background.take(LONG))
        background._snapshot = snapshot
        background.begin(tmp_path, 3, ranks[comm.rank], {})
        return [*reports, background.take(LONG)]

    for full, refused, good in run_threads(WORLD, one):
        assert f"write: rank {victim}: " in full.problem
        assert "No space left on device" in full.problem
        assert "no memory for the copy" in refused.problem
        assert good.ok
    assert steps(tmp_path) == [3]


def test_the_copy_exists_once_and_its_memory_is_made_once(tmp_path):
    (fragments,) = cut_flat(tensors(1), 1)
    background = Background(Alone())
    for step in (1, 2):
        background.begin(tmp_path, step, fragments, {})
        with pytest.raises(AssertionError, match="one save at a time"):
            background.begin(tmp_path, 9, fragments, {})
        memory = background._snapshot._memory
        assert len(memory) == sum(4 * fragment.count for fragment in fragments)
        assert background.take(LONG).bytes >= len(memory)
        if step == 1:
            first = memory.data_ptr()
    assert memory.data_ptr() == first
    assert background.take() is None


def test_a_writer_whose_ranks_are_lost_raises_where_its_report_is_taken(tmp_path):
    def point(name, rank):
        if (name, rank) == ("write data", 1):
            raise Killed

    results = begin_on_all(tmp_path, 1, point=point)
    assert isinstance(results[0], Gone)
    assert isinstance(results[1], Killed)
    assert steps(tmp_path) == []


def _train_until_killed(run, moment):
    torch.set_num_threads(1)

    def point(name, rank):
        if name == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    (fragments,) = cut_flat(tensors(2), 1)
    background = Background(Alone())
    background.begin(run, 2, fragments, {"step": 2}, point=point)
    background.take(LONG)


@pytest.mark.parametrize("moment", ["start writer", "write data", "commit", "fsync parent"])
def test_a_process_killed_while_it_writes_loses_only_that_save(tmp_path, moment):
    assert begin_on_all(tmp_path, 1, world=1)[0].ok
    process = multiprocessing.get_context("fork").Process(
        target=_train_until_killed, args=(tmp_path, moment)
    )
    process.start()
    process.join(LONG)
    assert process.exitcode == -signal.SIGKILL
    loaded, same = load_on_all(tmp_path)
    assert same
    assert loaded[0].step == (2 if moment == "fsync parent" else 1)
    assert begin_on_all(tmp_path, 3, world=1)[0].ok
