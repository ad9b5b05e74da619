"""recipes.interpolation: constant values only, and variables as if they had been typed."""

from __future__ import annotations

import pytest

from base.errors import UserError
from recipes.compose import compose


@pytest.mark.parametrize(
    ("value", "resolver"),
    [
        ("x-${now:%H-%M}", "now"),
        ("${hydra:job.name}", "hydra"),
        ("${python_version:major}", "python_version"),
        ("${random:1}", "random"),
        ("${oc.env:NAME,${now:%H}}", "now"),
        ("${${seed}:1}", r"\$\{seed\}"),
    ],
)
def test_a_value_that_may_change_between_processes_is_refused(value, resolver, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [{{model: llama-tiny}}, {{data: sotu}}, _self_]\nrun: '{value}'\n")
    for given in (("tiny", [f"run={value}"]), (str(path), ["optim.lr=1"])):
        with pytest.raises(UserError, match=f"the resolver {resolver} may give another value"):
            compose(*given)


def test_a_changing_value_inside_a_list_or_the_deepspeed_keys_is_refused():
    for text in ("alerts.command=[a,'${now:%H}']", "ds.a.b='${now:%H}'"):
        with pytest.raises(UserError, match="the resolver now may give another value"):
            compose("tiny", [text])


@pytest.mark.parametrize(
    ("knob", "text", "read"),
    [
        ("compile", "true", lambda recipe: recipe.compile is True),
        ("compile", "False", lambda recipe: recipe.compile is False),
        ("allow", "[optim.lr,steps]", lambda recipe: recipe.allow == ("optim.lr", "steps")),
        ("micro_batch", "4", lambda recipe: recipe.micro_batch == 4),
        ("optim.lr", "1e-3", lambda recipe: recipe.optim.lr == 1e-3),
        ("data.window_tokens", "null", lambda recipe: recipe.data.window_tokens is None),
        ("ds.zero_optimization.overlap_comm", "true",
         lambda recipe: recipe.ds == {"zero_optimization": {"overlap_comm": True}}),
        ("run", "007", lambda recipe: recipe.run == "007"),
        ("run", "true", lambda recipe: recipe.run == "true"),
        ("batch_tokens", "[[0,2048],[9,4096]]",
         lambda recipe: recipe.batch_tokens == ((0, 2048), (9, 4096))),
    ],
)  # fmt: skip
def test_a_variable_is_read_as_if_it_had_been_typed(knob, text, read, monkeypatch):
    monkeypatch.setenv("VALUE", text)
    assert read(compose("tiny", [f"{knob}=${{oc.env:VALUE}}"]).recipe)
    monkeypatch.delenv("VALUE")
    if knob != "run" and "," not in text:
        assert read(compose("tiny", [f"{knob}=${{oc.env:VALUE,{text}}}"]).recipe)


def test_a_variable_whose_text_has_an_interpolation_is_no_interpolation(monkeypatch):
    monkeypatch.setenv("VALUE", "${now:%H}")
    with pytest.raises(UserError, match=r"seed='\$\{now:%H\}'.* is not a whole number"):
        compose("tiny", ["seed=${oc.env:VALUE}"])


def test_a_nested_interpolation_is_taken_in_the_form_that_the_refusal_names(monkeypatch):
    monkeypatch.setenv("RATE", "3e-4")
    with pytest.raises(UserError) as refused:
        compose("tiny", ["optim.lr=${oc.decode:${oc.env:RATE}}"])
    form = refused.value.problems[0].partition("in single quotes: ")[2]
    assert form == "optim.lr='${oc.decode:${oc.env:RATE}}'"
    assert compose("tiny", [form]).recipe.optim.lr == 3e-4


@pytest.mark.parametrize("knob", ["ds.zero_optimization.overlap_comm", "ds.x", "optim.lr"])
def test_a_missing_variable_is_one_line(knob):
    with pytest.raises(UserError) as refused:
        compose("tiny", [f"{knob}=${{oc.env:NOT_THERE}}"], check_ds=lambda ds: [f"saw {ds}"])
    assert refused.value.problems[0] == (
        f"{knob}: ${{oc.env:NOT_THERE}} has no value (Environment variable 'NOT_THERE' not found);"
        " name a knob that the recipe or an override sets (a default cannot be named), or an"
        " environment variable that is set: ${oc.env:NAME}"
    )
    others = ["saw {}"] if knob.startswith("ds.") else []
    assert refused.value.problems[1:] == others
