"""runtime.resolve: what a person is told about a plan that is legal."""

from __future__ import annotations

import pytest

from data.stream.schedule import schedule_of
from recipes.compose import compose
from runtime.resolve import Resolved, resolve


def resolved(ranks: int, *overrides: str) -> Resolved:
    recipe = compose("tiny", overrides).recipe
    return resolve(recipe, ranks, schedule_of(recipe))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["steps=null", "tokens=1000000"],
         "tokens=1000000 is 1,000,000, rounded up to 489 whole steps: 1,001,472 tokens"),
        (["steps=null", "tokens=1"], "tokens=1 is 1, rounded up to 1 whole step: 2,048 tokens"),
        (["steps=null", "tokens=20480"], ""),
        (["steps=10"], ""),
    ],
)  # fmt: skip
def test_tokens_that_are_rounded_up_to_steps_are_reported(overrides, line):
    assert resolved(1, *overrides).rounding == line


def test_chinchilla_is_rounded_in_the_open():
    plan = resolved(1, "steps=null", "tokens=chinchilla")
    assert plan.rounding.startswith(f"tokens=chinchilla is {20 * plan.num_parameters:,}, rounded")


@pytest.mark.parametrize(("micro_batch", "stages", "idle"), [(4, 4, "60%"), (8, 4, "75%")])
def test_a_pipeline_with_fewer_micro_batches_than_stages_is_warned_of(micro_batch, stages, idle):
    pipeline = ["zero=pipeline", f"parallel.pipeline={stages}", f"micro_batch={micro_batch}"]
    (line,) = [line for line in resolved(stages, *pipeline).warnings if "idles" in line]
    assert f"parallel.pipeline={stages} with {8 // micro_batch} micro-batch" in line
    assert f"each stage idles {idle} of a step; give at least {stages} micro-batches" in line


def test_a_pipeline_with_enough_micro_batches_is_not_warned_of():
    for batch in ("2048", "[[0,2048],[10,4096]]"):
        pipeline = ["zero=pipeline", "parallel.pipeline=4", f"batch_tokens={batch}"]
        assert not [line for line in resolved(4, *pipeline).warnings if "idles" in line]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.qk_norm=true", "model.qkv_bias=true"], "no Hugging Face counterpart"),
        (["model.hidden_size=264", "model.num_attention_heads=5", "model.num_key_value_heads=5",
          "model.head_dim=64"], "LlamaConfig demands even where head_dim is given"),
    ],
)  # fmt: skip
def test_a_shape_that_no_family_has_trains_with_a_warning(overrides, reason):
    (line,) = [line for line in resolved(1, *overrides).warnings if "exported" in line]
    assert reason in line
    assert not [line for line in resolved(1).warnings if "exported" in line]
