"""Saves beside training: what changes after the call is in no file, and nothing waits unseen."""

from __future__ import annotations

import threading

import torch
from test_commit import tensors
from test_storage import cut_flat
from threads import run_threads

from checkpoint.background import Background
from checkpoint.commit import save
from checkpoint.state import random_states

WORLD = 2
LONG = 60.0


def begin_on_all(run, step, then=lambda: None, point=lambda name, rank: None, world=WORLD):
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
    gate = threading.Event()

    def one(comm, background):
        own = ranks[comm.rank]
        state = {"step": 5, "optimizer_step": 4, "health": {"skipped_steps": 1, "norms": [1.0]}}
        local = {"random": random_states()}
        if not background:
            return save(tmp_path / "sync", 5, own, state, comm, local=local)
        saver = Background(comm)
        hold = lambda name, rank: gate.wait(LONG) if name.startswith("exchange prepare") else None  # noqa: E731
        saver.begin(tmp_path / "async", 5, own, state, local=local, point=hold)
        for fragment in own:
            fragment.tensor.fill_(float("nan"))
        state["optimizer_step"] = 99
        state["health"]["skipped_steps"] = 99
        state["health"]["norms"].append(99.0)
        local["random"]["torch"] = "99"
        local["random"]["numpy"][2] = 99
        torch.rand(10)
        assert saver.in_flight == 5
        assert saver.take() is None
        gate.set()
        return saver.take(LONG)

    assert all(r.ok for r in run_threads(WORLD, lambda comm: one(comm, background=False)))
    reports = run_threads(WORLD, lambda comm: one(comm, background=True))
    assert all(report.ok for report in reports), reports
    assert all(0 < report.stall_s < report.seconds for report in reports)
    assert files_of(tmp_path / "sync", 5) == files_of(tmp_path / "async", 5)
