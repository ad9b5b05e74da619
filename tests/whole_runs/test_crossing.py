"""A checkpoint of any layout loads under any other: twelve pairs of four layouts, one launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from crossing_worker import LAST, LAYOUTS, SAVED, recipe_of
from plain_loop import plain_loop, relative
from ranks import ROOT, run_ranks
from safetensors.torch import load_file

from checkpoint.export import export

WORKER = ROOT / "tests" / "workers" / "crossing_worker.py"
TIMEOUT_S = 280


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("crossing")


@pytest.fixture(scope="module")
def seen(short_documents, folder) -> dict:
    arguments = str(folder / "seen.json"), str(short_documents), str(folder)
    return run_ranks(WORKER, 4, TIMEOUT_S, *arguments)


@pytest.fixture(scope="module")
def expected(short_documents) -> list[float]:
    """Losses of an uninterrupted plain loop."""
    return plain_loop(recipe_of(next(iter(LAYOUTS)), short_documents), LAST)["loss"]


def test_losses_go_on_as_if_the_layout_had_not_changed(seen, expected):
    assert len(seen["after"]) == len(LAYOUTS) * (len(LAYOUTS) - 1) == 12
    for name, losses in seen["before"].items():
        assert relative(losses, expected[:SAVED]) < 1e-6, name
    for name, losses in seen["after"].items():
        assert relative(losses, expected[SAVED:]) < 1e-6, name


def test_what_went_through_another_layout_exports_the_same_weights_to_the_bit(seen, folder):
    assert len(seen["same"]) == len(LAYOUTS)
    for number, (source, target) in enumerate(seen["same"]):
        made = []
        for name in (source, f"{target} again"):
            out = folder / f"exported {number} {name}"
            export(folder / name, out, dtype="fp32", check=False)
            made.append(load_file(out / "model.safetensors"))
        assert made[0].keys() == made[1].keys()
        assert all(torch.equal(tensor, made[1][key]) for key, tensor in made[0].items())


def test_a_flipped_bit_in_any_kind_of_copy_names_its_rank_and_weight(seen):
    """Copies on data ranks, replicated weights on tensor ranks, tied weights on pipeline stages."""
    groups = {
        "pipeline 2 x tensor 2, ZeRO-1": {
            "pipeline stage 1": [2, 3],
            "tied weights, tensor rank 1": [1, 3],
        },
        "data 4, ZeRO-3": {"pipeline stage 0": [0, 1, 2, 3]},
        "pipeline 4, ZeRO-1": {"tied weights": [0, 3]},
        "tensor 2 x data 2, ZeRO-2": {
            "pipeline stage 0": [0, 1, 2, 3],
            "pipeline stage 0, tensor rank 1": [1, 3],
        },
    }
    for name, expected in groups.items():
        case = seen["flipped"][name]
        assert case["before"] == []  # no false alarm after training
        assert case["holders"] == expected
        for holders, (weight, is_alone, drifts) in case["found"].items():
            odd = [3] if len(expected[holders]) > 2 else expected[holders]
            assert is_alone
            assert drifts == [[weight, 0, odd]], (name, holders)
