"""record/run_status.py: what the record of a run shows to a person."""

from __future__ import annotations

import json

from record.run_status import start_command


def test_the_command_that_goes_on_carries_the_number_of_ranks(tmp_path):
    for name, world in (("two", 2), ("one", 1)):
        (tmp_path / name).mkdir()
        layout = {"places": [[0, rank, 0, 0] for rank in range(world)]}
        (tmp_path / name / "layout.json").write_text(json.dumps(layout))
    assert start_command(tmp_path / "two") == "make pretrain RECIPE=runs/two/recipe.yaml NPROC=2"
    assert start_command(tmp_path / "one") == "make pretrain RECIPE=runs/one/recipe.yaml"
    assert start_command(tmp_path / "new", tmp_path / "two").endswith("new/recipe.yaml NPROC=2")
    assert start_command(tmp_path / "gone") == "make pretrain RECIPE=runs/gone/recipe.yaml"
