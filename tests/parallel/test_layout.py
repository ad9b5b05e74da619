"""parallel/layout.py: places of ranks, and refusals with their arithmetic."""

from __future__ import annotations

import dataclasses
import re

import pytest

from base.errors import UserError
from commands import layouts
from parallel.layout import describe_places, places, share, solve
from parallel.legal import REFUSED, candidates, problems, refused_pairs
from recipes.compose import compose
from recipes.schema import Cluster, Data, Model, Optim, Parallel, Recipe, Source


def recipe(parallel: Parallel | None = None, kv_heads: int = 4, layers: int = 4, **knobs) -> Recipe:
    model = Model(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )
    defaults = dict(seq_len=32, batch_tokens=8 * 32, micro_batch=1, steps=10)
    return Recipe(
        model=model,
        data=Data(sources={"a": Source(corpus="corpora/a")}),
        optim=Optim(lr=1e-3),
        parallel=parallel or Parallel(),
        **(defaults | knobs),
    )


def test_accumulation_is_what_is_left_of_the_batch():
    layout = solve(recipe(micro_batch=2), world=2, stage=1)
    assert (layout.data, layout.accumulation) == (2, ((0, 2),))
    assert layout.accumulates
    assert not solve(recipe(micro_batch=4), world=2, stage=1).accumulates


def test_a_ramp_has_one_accumulation_per_piece():
    layout = solve(recipe(batch_tokens=[[0, 64], [5, 256]]), world=2, stage=2)
    assert layout.accumulation == ((0, 1), (5, 4))


def test_every_rank_has_one_place_and_tensor_ranks_are_neighbours():
    layout = solve(recipe(Parallel(tensor=2, pipeline=2)), world=8, stage=1)
    places = [layout.coordinates(rank) for rank in range(8)]
    assert len(set(places)) == 8
    assert [layout.rank(place) for place in places] == list(range(8))
    assert [place.tensor for place in places] == [0, 1] * 4
    assert [place.pipeline for place in places] == [0] * 4 + [1] * 4
    assert layout.data == 2


@pytest.mark.parametrize(
    ("knobs", "world", "stage", "parts"),
    [
        ({"batch_tokens": 160}, 2, 1, ["batch_tokens=160", "= 64", "128 or 192"]),
        ({"micro_batch": 3}, 1, 1, ["= 96", "192 or 288", "micro_batch 1, 2, 4, 8"]),
        ({"batch_tokens": 31}, 1, 1, ["nearest: 32"]),
        ({"batch_tokens": [[0, 64], [4, 100]]}, 2, 1, ["batch_tokens=100 (from step 4)"]),
        ({"parallel": Parallel(tensor=2)}, 3, 1, ["world=3", "= 2", "2 or 4"]),
        ({"parallel": Parallel(pipeline=2)}, 2, 2, ["parallel.pipeline=2", "zero=pipeline"]),
        ({"parallel": Parallel(pipeline=2)}, 2, 3, ["ZeRO-3", "zero=1, 2 or 3"]),
        ({"parallel": Parallel(pipeline=8)}, 8, 1, ["num_hidden_layers=4", "at most 4"]),
        ({"parallel": Parallel(tensor=4), "kv_heads": 2}, 4, 1, ["2 key-value", "sizes: 1, 2"]),
        (
            {"parallel": Parallel(context=2, pipeline=2)},
            4,
            1,
            ["parallel.context=2 with parallel.pipeline=2", "do not combine"],
        ),
        ({"parallel": Parallel(context=2), "seq_len": 31}, 2, 1, ["seq_len=31", "30 or 32"]),
    ],
)
def test_an_illegal_request_is_refused_with_arithmetic_and_a_way_out(knobs, world, stage, parts):
    with pytest.raises(UserError) as refused:
        solve(recipe(**knobs), world, stage)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("axes", "knobs", "world", "parts"),
    [
        (Parallel(tensor=4), {"seq_len": 30, "batch_tokens": 8 * 30}, 4, ["30", "= 4", "28 or 32",
         "parallel.sequence=false"]),
        (Parallel(context=8), {}, 8, ["parallel.context=8", "4 query", "sizes: 1, 2, 4"]),
        (Parallel(context=4), {"seq_len_warmup": ((0, 2), (9, 32))}, 4,
         ["seq_len_warmup: 2 is not a multiple of parallel.context=4", "nearest: 4"]),
        (Parallel(tensor=2, context=4), {}, 8, ["2 query and 2 key-value", "sizes: 1, 2"]),
    ],
)  # fmt: skip
def test_cut_sequences_and_heads_must_come_out_even(axes, knobs, world, parts):
    with pytest.raises(UserError) as refused:
        solve(recipe(axes, **knobs), world, stage=1)
    for part in parts:
        assert part in refused.value.problems[0]


def test_features_must_divide_and_every_rank_needs_a_word():
    model = dataclasses.replace(recipe().model, intermediate_size=65, vocab_size=3)
    with pytest.raises(UserError) as refused:
        solve(dataclasses.replace(recipe(Parallel(tensor=4)), model=model), world=4, stage=1)
    assert "model.intermediate_size=65" in str(refused.value)
    assert "model.vocab_size=3" in str(refused.value)


def test_a_vocabulary_is_shared_without_padding():
    parts = [share(101, 4, index) for index in range(4)]
    assert [len(part) for part in parts] == [25, 25, 25, 26]
    assert [word for part in parts for word in part] == list(range(101))


def test_the_nearest_legal_layouts_are_named_and_legal():
    with pytest.raises(UserError) as refused:
        solve(recipe(Parallel(tensor=2, pipeline=2)), world=8, stage=3)
    last = refused.value.problems[-1]
    assert last.startswith("nearest legal layouts of 8 ranks: ")
    first = last.partition(": ")[2].split("; ")[0]
    assert first == "parallel.tensor=2 parallel.pipeline=2 zero=1"
    # Nothing to say where only the data axis was asked for.
    with pytest.raises(UserError) as plain:
        solve(recipe(batch_tokens=160), world=2, stage=1)
    assert len(plain.value.problems) == 1


def test_every_pair_that_the_matrix_refuses_is_refused_and_no_other():
    for candidate, stage in candidates(recipe(batch_tokens=64 * 32), 8):
        text = " ".join(problems(candidate, 8, stage))
        pairs = refused_pairs(candidate, stage)
        assert bool(pairs) == any(REFUSED[pair] in text for pair in REFUSED)


def test_layouts_prints_every_layout_once(capsys):
    assert layouts.main(["--world", "1024", "--all", "--", "70b"]) == 0
    shown = capsys.readouterr().out
    number = int(re.search(r"(\d+) legal layouts", shown).group(1))
    rows = [line.split() for line in shown.splitlines() if re.match(r"  \d+  ", line)]
    illegal = int(re.search(r"illegal: (\d+)", shown).group(1))
    assert len(rows) == number
    assert number + illegal == len(list(candidates(compose("70b", []).recipe, 1024)))
    assert sum("<- the recipe's" in line for line in shown.splitlines()) == 1
    own = next(row for row in rows if "<-" in row)
    assert own[:5] == ["8", "1", "8", "16", "1"]
    assert "parallel.across_hosts=true" in shown
    # A rule is reported once, not once for each size that breaks it.
    rules = shown.split("illegal: ")[1]
    assert rules.count("must split evenly") == rules.count("would cross hosts") == 1
    assert "parallel.tensor=16: the 64 query" in rules


def test_layouts_refuses_what_the_run_would_refuse(capsys):
    assert layouts.main(["--world", "x", "--", "70b"]) == 93
    assert layouts.main(["--", "70b", "parallel.tensr=2"]) == 93
    assert "parallel.tensor" in capsys.readouterr().err


def test_places_say_where_the_groups_of_each_axis_are():
    layout = solve(recipe(Parallel(tensor=2, pipeline=2)), world=8, stage=1)
    lines = describe_places(layout, ranks_per_host=4)
    assert lines == [
        "tensor group of rank 0: ranks 0, 1 (on one host)",
        "data group of rank 0: ranks 0, 2 (on one host)",
        "pipeline group of rank 0: ranks 0, 4 (over 2 hosts)",
    ]
    assert places(layout)[5] == [1, 0, 0, 1]
    assert describe_places(solve(recipe(), world=2, stage=1), 8) == []


def test_all_broken_rules_are_reported_together():
    axes = Parallel(pipeline=8, context=2)
    with pytest.raises(UserError) as refused:
        solve(recipe(axes, seq_len=31), world=3, stage=2)
    assert len(refused.value.problems) == 5


def test_a_tensor_group_crosses_hosts_only_if_asked_to():
    cluster = Cluster(gpus_per_node=2)
    with pytest.raises(UserError, match=r"would cross hosts.*across_hosts=true"):
        solve(recipe(Parallel(tensor=4), cluster=cluster), world=4, stage=1)
    axes = Parallel(tensor=4, across_hosts=True)
    assert solve(recipe(axes, cluster=cluster), world=4, stage=1).tensor == 4
