"""`make profile`: what it refuses, the run that it starts, and its report of hand-made records."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re

import pytest
import torch
from run_records import write_run

from base.errors import UserError
from checkpoint import lineage
from commands import profile
from launch.hosts.place import add_place
from recipes.compose import compose, recipe_yaml
from record import history
from record.resuming import left_behind
from runtime.monitor.profiling import NoProfiler, profiler_of


def test_a_profile_is_refused_with_every_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile, "RUNS", tmp_path)
    assert profile.main(["--run", "none", "--steps", "9", "--nproc", "x", "--"]) == 93
    said = capsys.readouterr().err
    assert "RUN=none: there is no run" in said
    assert "STEPS='9' is not a range of steps" in said
    assert "NPROC='x'" in said


def test_a_profile_leaves_out_what_the_runs_rewinds_do_and_another_run_is_told_of_it(
    tmp_path, monkeypatch
):
    """They stand in the run's history, not in its recipe."""
    monkeypatch.setattr(profile, "RUNS", tmp_path)
    source = tmp_path / "a"
    source.mkdir()
    words = ["run=a", "data.skip.advance=[[3,5]]"]
    recipe = compose("tiny", words).recipe
    (source / "recipe.yaml").write_text(recipe_yaml(recipe))
    history.begin(source, None)
    facts = {"why": "a spike", "who": "policy", "since": "2026-11-30T00:00:00Z"}
    skip = {"effect": "advance", "range": [10, 23], "from_step": 11, **facts}
    target = history.Target(0, 10, 10)
    history.append(source, history.next_segment(lineage.read(source), target, [skip], facts))

    parser = argparse.ArgumentParser()
    add_place(parser)
    given = argparse.Namespace(run="a", steps="10:15", arguments=[])
    options = parser.parse_args(["--nproc=1"], given)
    command, _ = profile.prepare(options)
    (word,) = [word for word in command if word.startswith("data.skip")]
    assert word == "data.skip.advance=[[3,5],[10,23]]"
    copied = compose(str(source / "recipe.yaml"), [word, "run=b"])
    assert copied.recipe.data.skip.advance == ((3, 5), (10, 23))
    assert left_behind(copied.recipe, copied.file, tmp_path / "b") == []
    assert left_behind(recipe, copied.file, source) == []
    (told,) = left_behind(recipe, copied.file, tmp_path / "b")
    assert "a leaves out data steps 10 to 22 from step 11 on: a spike (policy" in told
    assert word in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["log.profile=5:5"], "log.profile='5:5' holds no step"),
        (["log.profile=0:2"], "holds no step; steps count from 1"),
        (["log.profile=a:b"], "is not a range of steps"),
        (["log.profile=10:15", "stop_after=12"], "goes past the last step, 12; end it at 13"),
        (["log.profile=210:215"], "begins after the last step, 200"),
    ],
)
def test_steps_to_profile_that_do_not_exist_are_refused(words, said):
    with pytest.raises(UserError, match=re.escape(said)):
        compose("tiny", words)


def test_operators_are_sorted_into_kinds():
    assert profile.kind_of("aten::addmm") == "matrix products"
    assert profile.kind_of("nccl:all_reduce") == "communication"
    assert profile.kind_of("aten::_scaled_dot_product_flash_attention") == "attention"
    assert profile.kind_of("aten::_fused_adamw_") == "optimizer"
    assert profile.kind_of("aten::copy_") == "copies and fills"
    assert profile.kind_of("phase compute") == "waiting, and Python between operators"
    assert profile.kind_of("aten::mul") == profile.REST


def test_the_profiler_records_only_the_steps_asked_for_and_the_report_adds_up(tmp_path):
    """In this process, on a few matrix products; the loop calls it in the same order."""
    place = write_run(tmp_path, "p", [9.0, 1.0, 2.0, 3.0])
    profiler = profiler_of("2:4", place, 0, lambda name: contextlib.nullcontext())
    weight = torch.ones(64, 64)
    for step in range(1, 5):
        profiler.begin(step)
        with profiler.phase("compute"):
            weight = weight @ weight / 64
        profiler.end(step)
    seen = profile.read_profile(place)
    assert seen["count"] == 2
    names = {each["name"]: each["calls"] for each in seen["operators"]}
    assert names["aten::mm"] == 2
    assert names["phase compute"] == 2
    assert {"step 2", "step 3"} <= set(names)
    assert not {"step 1", "step 4"} & set(names)
    trace = json.loads(gzip.decompress((place / "profile" / "rank-0.trace.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    phases = {row[0]: row[1:] for row in profile.phase_rows(seen)}
    assert phases["whole step"] == ["1500.00", "100.0%"]  # steps 2 and 3: 1 s and 2 s
    shares = [float(row[-1].rstrip("%")) for row in profile.kind_rows(seen)[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "| aten::mm | 1 |" in "\n".join(profile.report(seen, "p"))
    assert "matrix products" in "\n".join(profile.terminal(seen))
    assert isinstance(profiler_of(None, place, 0, contextlib.nullcontext), NoProfiler)
