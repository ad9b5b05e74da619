"""Keys of public DeepSpeed files that change nothing here: taken with one line, or refused."""

from __future__ import annotations

import json

import pytest
from json_cases import config, only, refused

from base.errors import UserError
from data.stream.schedule import schedule_of
from recipes.compose import compose
from runtime.ds_config.idle_keys import IDLE, NEUTRAL, SWITCHED, TUNING
from runtime.ds_config.keys import FIXED, KEYS, REFUSED
from runtime.ds_config.merge import OFF
from runtime.resolve import resolve


@pytest.fixture
def own_json(tmp_path):
    """Writes a JSON file and returns the override that selects it."""

    def write(content) -> str:
        path = tmp_path / "own.json"
        path.write_text(json.dumps(content))
        return f"zero={path}"

    return write


def json_and_line(*overrides: str) -> tuple[dict, str]:
    made = config(*overrides)
    assert len(made.notes) <= 1
    return made.json, "".join(made.notes)


def test_keys_of_other_trainers_are_taken_with_one_line_that_names_them(own_json):
    foreign = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "steps_per_print": 77,
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "activation_checkpointing": {"partition_activations": True},
        "flops_profiler": {"enabled": True, "top_modules": 2},
        "comms_config": {"verbose": True},
        "low_cpu_mem_usage": False,
        "train_batch_size": "auto",
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_max_live_parameters": 1e8,
            "memory_efficient_linear": False,
        },
    }
    found, line = json_and_line(own_json(foreign))
    plain, nothing = json_and_line(own_json({"zero_optimization": {"stage": 2}}))
    assert (found, nothing) == (plain, "")
    assert "no effect here, and left out: fp16 (precision), optimizer (optim.*)" in line
    assert "its type=WarmupDecayLR is not used: optim.schedule=cosine" in line
    for name in ("steps_per_print (log.every)", "flops_profiler", "low_cpu_mem_usage", "comms_"):
        assert name in line
    assert "zero_optimization.stage3_max_live_parameters (read at stage 3 only)" in line
    assert "zero_force_ds_cpu_optimizer" not in line  # it says what holds anyway


def test_values_of_the_files_optimizer_that_are_not_used_are_named(own_json):
    params = {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.3}
    block = {"type": "FusedAdam", "params": params}
    _, line = json_and_line(own_json({"optimizer": block, "zero_optimization": {"stage": 1}}))
    assert "its lr=3e-05 is not used: optim.lr=" in line
    assert "its weight_decay=0.3 is not used: optim.weight_decay=" in line
    assert "betas" not in line


def test_misspelt_options_of_the_files_optimizer_are_refused_with_the_nearest(own_json):
    params = {"lrr": 3e-5, "wieght_decay": 0.3, "betas": [0.9, 0.95], "torch_adam": True}
    block = {"type": "AdamW", "params": params}
    first, second = refused(own_json({"optimizer": block, "zero_optimization": {"stage": 1}}))
    assert "optimizer.params.lrr" in first
    assert "no such option; did you mean optimizer.params.lr?; the optimizer is ours" in first
    assert "did you mean optimizer.params.weight_decay?" in second


@pytest.mark.parametrize("kind", ["OneBitAdam", "Lamb", "Muon", "SGD"])
def test_another_optimizer_is_refused(own_json, kind):
    block = {"type": kind, "params": {"lr": "auto"}}
    line = only(own_json({"optimizer": block, "zero_optimization": {"stage": 1}}))
    assert "use optim.name" in line
    assert line.endswith("remove it")


def test_what_asks_for_another_training_is_refused_also_in_a_file(own_json):
    zero = {"stage": 2}
    for content, reason in (
        ({"fp16": {"enabled": True}}, "fp16 is not offered"),
        ({"bfloat16": {"enabled": True}}, "old name of bf16"),
        ({"communication_data_type": "bfp16"}, "bfp16 is an old name of bf16"),
        ({"zero_optimization": zero | {"zero_quantized_weights": True}}, "only 3 reads it"),
        ({"zero_optimization": zero | {"zero_hpz_partition_size": 2}}, "only 3 reads it"),
        ({"zero_optimization": zero | {"offload_param": {"device": "cpu"}}}, "only 3 reads it"),
        ({"data_efficiency": {"enabled": True}}, "the order of data is ours"),
        ({"gradient_cliping": 1}, "did you mean gradient_clipping"),
    ):
        assert reason in only(own_json({"zero_optimization": zero, **content}))


def test_a_neutral_value_for_another_stage_is_taken_without_a_word(own_json):
    zero = {
        "stage": 2,
        "offload_param": {"device": "none", "pin_memory": True, "nvme_path": None},
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "mics_shard_size": -1,
        "sub_group_size": "auto",
    }
    more = {"tensor_parallel": {"autotp_size": 1}, "data_types": {"grad_accum_dtype": None}}
    found, line = json_and_line(own_json({"zero_optimization": zero, **more}))
    assert (found, line) == (config(own_json({"zero_optimization": {"stage": 2}})).json, "")
    config("zero=2", "ds.zero_optimization.zero_quantized_weights=false")
    assert "only 3 reads it; remove it" in only(
        "zero=2", "ds.zero_optimization.zero_hpz_partition_size=2"
    )


def test_sizes_at_auto_are_filled_as_transformers_does(own_json):
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    names += ("stage3_param_persistence_threshold",)
    zero = {"stage": 3, **dict.fromkeys(names, "auto"), "stage3_max_live_parameters": "auto"}
    made = config(own_json({"zero_optimization": zero}))
    hidden = compose("tiny").recipe.model.hidden_size
    found = made.json["zero_optimization"]
    assert [found[name] for name in names] == [hidden**2, int(0.9 * hidden**2), 10 * hidden]
    assert "stage3_max_live_parameters" not in found
    assert "as Transformers fills it" in made.origins[f"zero_optimization.{names[0]}"]


def test_an_override_without_effect_stays_refused_and_says_remove_it():
    for word in ("ds.steps_per_print=9", "ds.optimizer.type=AdamW", "ds.dump_state=true"):
        assert only(word).endswith("remove it")


def test_quantised_gathers_are_refused_in_fp32_and_on_a_cpu_before_anything_starts():
    key = "ds.zero_optimization.zero_quantized_weights=true"
    assert "precision=fp32 is the exact reference" in only("zero=3", key)

    def problems(*words):
        recipe = compose("tiny", ["zero=3", "precision=bf16", key, *words]).recipe
        try:
            resolve(recipe, 1, schedule_of(recipe))
        except UserError as error:
            return error.problems
        return []

    assert problems("cluster.device=cuda") == []
    assert "CUDA only" in problems("cluster.device=cpu")[0]


def test_a_file_of_stage_0_is_refused_with_all_its_other_problems(own_json):
    content = {
        "zero_optimization": {"stage": 0, "overlap_com": True},
        "fp16": {"enabled": True},
        "gradient_cliping": 1,
        "steps_per_print": 5,
    }
    recipe = compose("tiny", [own_json(content), "ds.bf16.enabled=text"]).recipe
    with pytest.raises(UserError) as caught:
        resolve(recipe, 1, schedule_of(recipe))
    stage, *others = caught.value.problems
    assert "ZeRO stage 0 is not offered" in stage
    assert [line.split(" ")[0].rstrip(":") for line in others] == [
        "zero_optimization.overlap_com", "fp16", "gradient_cliping", "ds.bf16.enabled='text'"
    ]  # fmt: skip


def test_the_lists_agree():
    """Every idle key is one that would be refused, or fixed, or no key of DeepSpeed at all."""
    for key in (*IDLE, *SWITCHED):
        assert key in REFUSED or key in FIXED or key not in KEYS
    assert NEUTRAL.keys() <= KEYS.keys() | REFUSED.keys() | OFF | {"tensor_parallel.autotp_size"}
    assert KEYS.keys() >= TUNING
    assert refused("ds.autotuning.enabled=true")
