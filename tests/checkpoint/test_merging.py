"""checkpoint.merging: averages of small checkpoints, written by several ranks in other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_tensors import tensors_of
from small_fragments import cut_flat, full_tensors

from base.errors import UserError
from checkpoint import merging
from checkpoint.format.manifest import Manifest, read_manifest
from checkpoint.format.storage import write_rank
from checkpoint.load.choosing import Found, verify
from checkpoint.load.restoring import CheckpointReader, open_checkpoint

SHAPES = {"matrix": (7, 5), "vector": (11,)}
STATE = {"segment": 0, "health": {"val_loss": 2.0, "val_step": 3, "skipped_steps": 1}}


def written(folder: Path, tensors, world: int, step: int) -> CheckpointReader:
    """A checkpoint of `tensors`, of `world` ranks, opened."""
    folder.mkdir(parents=True)
    files = {}
    for rank, fragments in enumerate(cut_flat(tensors, world)):
        files |= write_rank(folder, rank, fragments, {"of": rank})
    made = Manifest(step, 1, world, STATE, files)
    (folder / "MANIFEST.json").write_bytes(merging.encode(made))
    return open_checkpoint(Found(step, folder, read_manifest(folder)))


@pytest.mark.parametrize("piece", [1, 4, 1 << 24])
def test_the_average_of_checkpoints_of_other_layouts_has_the_layout_of_the_newest(
    tmp_path, monkeypatch, piece
):
    monkeypatch.setattr(merging, "PIECE", piece)
    three = [full_tensors(SHAPES, seed) for seed in range(3)]
    readers = [
        written(tmp_path / "run" / "checkpoints" / f"step-0000000{step}", tensors, world, step)
        for step, (tensors, world) in enumerate(zip(three, (2, 1, 3), strict=True), start=1)
    ]
    out = tmp_path / "mean" / "checkpoints" / "step-00000003"
    out.parent.mkdir(parents=True)
    merging.average(list(zip(readers, (0.25, 0.5, 1.0), strict=True)), out)
    assert verify(out, "full") == []
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in readers[-1].folder.iterdir()
    )
    found = tensors_of(tmp_path / "mean", 3)
    for key, tensor in found.items():
        a, b, c = (tensors[key].double().ravel() for tensors in three)
        torch.testing.assert_close(tensor.double(), (a / 4 + b / 2 + c) / 1.75, rtol=1e-7, atol=0)
    manifest = read_manifest(out)
    assert (manifest.step, manifest.world) == (3, 3)
    assert manifest.state["health"] == {"val_loss": None, "val_step": None, "skipped_steps": 1}
    indexes = open_checkpoint(Found(3, out, manifest)).indexes
    assert [index["local"] for index in indexes] == [{"of": 0}, {"of": 1}, {"of": 2}]


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0, 1.0), (0.729, 0.81, 0.9, 1.0)])
def test_the_average_of_a_checkpoint_with_itself_is_that_checkpoint(tmp_path, shares):
    tensors = full_tensors(SHAPES)
    reader = written(tmp_path / "step-00000003", tensors, 2, 3)
    out = tmp_path / "mean"
    merging.average([(reader, share) for share in shares], out)
    for path in sorted(reader.folder.glob("*.bin")):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_checkpoints_of_other_models_are_refused(tmp_path):
    one = written(tmp_path / "step-00000001", full_tensors({"matrix": (7, 5)}), 1, 1)
    two = written(tmp_path / "step-00000002", full_tensors(SHAPES), 1, 2)
    with pytest.raises(UserError, match="vector: not in the checkpoint"):
        merging.average([(one, 1.0), (two, 1.0)], tmp_path / "mean")
