"""parallel/layout.py: places of ranks, and refusals with their arithmetic."""

from __future__ import annotations

import pytest

from parallel.layout import solve
from recipes.schema import Data, Model, Optim, Parallel, Recipe, Source, UserError


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
        ({"parallel": Parallel(context=2, pipeline=2)}, 4, 1, ["parallel.context=2 with parallel.pipeline=2", "do not combine"]),
        ({"parallel": Parallel(context=2), "seq_len": 31}, 2, 1, ["seq_len=31", "30 or 32"]),
    ],
)
def test_an_illegal_request_is_refused_with_arithmetic_and_a_way_out(knobs, world, stage, parts):
    with pytest.raises(UserError) as refused:
        solve(recipe(**knobs), world, stage)
    for part in parts:
        assert part in str(refused.value)


def test_all_broken_rules_are_reported_together():
    axes = Parallel(pipeline=8, context=2)
    with pytest.raises(UserError) as refused:
        solve(recipe(axes, seq_len=31), world=3, stage=2)
    assert len(refused.value.problems) == 5


def test_a_tensor_group_never_crosses_hosts():
    with pytest.raises(UserError, match="would cross hosts"):
        solve(recipe(Parallel(tensor=3), kv_heads=3, batch_tokens=32 * 48), world=24, stage=1)
