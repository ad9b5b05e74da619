"""What a recipe composes to, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import os

import pytest

from base.errors import UserError
from base.values import as_float, as_int, did_you_mean
from recipes.check import knob_names
from recipes.compose import compose, compose_command, recipe_yaml


def refused(*overrides: str, recipe_name: str = "tiny") -> list[str]:
    """The problems of a recipe that must be refused, each one line."""
    with pytest.raises(UserError) as caught:
        compose(recipe_name, overrides)
    problems = caught.value.problems
    assert all("\n" not in line for line in problems)
    return problems


def only(*overrides: str, recipe_name: str = "tiny") -> str:
    """The single problem of a refused recipe."""
    (problem,) = refused(*overrides, recipe_name=recipe_name)
    return problem


def test_a_value_override_needs_no_plus_and_knows_where_it_came_from():
    composed = compose("tiny", ["seq_len=128", "stop_after=5", "+ds.zero_optimization.x=1"])
    assert (composed.recipe.seq_len, composed.recipe.stop_after) == (128, 5)
    assert composed.recipe.ds == {"zero_optimization": {"x": 1}}
    assert composed.origins["seq_len"] == "override"
    assert composed.origins["stop_after"] == "override"
    assert composed.origins["micro_batch"] == "recipes/tiny.yaml"
    assert composed.origins["model.hidden_size"] == "recipes/model/llama-tiny.yaml"
    assert "seed" not in composed.origins  # a default


def test_an_option_of_an_option_is_named_as_origin():
    origins = compose("tiny", ["optim=wsd"]).origins
    assert origins["optim.schedule"] == "recipes/optim/wsd.yaml"
    assert origins["optim.beta2"] == "recipes/optim/adamw-cosine.yaml"
    assert origins["optim.lr"] == "recipes/tiny.yaml"


def test_the_run_is_named_after_the_recipe_unless_told():
    assert compose("tiny").recipe.run == "tiny"
    assert compose("tiny", ["run=007"]).recipe.run == "007"
    assert compose("tiny", ["run=1e3"]).recipe.run == "1e3"
    assert compose("tiny", ["run=true"]).recipe.run == "true"


@pytest.mark.parametrize(
    "name", ["a/b", "../x", ".hidden", "'-rf'", "''", "'a b'", "'a;b'", "'*'", "'a\\nb'", "x" * 101]
)
def test_a_run_name_that_is_no_safe_folder_name_is_refused(name):
    line = only(f"run={name}")
    assert line.startswith("run=")
    assert "is not a folder name" in line


def test_a_misspelt_knob_is_refused_with_the_nearest_one():
    assert only("micro_bach=1") == (
        "micro_bach (override): no such knob; did you mean micro_batch?"
    )
    assert "did you mean optim.lr?" in only("lr=1e-3")
    assert "did you mean optim.beta1?" in only("optim.btea1=0.9")
    assert "did you mean data.sources.prose.weight?" in only("data.sources.prose.wieght=1")
    assert "knobs here: vocab_size, hidden_size" in only("model.q=1")


def test_hydra_settings_are_refused_by_name():
    for text in (
        "hydra.run.dir=x",
        "hydra.rnu.dir=x",
        "hydra/launcher=basic",
        "+hydra.verbose=true",
    ):
        assert "hydra settings are not used" in only(text)


def test_an_unknown_recipe_lists_the_recipes():
    line = only(recipe_name="tinny")
    assert "did you mean tiny?" in line
    assert "125m, 1b, 70b, 7b, tiny" in line
    assert "no file" in only(recipe_name="nowhere/x.yaml")
    assert "no such recipe" in only(recipe_name="..")


def test_an_unknown_config_group_option_lists_the_options():
    line = only("optim=wdd")
    assert "optim=wdd: no such config group option; did you mean wsd?" in line
    assert "adamw-cosine" in line


@pytest.mark.parametrize(
    "text", ["micro_batch", "=1", "optim.=1", "a b", "seq_len=[1", "optim.lr=3 4 }"]
)
def test_a_malformed_override_is_one_line(text):
    assert "is malformed" in only(text)


def test_sweeps_packages_and_removed_groups_are_refused():
    assert "several values" in only("zero=1,2")
    assert "without @ and /" in only("model@data=llama-1b")
    assert "not removed" in only("~optim")


def test_all_problems_are_reported_at_once():
    problems = refused(
        "cluster=h1000", "micro_bach=1", "optim.lr=fast", "seq_len=???", "zero=7", "hydra.x=1"
    )
    text = "\n".join(problems)
    for part in ("h1000", "micro_bach", "optim.lr='fast'", "seq_len", "zero=7", "hydra.x"):
        assert part in text


def test_unset_knobs_are_listed_together_with_their_meaning():
    line = only("seq_len=???", "model.vocab_size=???", "data.sources.prose.corpus=???")
    assert line.startswith("no value for ")
    assert "seq_len (tokens the model sees at once)" in line
    assert "model.vocab_size (rows" in line
    assert "data.sources.prose.corpus (" in line


@pytest.mark.parametrize("key", ["ds.gradient_clipping", "ds.bf16.enabled", "data.sources.web"])
def test_a_key_without_a_list_of_its_own_is_not_forgotten_at_question_marks(key):
    assert only(f"{key}=???").startswith(f"no value for {key} (")


def test_wrong_deepspeed_keys_are_told_together_with_wrong_knobs():
    with pytest.raises(UserError) as caught:
        compose("tiny", ["optim.lr=fast", "ds.gradient_cliping=1"], lambda ds: [f"seen {ds}"])
    assert caught.value.problems[1:] == ["seen {'gradient_cliping': 1}"]


def test_interpolation_is_resolved_and_a_broken_one_named_once(monkeypatch):
    assert compose("tiny", ["data.window_tokens=${seq_len}"]).recipe.data.window_tokens == 256
    assert "seqlen" in only("data.window_tokens=${seqlen}")
    monkeypatch.setenv("STEPS_GIVEN", "7")
    assert compose("tiny", ["steps=${oc.env:STEPS_GIVEN}"]).recipe.steps == 7
    monkeypatch.delenv("STEPS_GIVEN")
    line = only("steps=${oc.env:STEPS_GIVEN}")
    assert line.startswith("steps: ${oc.env:STEPS_GIVEN} has no value (")
    assert "an environment variable that is set" in line


def test_a_name_of_code_is_refused_anywhere():
    assert any("names no code" in line for line in refused("ds.x._target_=os.system"))
    assert any("names no code" in line for line in refused("model._target_=os.system"))


@pytest.mark.parametrize(
    ("text", "value"), [("5e2", 500), ("'5e2'", 500), ("500.0", 500), ("'500'", 500), ("5_00", 500)]
)
def test_whole_numbers_in_any_notation_are_exact_ints(text, value):
    steps = compose("tiny", [f"steps={text}"]).recipe.steps
    assert steps == value
    assert type(steps) is int


@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "true", "many", "'1e999999999'", "1e300"])
def test_what_is_no_whole_number_is_refused_for_an_int(text):
    assert only(f"steps={text}").startswith("steps=")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "true", "fast", "[1]", "1e999"])
def test_what_is_no_finite_number_is_refused_for_a_float(text):
    assert only(f"optim.lr={text}").startswith("optim.lr=")


def test_numbers_as_text_become_numbers():
    recipe = compose("tiny", ["optim.lr='3e-4'", "optim.clip=1", "warmup='0.1'", "zero='2'"]).recipe
    assert (recipe.optim.lr, recipe.optim.clip, recipe.warmup, recipe.zero) == (3e-4, 1.0, 0.1, 2)
    assert type(recipe.optim.clip) is float


def test_number_reading_is_exact():
    assert as_int(5e8) == 500_000_000
    assert as_int("123456789012345678901") == 123456789012345678901
    assert as_float("1e-3") == 1e-3
    for wrong in (True, None, 1.5, "1.5", float("nan"), "inf", [1]):
        with pytest.raises(ValueError, match="is not"):
            as_int(wrong)
    with pytest.raises(ValueError, match="write all digits"):
        as_int(1e17)
    for wrong in (True, None, "x", float("inf"), "nan"):
        with pytest.raises(ValueError, match="is not"):
            as_float(wrong)


def test_values_outside_their_range_name_bound_and_unit():
    assert "must be at least 1 sequences" in only("micro_batch=0")
    assert "must be at least 1e-12" in only("optim.lr=0")
    assert "must be above 0" in only("cluster.mtbf_hours=0")
    assert "must be below 1" in only("optim.beta2=1")
    assert "must be at most 1" in only("optim.final_lr_ratio=1.1")
    assert "must be at least 0" in only("optim.clip=-1")
    assert "is not one of within, across" in only("data.attend=inside")
    assert "neither true nor false" in only("compile=yes")
    assert "is not a group" in only("log=3")


def test_every_number_has_a_lowest_and_a_highest_value():
    for name, field in knob_names().items():
        bounds, kind = field.metadata, str(field.type)
        if kind.split(" ")[0] in ("int", "float"):
            assert bounds["low"] is not None or bounds["above"] is not None, name
            assert bounds["high"] is not None or bounds["below"] is not None, name


# 1e300 is infinite in fp32, and 1e-60 is 0: a run with them would stand still, or diverge.
@pytest.mark.parametrize("knob", ["optim.lr", "optim.eps", "model.rms_norm_eps", "health.sigmas"])
@pytest.mark.parametrize("value", ["1e300", "1e-400"])
def test_what_no_fp32_holds_is_refused(knob, value):
    assert only(f"{knob}={value}").startswith(f"{knob}=")


def test_a_step_takes_away_less_than_a_whole_weight():
    line = only("optim.lr=0.1", "optim.weight_decay=10")
    assert "optim.lr=0.1 x optim.weight_decay=10 is 1:" in line
    assert compose("tiny", ["optim.lr=0.1", "optim.weight_decay=9"]).recipe.optim.lr == 0.1


@pytest.mark.parametrize("batch", ["1e12", "[[0,2048],[9,1e12]]"])
def test_a_step_has_a_number_of_sequences_that_fits_into_memory(batch):
    assert "at most 4194304, so at most 1073741824 tokens" in only(f"batch_tokens={batch}")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("seed=null", "seed=null"),
        ("steps=true", "steps=true"),
        ("run=[a,null]", "run=[a, null]"),
        ("log.every={a: 1.5}", "log.every={a: 1.5}"),
        ("compile='true'", "compile='true' (override) is text; write true or false without quotes"),
    ],
)
def test_a_value_is_shown_as_recipes_write_it(override, shown):
    assert only(override).startswith(shown)


def test_a_key_is_removed_only_where_it_has_the_value_that_is_named():
    assert compose("tiny", ["~optim.eps=1e-8"]).recipe.optim.eps == 1e-8
    assert "~optim.eps=1: it is 1e-08, so it stays" in only("~optim.eps=1")


def test_a_piece_of_a_ramp_that_is_never_reached_is_said():
    ramp = "batch_tokens=[[0,2048],[%d,4096]]"
    assert compose("tiny", [ramp % 199]).warnings == []
    assert compose("tiny", [ramp % 200]).warnings == [
        "batch_tokens has a piece from step 200 on; the run ends before, steps=200"
    ]


def test_null_for_a_text_is_not_asked_to_be_quoted():
    assert "recompute=null (override) is not legal here" in only("recompute=null")


def test_a_long_value_is_cut_in_the_message():
    assert len(only("steps=" + "x" * 9000)) < 400


def test_fp16_is_refused_with_the_reason():
    line = only("precision=fp16")
    assert "loss scale" in line
    assert "precision=bf16" in line


@pytest.mark.parametrize("text", ["0", "'0'", "0.0"])
def test_stage_0_is_refused_with_the_reason(text):
    line = only(f"zero={text}")
    for part in ("clips by a wrong norm", "decays", "no gradient norm", "zero=1"):
        assert part in line
    assert "legal: 1, 2, 3" in only("zero=4")
    assert "neither a stage" in only("zero=true")


def test_the_length_is_given_once():
    assert "steps=200 and tokens=5 both" in only("steps=200", "tokens=5")
    assert "the run has no length" in only("steps=null")
    assert compose("tiny", ["steps=null", "tokens=chinchilla"]).recipe.tokens == "chinchilla"
    assert compose("tiny", ["steps=null", "tokens=1e6"]).recipe.tokens == 1_000_000
    assert "give a number of tokens, or chinchilla" in only("steps=null", "tokens=lots")


def test_a_warm_up_longer_than_the_run_is_refused_and_a_fraction_never_is():
    assert "nearest" not in only("steps=5", "warmup=6")
    assert "give at most 5" in only("steps=5", "warmup=6")
    for warmup, read in (("5", 5), ("1", 1), ("1.0", 1), ("0", 0), ("0.0", 0), ("0.99", 0.99)):
        value = compose("tiny", ["steps=5", "stop_after=1", f"warmup={warmup}"]).recipe.warmup
        assert value == read
        assert type(value) is type(read)
    assert "neither a fraction" in only("warmup=1.5")
    assert "must not be negative" in only("warmup=-1")


def test_wsd_decay_and_warm_up_fit_into_the_run():
    assert "optim.decay at most 0.1" in only("optim=wsd", "warmup=0.9")
    assert "together" in only("optim=wsd", "steps=10", "warmup=9")
    assert compose("tiny", ["optim=wsd", "warmup=0.8"]).recipe.optim.schedule == "wsd"


def test_a_batch_ramp_is_read_into_pairs_and_its_form_checked():
    ramp = compose("tiny", ["batch_tokens=[[0, 4096], [1e2, 8192]]"]).recipe.batch_tokens
    assert ramp == ((0, 4096), (100, 8192))
    for wrong in ("[[1,4096]]", "[[0,4096],[0,8192]]", "[]", "[0,4096]", "[[0,0]]", "[[0,1.5]]"):
        assert only(f"batch_tokens={wrong}").startswith("batch_tokens=")


def test_a_warm_up_of_the_sequence_length_cuts_evenly_and_ends_at_seq_len():
    assert compose("tiny", ["seq_len_warmup=[[0,64],[5,256]]"]).recipe.seq_len_warmup == (
        (0, 64),
        (5, 256),
    )
    for wrong, part in (
        ("64", "[data step, tokens] pairs"),
        ("[[1,64],[5,256]]", "must start at step 0"),
        ("[[0,0],[5,256]]", "must be from 1"),
        ("[[0,96],[5,256]]", "the length 96, which does not divide seq_len=256"),
        ("[[0,512],[5,256]]", "legal: 4, 8, 16, 32, 64, 128"),
        ("[[0,128],[5,64],[9,256]]", "those of a warm-up increase"),
        ("[[0,64],[5,128]]", "ends at 128 tokens, and seq_len=256 would never be reached"),
    ):
        line = only(f"seq_len_warmup={wrong}")
        assert line.startswith("seq_len_warmup")
        assert part in line
    late = compose("tiny", ["steps=5", "seq_len_warmup=[[0,64],[5,256]]", "warmup=0"])
    assert "the run ends after steps=5" in late.warnings[0]


def test_head_shapes_are_checked():
    assert "nearest: 255 or 258" in "".join(refused("model.num_attention_heads=3"))
    assert "does not divide" in only("model.num_key_value_heads=3")
    assert "must be even" in only("model.head_dim=31")
    assert "is not read with model.rope_type=default" in only("model.rope_factor=8")
    assert "set model.rope_type=llama3" in only(
        "model.rope_type=linear", "model.rope_factor=8", "model.rope_high_freq_factor=2"
    )
    assert "is not below" in only("model.rope_type=llama3", "model.rope_low_freq_factor=4")
    assert compose("tiny", ["model.head_dim=32"]).recipe.model.head_dim == 32


def test_windows_and_sources_are_checked():
    assert "nearest: 256 or 512" in only("data.window_tokens=300")
    assert "data.sources is empty" in only("~data.sources.prose")
    assert "no such key to remove" in only("~data.sources.web")
    assert "every weight is 0" in only("data.sources.prose.weight=0")
    assert "is not a name" in only("data.sources={a b: {corpus: x}}")


@pytest.mark.parametrize("folder", ["0", "''", ".", "corpora", "recipes/x", "corpora/../x"])
def test_a_corpus_is_built_under_corpora_or_outside_of_the_repository(folder, tmp_path):
    source = "data.sources={a: {corpus: %s, build: sotu}}"
    with pytest.raises(UserError, match=r"data.sources.a.corpus="):
        compose("tiny", [source % folder])
    for legal in ("corpora/a", f"'{tmp_path}/a'"):
        compose("tiny", [source % legal])


@pytest.mark.parametrize("knob", ["data.tokenizer", "init_from", "log.wandb"])
def test_an_empty_text_is_not_taken_for_none(knob):
    with pytest.raises(UserError, match=f"{knob}='' .*is empty; null means none"):
        compose("tiny", [f"{knob}=''"])


def test_switching_a_config_group_option_leaves_nothing_of_the_former_one():
    assert set(compose("tiny", ["data=synthetic"]).recipe.data.sources) == {"synthetic"}
    qwen = compose("tiny", ["model=qwen3-0.6b"])
    assert qwen.recipe.model.qk_norm
    assert not any("llama-tiny" in origin for origin in qwen.origins.values())


def test_a_dict_replaces_the_whole_group():
    composed = compose("tiny", ["optim={name: sgd, lr: 1}"])
    assert composed.recipe.optim == dataclasses.replace(
        composed.recipe.optim, name="sgd", lr=1.0, schedule="cosine", final_lr_ratio=0.1
    )
    assert "optim.eps" not in composed.origins
    assert composed.origins["optim.lr"] == "override"


def test_a_knob_given_twice_takes_the_later_value_and_says_so():
    composed = compose("tiny", ["zero=2", "zero=3"])
    assert composed.recipe.zero == 3
    assert composed.warnings == ["zero is given twice; zero=3 replaces the earlier one"]
    assert "no effect" in compose("tiny", ["steps=5", "stop_after=9"]).warnings[0]


@pytest.mark.parametrize("recipe_name", ["tiny", "70b"])
def test_a_written_recipe_composes_back_to_the_same(recipe_name, tmp_path):
    overrides = ["ds.zero_optimization.overlap_comm=true", "run='1e5'", "optim.lr=1e-5"]
    overrides += ["batch_tokens=[[0,8388608],[10,16777216]]", "data.attend=across"]
    overrides += ["seq_len_warmup=[[0,64],[9,${seq_len}]]"]
    recipe = compose(recipe_name, overrides).recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    again = compose(str(path))
    assert again.recipe == recipe
    assert "defaults" not in path.read_text()
    assert compose(str(path), ["optim.name=sgd"]).recipe.optim.name == "sgd"
    assert "its defaults list has no optim" in only("optim=sgd", recipe_name=str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [{model: llama-9b}, _self_]\nseq_len: 1\n", "llama-9b"),
        ("seq_len: 1\nseq_len: 2\n", "duplicate key"),
        ("seq_len: [1\n", "line 2"),
        ("hydra: {run: {dir: x}}\n", "hydra settings are not used"),
        ("run: 7\n", "is not text; put it in quotes"),
        ("5\n", "Invalid loaded object type"),
        ("~: 2\n", "line 1: YAML reads the key ~ as a value of type null"),
        ("seed: ${\n", "no viable alternative at input '${'"),
        ("seed: 010\n", "line 1: YAML reads 010 as 8"),
        ("a: 1\nsteps: 12:30\n", "line 2: YAML reads 12:30 as 750"),
        ("optim.lr: 1\n", "in a file groups are nested; write optim: {lr: ...}"),
        ("defaults: [mine]\n", "its defaults list leads back to itself"),
    ],
)
def test_a_broken_recipe_file_is_refused_without_a_traceback(text, words, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        compose(str(path))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + ".yaml", "\0.yaml", "a\nb.yaml", "LOOP"])
def test_a_name_that_no_file_can_have_is_refused_in_one_line(name, tmp_path):
    if name == "LOOP":
        (tmp_path / "loop.yaml").symlink_to("loop.yaml")
        name = str(tmp_path / "loop.yaml")
    line = only(recipe_name=name)
    assert line.startswith("recipe ")
    assert len(line) < 1000


def test_a_recipe_given_by_half_a_path_is_recognised():
    for half in ("tiny.yaml", "recipes/tiny", "TINY"):
        assert "; did you mean tiny?" in only(recipe_name=half)


def test_a_command_line_names_one_recipe():
    assert compose_command(["recipe=tiny", "zero=3"]).recipe.zero == 3
    for wrong in ([], ["recipe=tiny", "recipe=1b"]):
        with pytest.raises(UserError, match="give one recipe=NAME"):
            compose_command(wrong)


def test_a_recipe_edited_meanwhile_is_read_again(tmp_path):
    path = tmp_path / "mine.yaml"
    written = recipe_yaml(compose("tiny").recipe)
    for seed in (1, 2):
        path.write_text(written.replace("seed: 1234", f"seed: {seed}"))
        os.utime(path, ns=(seed, seed))
        assert compose(str(path)).recipe.seed == seed
    compose(str(path), ["ds.x=1", "micro_batch=9"])
    assert compose(str(path)).recipe.ds == {}


def test_composing_creates_no_file_and_changes_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose("tiny", ["run=elsewhere"])
    refused("micro_bach=1")
    assert not list(tmp_path.iterdir())


def test_suggestions_look_at_the_last_part_of_a_name():
    names = list(knob_names())
    assert did_you_mean("optm.lr", names) == "; did you mean optim.lr?"
    assert did_you_mean("SEQ_LEN", names) == "; did you mean seq_len?"
    assert did_you_mean("dropout", names) == "."
    assert did_you_mean("xyzzy", names) == "."


@pytest.mark.parametrize(
    "override",
    [
        "steps=99999999999999999999999",
        "seed=" + "9" * 5000,
        "eval_tokens=99999999999999999",
        "batch_tokens=99999999999999999999",
        "model.num_attention_heads=99999999999999999999999",
        "cluster.threads=99999999999",
        "cluster.timeout_s=99999999999999",
        "data.tokenizer=" + "x" * 300,
        "data.sources.prose.corpus=a/" + "y" * 300,
    ],
)
def test_an_absurd_value_is_refused_at_once_in_one_line(override):
    with pytest.raises(UserError) as refused:
        compose("tiny", [override])
    assert len(refused.value.problems) == 1
    assert override.split("=")[0] in refused.value.problems[0]
