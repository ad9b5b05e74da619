"""Saves and loads small states with ranks that are threads, for tests of checkpoints."""

from __future__ import annotations

import torch
from rank_threads import run_threads
from small_fragments import blank, cut_flat, full_tensors

from checkpoint.format.manifest import committed
from checkpoint.load.restoring import load
from checkpoint.save.commit import save

WORLD = 3


SHAPES = {"w": (40, 12), "norm": (12,)}


def tensors(step):
    """State after `step`; every step has another one."""
    return full_tensors(SHAPES, seed=step)


def save_on_all(run, step, point=lambda name, rank: None, world=WORLD, **options):
    """Save with `world` ranks; returns what each rank returned or raised."""
    ranks = cut_flat(tensors(step), world)

    def one(comm):
        state = {"step": step}
        return save(run, step, ranks[comm.rank], state, comm, point=point, **options)

    return run_threads(world, one)


def load_on_all(run, world=WORLD, step=None):
    """Load with `world` ranks; returns what each returned or raised, and True where all values are
    right.
    """
    empty = [blank(fragments) for fragments in cut_flat(tensors(0), world)]
    results = run_threads(world, lambda comm: load(run, empty[comm.rank], comm, step))
    if isinstance(results[0], BaseException) or results[0] is None:
        return results, None
    expected = cut_flat(tensors(results[0].step), world)
    same = all(
        torch.equal(a.tensor, b.tensor)
        for own, rank in zip(expected, empty, strict=True)
        for a, b in zip(own, rank, strict=True)
    )
    return results, same


def steps(run):
    """Steps of the committed checkpoints of a run."""
    return [step for step, _ in committed(run / "checkpoints")]
