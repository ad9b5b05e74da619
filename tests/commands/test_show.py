"""`make show` and `make recipes`: what they print, and that they start and leave nothing."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys

import pytest
from ranks import run_command

from base.errors import UserError
from base.exits import DO_NOT_RETRY
from base.paths import ROOT
from base.table import scaled, table
from commands import plan, show
from commands import recipes as recipes_list
from recipes.compose import recipe_names


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    """DeepSpeed's own check has its tests; here it would only cost its import."""
    monkeypatch.setattr(show, "confirm", lambda config: None)


@pytest.mark.parametrize("recipe_name", recipe_names())
def test_every_recipe_is_shown_on_the_fewest_ranks_it_runs_on(recipe_name):
    shown = show.collect(recipe_name, [])
    text = show.text(shown)
    assert json.loads(json.dumps(shown)) == shown | {
        "recipe": json.loads(json.dumps(shown["recipe"]))
    }
    for part in (
        "recipes/" + recipe_name + ".yaml",
        "layout",
        "train_batch_size",
        "bytes per parameter",
    ):
        assert part in text
    assert f"{shown['run']['parameters']:,} parameters" in text


def test_the_json_printed_is_the_json_the_engine_gets():
    shown = show.collect("7b", ["zero=2", "ds.zero_optimization.overlap_comm=true"], 64)
    assert json.dumps(shown["ds_config"], indent=2) in show.text(shown, is_whole=True)
    assert shown["ds_origins"].keys() == dict(show._leaves(shown["ds_config"])).keys()
    key = "zero_optimization.overlap_comm"
    assert shown["ds_origins"][key] == f"ds.{key} (override)"
    assert shown["layout"]["data"] == 64


def test_layout_memory_time_and_cost_of_the_planner_come_first():
    words = ["zero=2", "cluster.price_per_hour=2.5"]
    shown = show.collect("7b", words, 64)
    text = show.text(shown)
    parts = ["layout", "memory of a rank", "training state", "time and cost", "tokens/s", "days",
             "GPU-hours", "cost ", "run\n", "knobs that differ", "DeepSpeed JSON"]  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    planned = json.loads(said_by_plan(["--json", "--world=64", "7b", *words]))["winner"]
    assert shown["plan"]["step_s"] > planned["step_s"] > 0  # the recipe recomputes, the plan chose
    (option,) = json.loads(
        said_by_plan(["--json", "--world=64", "7b", *words, "parallel.tensor=1", "micro_batch=1",
                      "recompute=full"])
    )["options"]  # fmt: skip
    for name in ("step_s", "memory_bytes", "tokens_per_s"):
        assert shown["plan"][name] == option[name]
    assert "not known" in show.text(show.collect("7b", [], 64))
    assert "not predicted: cluster.gpu is not set" in show.text(show.collect("tiny", []))


def said_by_plan(arguments: list[str]) -> str:
    """What `make plan` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert plan.main(arguments) == 0
    return printed.getvalue()


def test_only_knobs_that_differ_from_their_defaults_are_shown_without_all(capsys):
    def knobs(*options: str) -> dict[str, str]:
        assert show.main([*options, "--", "7b", "micro_batch=2", "optim.beta1=0.9"]) == 0
        text = capsys.readouterr().out.split("knobs", 1)[1].split("DeepSpeed JSON")[0]
        return {line.split()[0]: line.split()[1] for line in text.splitlines()[1:] if line}

    few, every = knobs(), knobs("--all")
    assert few["micro_batch"] == "2"
    # Given, but as the default is.
    assert "optim.beta1" not in few
    assert "health.window" not in few
    assert every["optim.beta1"] == "0.9"
    assert few.items() < every.items()


def test_state_bytes_are_those_of_the_layout():
    shown = show.collect("7b", ["zero=2", "checkpoint.mode=sync"], 64)
    parts = shown["state"]["bytes_per_parameter"]
    assert sum(parts.values()) == pytest.approx(2 + 16 / 64)
    assert shown["state"]["copy_gib"] == 0
    host = show.collect("7b", ["zero=zero3_offload", "checkpoint.mode=async"], 64)["state"]
    assert host["on_host"] == ["gradients", "master", "moments"]
    assert host["copy_gib"] == pytest.approx(host["gib"]["master"] + host["gib"]["moments"])
    assert host["copy_gib"] == pytest.approx(12 / 64 * host["parameters_of_rank"] / 2**30)
    cut = show.collect("70b", [], 1024)["state"]
    # The fullest of 8 stages has 11 of the 80 blocks; their matrices are cut over 8 tensor ranks.
    norms, matrices = 2 * 8192, 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert cut["parameters_of_rank"] == 11 * (matrices / 8 + norms)
    large = show.collect("tiny", ["model.vocab_size=131072", "parallel.pipeline=4"], 4)
    first, *middle, last = large["state"]["parameters_per_stage"]
    assert first > 131072 * 256
    assert last == large["state"]["parameters_of_rank"] > 10 * max(middle)
    assert "the fullest pipeline stage; GiB of each: " in show.text(large)


def test_the_largest_recipe_cuts_along_three_axes():
    shown = show.collect("70b", [], 1024)
    assert (shown["layout"]["tensor"], shown["layout"]["pipeline"]) == (8, 8)
    assert shown["layout"]["data"] == 16


def test_a_run_far_from_compute_optimal_is_warned_about():
    far = show.collect("1b", ["tokens=1e9"], 8)
    assert any("per parameter" in line for line in far["warnings"])
    assert not show.collect("1b", [], 8)["warnings"]


def test_an_absent_corpus_is_said_and_an_existing_one_counted(short_documents, monkeypatch):
    mine = ["data.sources.mine.corpus=corpora/nowhere"]
    assert "absent: make it" in show.text(show.collect("125m", mine))
    words = ["data=mine", f"data.sources.mine.corpus={short_documents}", "seq_len=16"]
    shown = show.collect("tiny", [*words, "batch_tokens=256"])
    assert shown["data"][0]["epochs"] > 1
    assert "epochs" in show.text(shown)


def test_problems_of_recipe_layout_and_json_are_refused_without_traceback(capsys):
    with pytest.raises(UserError) as caught:
        show.collect("tiny", ["batch_tokens=1000", "zero=zer3"])
    assert len(caught.value.problems) >= 1
    assert show.main(["tiny", "micro_bach=1", "zero=0"]) == DO_NOT_RETRY
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1].partition("=")[0] for line in lines] == ["micro_bach", "zero"]
    assert "did you mean micro_batch?" in lines[0]


def test_the_json_form_is_one_json_object(capsys):
    assert show.main(["--world", "4", "--json", "--", "tiny", "zero=3"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ds_config"]["zero_optimization"]["stage"] == 3
    assert shown["optimizer_class"] == "DeepSpeedZeroOptimizer_Stage3"


def test_the_recipes_are_listed_from_small_to_large(capsys):
    assert recipes_list.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["tiny", "125m", "1b", "7b", "70b"]
    assert all("make pretrain RECIPE=" in line for line in lines[1:])


def test_tables_align_and_counts_are_short():
    assert table([["a", "bb"], ["ccc", "d"]], indent="") == "a    bb\nccc  d"
    assert table([]) == ""
    assert [scaled(n) for n in (7, 4096, 5.05e6, 1.24e9, 2.16e12)] == [
        "7",
        "4.1 k",
        "5.05 M",
        "1.24 B",
        "2.16 T",
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_typo_through_make_is_one_line_and_leaves_no_run():
    before = {path.name for path in (ROOT / "runs").glob("*")}
    for words in (["OVERRIDES=micro_bach=1"], ["OVERRIDES=hydra.rnu.dir=x"], ["RECIPE=tinny"]):
        command = ["make", "--no-print-directory", "pretrain", f"PYTHON={sys.executable}", *words]
        done = run_command(command, timeout_s=60)
        assert done.returncode != 0
        lines = [line for line in done.stdout.splitlines() if not line.startswith("make: ***")]
        assert len(lines) == 1, done.stdout
        assert "did you mean" in lines[0] or "hydra settings" in lines[0]
    assert {path.name for path in (ROOT / "runs").glob("*")} == before


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_overrides_reach_the_recipe_as_they_were_typed():
    """Neither make nor the shell expands $, braces or *; blanks in quotes do not split."""
    typed = "'data.sources={a: {corpus: \"$HOME/*.{x,y} z\"}}' zero=2 'seed=${steps}'"
    command = ["make", "--no-print-directory", "show", f"PYTHON={sys.executable}"]
    done = run_command([*command, "ALL=1", f"OVERRIDES={typed}"], timeout_s=60)
    shown = dict(re.findall(r"^  (\S+) +(.*?)  +\S+$", done.stdout, re.M))
    assert shown["data.sources.a.corpus"] == "$HOME/*.{x,y} z"
    assert (shown["zero"], shown["seed"]) == ("2", shown["steps"])
    done = run_command([*command, "OVERRIDES=run='x"], timeout_s=60)
    assert 'OVERRIDES="run=\'x": no closing quotation; close it' in done.stdout


def test_sources_are_shown_with_share_stages_and_epochs_and_repeats_warn(tmp_path, monkeypatch):
    from small_corpora import random_documents, write_corpus

    for seed, name in enumerate(("prose", "code")):
        write_corpus(tmp_path / name, random_documents(50, 50, 90, seed=seed), vocab_size=1000)
    monkeypatch.setattr(show, "ROOT", tmp_path)
    words = ["data=prose-code", "~data.sources.prose.build", "~data.sources.code.build"]
    words += ["data.sources.prose.corpus=prose", "data.sources.code.corpus=code"]
    words += ["seq_len=64", "batch_tokens=512", "steps=100", "warmup=0"]
    words += ["data.sources.code.weight=[[0,1],[50,9]]"]
    whole = show.collect("tiny", words)["run"]
    words += ["seq_len_warmup=[[0,16],[20,64]]"]
    shown = show.collect("tiny", words)
    assert shown["run"]["warmed_up"] == {"16": 20 * 512, "64": 80 * 512}
    assert shown["run"]["tokens"] == whole["tokens"]
    assert 0.9 * whole["flops"] < shown["run"]["flops"] < whole["flops"]
    assert "10.2 k in sequences of 16, 41 k in sequences of 64" in show.text(shown)
    code, prose = shown["data"]
    assert code["stages"] == [[0, 0.25], [50, 0.75]]
    assert code["share"] == pytest.approx(0.5)
    assert prose["epochs"] == pytest.approx(400 / 55, rel=0.2)
    text = show.text(shown)
    assert "(0.25 from data step 0, 0.75 from data step 50)" in text
    assert "warning: data.sources.code:" in text
    assert "more than 4 give little" in text
    text = show.text(show.collect("tiny", [*words, "data.sources.prose.max_epochs=2"]))
    assert "warning: refused at start: data.sources.prose.max_epochs=2.0: the run would" in text


def test_what_a_kill_would_lose_and_the_memory_of_saves_are_shown():
    shown = show.collect("7b", [], 64)
    assert "a kill loses at most about 10 min 00 s of work" in show.text(shown)
    state = shown["state"]  # cluster.device=cuda: saves are written in a thread
    assert state["copy_gib"] == pytest.approx(state["gib"]["master"] + state["gib"]["moments"])
    shown = show.collect("7b", ["checkpoint.interval=0"], 64)
    assert "a kill loses at most all work since the start" in show.text(shown)
