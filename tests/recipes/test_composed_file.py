"""recipes.composed_file: what the launcher composed is what every rank gets, to the last value."""

from __future__ import annotations

import json

import pytest

from base.errors import UserError
from recipes.compose import compose, compose_command, recipe_yaml
from recipes.composed_file import composed_text, differences, digest, flat, plain, read_composed

OVERRIDES = [
    "run=a=b", "optim.lr=3e-4", "batch_tokens=[[0,2048],[100,4096]]", "data.sources.no.corpus=x",
    "data.sources.2023={corpus: y, weight: [[0,1],[50,0.1]]}", "ds.zero_optimization.x=null",
    "data.skip.mask=[{source: no, documents: [3,5], steps: [0,null]}]", "allow=[optim.lr]",
]  # fmt: skip


def test_a_composed_recipe_is_read_back_equal_and_reads_no_recipe_and_no_variable(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("RATE", "3e-4")
    composed = compose("tiny", [*OVERRIDES, "optim.lr=${oc.env:RATE}"])
    path = tmp_path / "composed.json"
    path.write_text(composed_text(composed))
    monkeypatch.setenv("RATE", "1e-3")  # of another host
    again = compose_command([f"composed={path}"])
    assert again == composed
    assert again.recipe.optim.lr == 3e-4
    assert digest(again.recipe) == digest(composed.recipe)


def test_fresh_is_an_instruction_of_one_start(tmp_path):
    composed = compose("tiny", ["resume=fresh"])
    assert composed.recipe.resume == "fresh"
    path = tmp_path / "composed.json"
    path.write_text(composed_text(composed))
    assert read_composed(path).recipe.resume == "auto"
    assert compose_command([f"composed={path}"]).recipe.resume == "auto"
    assert compose_command([f"composed={path}", "resume=fresh"]) == composed
    assert digest(composed.recipe) == digest(compose("tiny").recipe)
    assert "resume" not in recipe_yaml(composed.recipe)


def test_fresh_in_a_file_sets_no_run_aside_and_is_no_secret(tmp_path):
    path = tmp_path / "older.yaml"
    path.write_text(recipe_yaml(compose("tiny").recipe) + "resume: fresh\n")
    composed = compose(str(path))
    assert composed.recipe.resume == "auto"
    (line,) = composed.warnings
    assert line.startswith(f"resume='fresh' ({path}) has no effect: it is an instruction of one")
    assert line.endswith("OVERRIDES=resume=fresh")
    assert compose(str(path), ["resume=fresh"]).recipe.resume == "fresh"


@pytest.mark.parametrize("other", ["optim.lr=1", "recipe=tiny", "composed=x"])
def test_a_composed_recipe_takes_no_knob_beside_it(other, tmp_path):
    path = tmp_path / "composed.json"
    path.write_text(composed_text(compose("tiny")))
    with pytest.raises(UserError, match="is complete; beside it only resume can be given"):
        compose_command([f"composed={path}", other])
    with pytest.raises(UserError, match="resume='maybe'"):
        compose_command([f"composed={path}", "resume=maybe"])


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "composed.json"
    with pytest.raises(UserError, match="No such file"):
        read_composed(path)
    text = composed_text(compose("tiny"))
    content = json.loads(text)
    for wrong, reason in (
        (text[:-20], "no whole composed recipe"),
        (text.replace('"seed": 1234', '"seed": 1235'), "its digest is not that of its knobs"),
        (json.dumps(content | {"version": 2}), "its digest is not"),
        (json.dumps(content | {"recipe": content["recipe"] | {"new": 1}}), "new: no such knob"),
    ):
        assert wrong != text
        path.write_text(wrong)
        with pytest.raises(UserError, match=reason):
            read_composed(path)


def test_a_difference_names_knob_values_and_hosts():
    one = flat(plain(compose("tiny").recipe))
    two = flat(plain(compose("tiny", ["optim.lr=1e-3", "ds.x.y=1"]).recipe))
    assert differences({"a": one, "b": one}) == []
    assert differences({"a": one, "b": two, "c": one}) == [
        "ds={} on a, c, absent on b",
        "ds.x.y=absent on a, c, 1 on b",
        "optim.lr=0.002 on a, c, 0.001 on b",
    ]
