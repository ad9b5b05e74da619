"""recipes.overrides: what people type is taken as they mean it, or refused with what works."""

from __future__ import annotations

import pytest

from base.errors import UserError
from recipes.compose import compose, recipe_yaml


def refusal(*overrides: str, recipe_name: str = "tiny") -> str:
    with pytest.raises(UserError) as refused:
        compose(recipe_name, list(overrides))
    return "\n".join(refused.value.problems)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run=a=b", "a=b"),
        ("+run=a=b", "a=b"),
        ("run=lr=1e-3", "lr=1e-3"),
        ("data.tokenizer=texts/a b", "texts/a b"),
        ("data.tokenizer=texts#2", "texts#2"),
        ("data.tokenizer=stra\u00dfe/\u8a9e", "stra\u00dfe/\u8a9e"),
        ("data.tokenizer='stra\u00dfe'", "stra\u00dfe"),
        ("data.tokenizer=~/mine", "~/mine"),
        ("data.tokenizer=mine (2)", "mine (2)"),
        ("data.tokenizer=it's", "it's"),
        ("data.tokenizer='a,b'", "a,b"),
        ("  data.tokenizer = mine  ", "mine"),
    ],
)
def test_a_text_is_taken_as_it_was_typed(override, value):
    recipe = compose("tiny", [override]).recipe
    assert value in (recipe.run, recipe.data.tokenizer)


def test_what_a_written_recipe_holds_comes_back(tmp_path):
    given = ["data.sources.no.corpus=a#b", "data.sources.2023.corpus='x: y'",
             "data.sources.on.corpus=\u8a9e"]  # fmt: skip
    recipe = compose("tiny", given).recipe
    assert list(recipe.data.sources) == ["prose", "no", "2023", "on"]
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe), encoding="utf-8")
    assert compose(str(path)).recipe == recipe


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("allow=optim.lr,steps", "a list has brackets; write allow=[optim.lr,steps]"),
        ("allow=optim.lr", "a list has brackets; write allow=[optim.lr]"),
        ("parallel.bounds=7,14", "a list has brackets; write parallel.bounds=[7,14]"),
        ("data.tokenizer=a,b", "text with a comma goes in quotes: data.tokenizer='a,b'"),
        ("zero_optimization.stage=2", "a knob of the recipe sets this for DeepSpeed: zero=2"),
        ("+zero_optimization.stage=2", "a knob of the recipe sets this for DeepSpeed: zero=2"),
        ("gradient_clipping=0.5", "sets this for DeepSpeed: optim.clip=0.5"),
        ("train_batch_size=64", "sets this for DeepSpeed: batch_tokens=TOKENS"),
        ("+zero_optimization.overlap_comm=true",
         "is given as ds.zero_optimization.overlap_comm=true"),
        ("optim.lr", "write knob=value, without blanks beside the ="),
        ("=", "write knob=value, without blanks beside the ="),
        ("alerts.command=[a,stra\u00dfe]", "letters beyond ASCII in single quotes"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused_with_the_form_that_works(override, way_out):
    assert way_out in refusal(override)


@pytest.mark.parametrize("key", ["no", "on", "true", "2023", "1e3", "0x10", "null", "~"])
@pytest.mark.parametrize("beside", ["", "  other: {corpus: y}\n"])
def test_a_source_whose_name_yaml_reads_as_a_value_is_refused(key, beside, tmp_path):
    path = tmp_path / "mine.yaml"
    text = (
        "defaults: [{model: llama-tiny}, {data: sotu}, _self_]\noptim: {lr: 1e-3}\nseq_len: 8\n"
        f"batch_tokens: 8\nsteps: 1\ndata:\n sources:\n{beside}  KEY: {{corpus: x}}\n"
    )
    path.write_text(text.replace("KEY", key))
    line = 8 if beside else 7
    assert f"line {line + 1}: YAML reads the key {key} as a value" in refusal(recipe_name=str(path))
    path.write_text(text.replace("KEY", f"'{key}'"))
    if key != "~":  # a name is letters, digits, dash and underscore
        assert key in compose(str(path)).recipe.data.sources


def test_a_key_that_is_a_number_on_the_command_line_is_refused_with_the_form_that_works():
    line = refusal("data.sources={2023: {corpus: x}, web: {corpus: y}}")
    assert "data.sources.2023: the key 2023 is no text" in line
    assert "data.sources.2023...= on the command line" in line
    assert "2023" in compose("tiny", ["data.sources.2023.corpus=x"]).recipe.data.sources


def test_a_mask_of_a_source_that_yaml_reads_as_false_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    mask = "{source: no, documents: [3, 5], steps: [0, null]}"
    text = "defaults: [tiny, _self_]\ndata: {skip: {mask: [MASK]}, sources: {'no': {corpus: x}}}\n"
    path.write_text(text.replace("MASK", mask))
    assert "has the source false, which is no text" in refusal(recipe_name=str(path))
    path.write_text(text.replace("MASK", mask.replace("no,", "'no',")))
    assert compose(str(path)).recipe.data.skip.mask[0]["source"] == "no"


def test_an_option_beside_an_outside_recipe_can_be_chosen(tmp_path):
    """`model=mine` works on the command line as it works in the recipe's defaults."""
    (tmp_path / "model").mkdir()
    shape = (
        "vocab_size: 300\nhidden_size: 8\nintermediate_size: 8\nnum_hidden_layers: 1\n"
        "num_attention_heads: 2\nnum_key_value_heads: 1\n"
    )
    (tmp_path / "model" / "mine.yaml").write_text(shape)
    path = tmp_path / "outside.yaml"
    path.write_text(
        "defaults: [{model: llama-tiny}, {data: sotu}, _self_]\noptim: {lr: 1e-3}\nseq_len: 8\n"
        "batch_tokens: 8\nsteps: 1\n"
    )
    assert compose(str(path), ["model=mine"]).recipe.model.vocab_size == 300
    assert compose(str(path), ["model=llama-1b"]).recipe.model.vocab_size == 128256
    assert "There are: llama-125m" in refusal("model=other", recipe_name=str(path))
    assert "mine" not in refusal("model=other").partition("There are")[2]
