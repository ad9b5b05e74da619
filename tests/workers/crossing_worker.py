"""Saves under each of four layouts and resumes under each other one; run by test_crossing.py.

    torchrun crossing_worker.py OUT.json CORPUS FOLDER

Writes the losses of each pair, which runs below FOLDER hold the same state, and what is found when
a bit flips in a weight of the last rank.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from parity_worker import SEQ_LEN, tiny_recipe
from pipeline_worker import Run

from checkpoint.comm import RankComm
from checkpoint.load.restoring import load
from checkpoint.save.commit import save
from checkpoint.save.replicas import Drift, Replica, differing, locate, summary
from recipes.schema import Parallel, Recipe
from runtime.process import process

SAVED, LAST = 2, 4  # steps
# name: (ZeRO stage, axes)
LAYOUTS: dict[str, tuple[int, dict]] = {
    "pipeline 2 x tensor 2, ZeRO-1": (1, {"pipeline": 2, "tensor": 2}),
    "data 4, ZeRO-3": (3, {}),
    "pipeline 4, ZeRO-1": (1, {"pipeline": 4}),
    "tensor 2 x data 2, ZeRO-2": (2, {"tensor": 2}),
}


def recipe_of(name: str, corpus: Path) -> Recipe:
    """Recipe with tied weights and a vocabulary that two tensor ranks cannot share evenly."""
    stage, axes = LAYOUTS[name]
    recipe = tiny_recipe(
        corpus,
        stage=stage,
        micro_batch=2,
        precision="fp32",
        parallel=Parallel(**axes),
        batch_tokens=8 * SEQ_LEN,
        steps=LAST,
    )
    model = dataclasses.replace(recipe.model, num_hidden_layers=4, vocab_size=65)
    return dataclasses.replace(recipe, model=model)


def train(run: Run, first: int, last: int) -> list[float]:
    """Losses of the updates `first` to `last`."""
    return [float(run.step(step).loss) for step in range(first, last + 1)]


def save_to(folder: Path, run: Run, ranks: RankComm) -> None:
    state: dict[str, Any] = {"step": SAVED, "recipe": dataclasses.asdict(run.recipe)}
    report = save(folder, SAVED, run.engine.fragments(), state, ranks)
    assert report.ok, report.problem


def flipped(run: Run, ranks: RankComm) -> dict[str, Any]:
    """Flip a bit on the last rank in each of its groups of holders.

    Returns, for each group, the changed weight, the holders that differ before the change, and the
    weight and ranks that are found.
    """
    own = run.engine.replicas()
    last = {replica.holders: replica for replica in own}
    seen: dict[str, Any] = {"before": drifted(own, ranks)[0], "found": {}, "holders": {}}
    everyone = ranks.exchange([replica.holders for replica in own], "holders")
    for holders in ranks.exchange(list(last), "groups")[-1]:
        name = last[holders].name if ranks.rank == ranks.world - 1 else None
        if name:
            first_byte = last[holders].tensor.detach().view(torch.uint8).view(-1)[:1]
            first_byte ^= 1
        differ, found = drifted(own, ranks)
        if name:
            first_byte ^= 1
        name = ranks.exchange(name, "name")[-1]
        drifts = [[drift.parameter, drift.more, list(drift.ranks)] for drift in found]
        seen["found"][holders] = [name, differ == [holders], drifts]
        seen["holders"][holders] = [r for r, groups in enumerate(everyone) if holders in groups]
    return seen


def drifted(own: list[Replica], ranks: RankComm) -> tuple[list[str], list[Drift]]:
    differ = differing(ranks.exchange(summary(own), "summary"))
    return differ, locate(own, differ, ranks)


def main(out: Path, corpus: Path, folder: Path) -> None:
    seen: dict[str, Any] = {"before": {}, "after": {}, "same": [], "flipped": {}}
    # One engine after the other: DeepSpeed keeps the grid of the last one in globals.
    ranks = None
    for name in LAYOUTS:
        run = Run(recipe_of(name, corpus))
        ranks = ranks or RankComm()
        seen["before"][name] = train(run, 1, SAVED)
        save_to(folder / name, run, ranks)
        seen["flipped"][name] = flipped(run, ranks)
    for target in LAYOUTS:
        run = Run(recipe_of(target, corpus))
        for source in LAYOUTS:
            if source == target:
                continue
            load(folder / source, run.engine.fragments(), ranks)
            run.engine.after_load(SAVED)
            if not any(again == target for _, again in seen["same"]):
                save_to(folder / f"{target} again", run, ranks)
                seen["same"].append((source, target))
            seen["after"][f"{source} -> {target}"] = train(run, SAVED + 1, LAST)
    if process.launched_rank() == 0:
        out.write_text(json.dumps(seen))
    process.finish()
    process.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
