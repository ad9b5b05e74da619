"""The DeepSpeed JSON: who owns each key, what is filled, what is refused and with which words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from json_cases import config, only, refused

from base.errors import UserError
from data.stream.schedule import read_schedule
from model.config import DecoderConfig
from model.decoder import Block
from recipes.compose import compose
from runtime.ds_config.keys import KEYS, LEAF_CLASSES, OWNED, REFUSED
from runtime.ds_config.merge import ROOT, load_preset, preset_names
from runtime.engine.build_engine import check_kernels
from runtime.resolve import resolve

PRESETS = ("pipeline", "zero1", "zero2", "zero3", "zero3_offload")


@pytest.fixture
def own_json(tmp_path):
    """Writes a JSON file and returns the override that selects it."""

    def write(content) -> str:
        path = tmp_path / "own.json"
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text)
        return f"zero={path}"

    return write


def test_the_presets_that_ship_are_known_and_strategy_only():
    assert tuple(preset_names()) == PRESETS
    for name in PRESETS:
        flat = json.dumps(load_preset(name).json)
        assert flat.count('"auto"') == len(OWNED) + 2  # and two types that follow from them


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_left_at_auto_and_the_changed_defaults_are_explicit(name):
    parallel = ["parallel.pipeline=2"] if name == "pipeline" else []
    made = config(f"zero={name}", *parallel)
    assert "auto" not in json.dumps(made.json, allow_nan=False)
    assert made.json["gradient_clipping"] == 1.0
    assert made.json["communication_data_type"] == "fp32"
    assert made.json["data_types"]["grad_accum_dtype"] == "fp32"
    assert made.json["steps_per_print"] is None
    assert made.json["wall_clock_breakdown"] is False
    assert made.json["timers"]["throughput"]["enabled"] is False
    assert made.json["zero_optimization"]["overlap_comm"] is (made.stage == 3)
    assert made.stage == load_preset(name).stage


def test_the_three_batch_numbers_multiply_out_and_say_where_they_come_from():
    made = config("micro_batch=4", data_size=8, accumulation=16)
    assert made.json["train_batch_size"] == 8 * 4 * 16
    assert made.json["train_micro_batch_size_per_gpu"] == 4
    assert made.json["gradient_accumulation_steps"] == 16
    assert made.origins["train_micro_batch_size_per_gpu"] == "recipe: micro_batch"
    assert "8 data ranks x micro_batch 4 x 16" in made.origins["train_batch_size"]
    assert made.origins["zero_optimization.stage"] == "ds_configs/zero1.json"
    assert config("ds.log_level=info").origins["log_level"] == "ds.log_level"


def test_gradients_are_summed_in_fp32_where_there_is_something_to_sum():
    def dtypes(*overrides, accumulation):
        made = config(*overrides, accumulation=accumulation).json
        return made["data_types"]["grad_accum_dtype"], made["communication_data_type"]

    assert dtypes("precision=bf16", accumulation=2) == ("fp32", "fp32")
    assert dtypes("precision=bf16", accumulation=1) == ("bf16", "bf16")
    assert dtypes("precision=fp32", accumulation=1) == ("fp32", "fp32")
    pipeline = ("precision=bf16", "zero=pipeline", "parallel.pipeline=2")
    assert dtypes(*pipeline, accumulation=1) == ("fp32", "fp32")
    chosen = ("precision=bf16", "ds.communication_data_type=bf16")
    assert dtypes(*chosen, accumulation=2) == ("fp32", "bf16")


@pytest.mark.parametrize("value", ["2", "'2'", "2.0", "auto"])
def test_an_equal_value_of_an_owned_key_is_no_conflict(value):
    made = config(f"ds.gradient_accumulation_steps={value}")
    assert made.json["gradient_accumulation_steps"] == 2


def test_a_real_conflict_names_both_places(own_json):
    line = only("ds.gradient_accumulation_steps=4")
    assert "ds.gradient_accumulation_steps=4 contradicts 2 (layout: batch_tokens" in line
    block = {"stage": 1}
    line = only(own_json({"gradient_accumulation_steps": "8", "zero_optimization": block}))
    assert "gradient_accumulation_steps='8' (" in line
    assert "own.json) contradicts 2 (layout" in line
    assert "contradicts 8 (layout: 2 data ranks x micro_batch 2 x 2)" in only(
        "ds.train_batch_size=5"
    )
    assert "contradicts 1.0 (recipe: optim.clip)" in only("ds.gradient_clipping=0.5")
    assert "contradicts false (recipe: precision)" in only("ds.bf16.enabled=true")
    assert "=1 is not true or false; the recipe owns it (precision)" in only(
        "ds.bf16.enabled=1", "precision=bf16"
    )


def test_text_for_true_or_false_and_null_are_no_values_of_an_owned_key():
    assert "bf16.enabled='false' is not true or false, but text" in only("ds.bf16.enabled='false'")
    assert "is not a number; the recipe owns it (optim.clip)" in only("ds.gradient_clipping=null")


def test_two_precisions_are_both_named():
    text = "\n".join(refused("ds.fp16.enabled=true", "ds.bf16.enabled=true"))
    assert "ds.fp16" in text
    assert "ds.bf16.enabled" in text
    assert "precision=bf16" in only("precision=bf16", "ds.fp16.enabled=true")
    line = only("ds.data_types.grad_accum_dtype=bf16", "ds.communication_data_type=fp32")
    assert "contradicts precision=fp32" in line


def test_the_stage_is_chosen_by_zero_alone(own_json):
    assert "set zero=2 instead" in only("ds.zero_optimization.stage=2")
    assert "decays bf16 weights" in only("ds.zero_optimization.stage=0")
    for block in ({"stage": 0}, {}, True, {"stage": 4}):
        line = only(own_json({"zero_optimization": block}))
        assert "must be 1, 2 or 3" in line
        assert "no gradient norm" in line
    assert config(own_json({"zero_optimization": {"stage": "2"}})).stage == 2


def test_values_left_at_auto_are_listed_with_their_full_path(own_json):
    asked = {"communication_data_type": "auto", "log_level": "auto"}
    content = {"zero_optimization": {"stage": 1}, **asked}
    line = only(own_json(content), "ds.zero_optimization.overlap_comm=auto")
    assert "log_level (" in line
    assert "ds.zero_optimization.overlap_comm" in line
    filled = {"train_batch_size": "auto", "gradient_clipping": "auto"}
    made = config(own_json({**filled, "zero_optimization": {"stage": 1}}))
    assert (made.json["train_batch_size"], made.json["gradient_clipping"]) == (8, 1.0)


def test_a_misspelt_key_is_refused_with_the_nearest_one_at_every_depth(own_json):
    assert "did you mean gradient_clipping?" in only("ds.gradient_cliping=1")
    line = only("ds.zero_optimization.overlap_com=true")
    assert "did you mean zero_optimization.overlap_comm?" in line
    assert "no such block; did you mean zero_optimization?" in only("ds.zero_optimisation.x=1")
    line = only("ds.data_types.grad_acum_dtype=fp32")
    assert "did you mean data_types.grad_accum_dtype?" in line
    line = only("zero=zero3_offload", "ds.zero_optimization.offload_optimizer.devise=cpu")
    assert "did you mean zero_optimization.offload_optimizer.device?" in line
    line = only("zero=pipeline", "parallel.pipeline=2", "ds.pipeline.pipe_partitoned=false")
    assert "did you mean pipeline.pipe_partitioned?" in line
    assert "is a block; its keys: enabled" in only("ds.bf16=true")
    line = only(own_json({"zero_optimization": {"stage": 1}, "gradient_cliping": 1}))
    assert "own.json): no such key; did you mean gradient_clipping?" in line


@pytest.mark.parametrize("value", ["5e8", "'5e8'", "500000000.0", "500000000"])
def test_bucket_sizes_are_exact_ints_from_any_notation(value, own_json):
    size = config(f"ds.zero_optimization.reduce_bucket_size={value}").json["zero_optimization"][
        "reduce_bucket_size"
    ]
    assert size == 500_000_000
    assert type(size) is int
    written = value.replace("'", '"')
    text = f'{{"zero_optimization": {{"stage": 1, "reduce_bucket_size": {written}}}}}'
    made = config(own_json(text))
    assert type(made.json["zero_optimization"]["reduce_bucket_size"]) is int


def test_names_types_and_ranges_are_told_where_there_is_no_layout_either():
    given = ["steps=9", "micro_batch=3", "ds.gradient_cliping=1", "ds.bf16.enabled=text"]
    recipe = compose("tiny", [*given, "ds.gradient_clipping=0.5"]).recipe
    with pytest.raises(UserError) as caught:
        resolve(recipe, 1, read_schedule(recipe.batch_tokens, recipe.seq_len))
    layout, *keys = caught.value.problems
    assert layout.startswith("batch_tokens=2048 is not a multiple")
    assert [line.split(" ")[0] for line in keys] == [
        "ds.gradient_cliping:", "ds.bf16.enabled='text'"
    ]  # fmt: skip


def test_what_would_fill_the_memory_or_round_gradients_to_nothing_is_refused():
    assert "must be at most 10000000000" in only("ds.zero_optimization.reduce_bucket_size=1e12")
    scatter = "ds.zero_optimization.reduce_scatter=false"
    assert "must be at most 1048576" in only("zero=2", scatter, "ds.gradient_predivide_factor=1e30")


def test_a_wrong_type_of_gradients_is_told_once():
    assert only("ds.data_types.grad_accum_dtype=fp16").startswith("ds.data_types.grad_accum_dtype")


def test_values_of_the_wrong_type_or_range_are_refused():
    key = "ds.zero_optimization.reduce_bucket_size"
    assert "must be at least 1" in only(f"{key}=0")
    assert "must be at least 1" in only("ds.zero_optimization.allgather_bucket_size=0")
    assert "is not a whole number" in only(f"{key}=1.5")
    assert "is not a whole number" in only(f"{key}=many")
    assert "is not true or false" in only("ds.zero_optimization.overlap_comm='true'")
    assert "must be at least 1" in only("zero=3", "ds.zero_optimization.zero_hpz_partition_size=0")
    assert "synchronises the device" in only("ds.timers.throughput.enabled=0")
    assert "is not one of fp32, bf16" in only("ds.communication_data_type=fp16")
    for size in (1, 1000, 500_000_000):
        assert config(f"{key}={size}").json["zero_optimization"]["reduce_bucket_size"] == size


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("ds.activation_checkpointing.partition_activations=true", "recompute=full"),
        ("ds.tensorboard.enabled=true", "log.tensorboard"),
        ("ds.wandb.enabled=true", "log.wandb"),
        ("ds.csv_monitor.enabled=true", "log.tensorboard"),
        ("ds.flops_profiler.enabled=true", "metrics.jsonl"),
        ("ds.wall_clock_breakdown=true", "metrics.jsonl"),
        ("ds.steps_per_print=10", "log.every"),
        ("ds.optimizer.params.btea=0.9", "optim.lr"),
        ("ds.scheduler.type=WarmupLR", "optim.schedule"),
        ("ds.elasticity.enabled=true", "removed"),
        ("ds.curriculum_learning.enabled=true", "removed"),
        ("ds.zero_optimization.mics_shard_size=2", "zero_hpz_partition_size"),
        ("ds.zero_optimization.cpu_offload=true", "offload_optimizer"),
        ("ds.checkpoint.tag_validation=Fail", "has no effect"),
        ("ds.tensor_parallel.autotp_size=2", "parallel.tensor"),
        ("ds.pipeline.stages=2", "parallel.pipeline"),
        ("ds.pipeline.use_reentrant=true", "recompute=full"),
        ("ds.compile.deepcompile=true", "compile=true"),
        ("ds.bfloat16.enabled=true", "precision=bf16"),
        ("ds.gradient_allreduce_op=sum", "mean"),
        ("ds.zero_optimization.compute_grad_norm=false", "gradient norm"),
        ("ds.zero_optimization.allgather_partitions=false", "ignores it"),
        ("ds.zero_optimization.ignore_unused_parameters=false", "no effect"),
        ("ds.zero_optimization.override_module_apply=false", "no effect"),
        ("ds.zero_optimization.stage3_module_granularity_threshold=9", "leaf_module.classes"),
        ("ds.zero_optimization.leaf_module.names=[x]", "leaf_module.classes"),
        ("ds.bf16.check_grad_overflow=false", "health.max_skips"),
        ("ds.comms_logger.enabled=true", "metrics.jsonl"),
        ("ds.dump_state=true", "ds_config.json"),
        ("ds.aio.block_size=4096", "device=cpu"),
        ("ds.zero_optimization.offload_optimizer.nvme_path=/tmp", "device=cpu"),
        ("ds.zero_optimization.offload_param.max_in_cpu=1", "device=cpu"),
    ],
)
def test_keys_without_effect_or_with_another_owner_are_refused_with_the_way_out(override, way_out):
    line = refused(override)[0]
    assert way_out in line
    assert override.startswith(re.split("[:=]", line)[0])


def test_a_refused_block_is_reported_once():
    assert len(refused("ds.optimizer.type=Adam", "ds.optimizer.params.lr=1")) == 1


def test_options_that_this_stage_does_not_read_are_refused(own_json):
    line = only("ds.zero_optimization.stage3_prefetch_bucket_size=1")
    assert "has no effect at ZeRO stage 1" in line
    assert "stage 3" in only("zero=3", "ds.zero_optimization.round_robin_gradients=true")
    assert "only 1 or 2" in only("zero=3", "ds.zero_optimization.allgather_bucket_size=4")
    line = only(own_json({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}))
    assert "own.json) has no effect at ZeRO stage 2: only 3 reads it; remove it" in line


def test_a_pipeline_block_and_pipeline_ranks_belong_together():
    assert "use zero=1, or set parallel.pipeline" in only("zero=pipeline")
    line = only("ds.pipeline.pipe_partitioned=false")
    assert "has no effect with parallel.pipeline=1; remove it" in line
    assert "use zero=" not in line
    lines = refused("zero=zero3_offload", "parallel.pipeline=2")
    assert any("parallel.pipeline=2: DeepSpeed 0.19.8 drops the gradient" in line for line in lines)


SUMS = ("precision=bf16",)  # at accumulation 2 ZeRO-1 then builds BF16_Optimizer


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        # read by another class than the one that is built
        (("ds.bf16.immediate_grad_update=true",), "only BF16_Optimizer reads it"),
        (("zero=2", *SUMS, "ds.bf16.immediate_grad_update=true"), "at ZeRO stage 2"),
        ((*SUMS, "ds.zero_optimization.reduce_bucket_size=1000"), "does not read it"),
        ((*SUMS, "ds.zero_optimization.overlap_comm=true"), "does not read it"),
        ((*SUMS, "ds.zero_optimization.round_robin_gradients=true"), "does not read it"),
        ((*SUMS, "ds.zero_optimization.offload_optimizer.pin_memory=true"), "does not read it"),
        # switched off by another key
        (("ds.zero_optimization.offload_optimizer.pin_memory=true",), "nothing is offloaded"),
        (("zero=3", "ds.zero_optimization.offload_param.pin_memory=true"), "nothing is offloaded"),
        (
            (
                "ds.zero_optimization.reduce_scatter=false",
                "ds.zero_optimization.use_multi_rank_bucket_allreduce=false",
            ),
            "sends whole buckets",
        ),
        (
            (
                "zero=3",
                "ds.zero_optimization.stage3_allgather_sequential=true",
                "ds.zero_optimization.stage3_prefetch_bucket_size=9",
            ),
            "one weight at a time",
        ),
        (("ds.prescale_gradients=true",), "while gradients are scattered"),
        (("zero=2", "ds.gradient_predivide_factor=2"), "while gradients are scattered"),
        (("zero=3", "ds.gradient_predivide_factor=2"), "while gradients are scattered"),
        (
            (*SUMS, "ds.prescale_gradients=true", "ds.gradient_predivide_factor=2"),
            "divides at once",
        ),
        (
            (
                "ds.zero_optimization.offload_optimizer.device=cpu",
                "ds.zero_optimization.contiguous_gradients=false",
            ),
            "offload needs the buffer",
        ),
        # sizes
        (("zero=3", "ds.zero_optimization.zero_hpz_partition_size=3"), "legal: 1, 2"),
        (("ds.zero_optimization.allgather_bucket_size=3",), "nearest: 4"),
        # what cannot work here
        (("zero=3", "ds.zero_optimization.offload_optimizer.device=nvme"), "NVMe offload is not"),
        (("zero=3", "ds.zero_optimization.offload_param.device=nvme"), "NVMe offload is not"),
        (("zero=3", "ds.zero_optimization.leaf_module.classes=[Blok]"), "has 'Blok', which is not"),
        (("zero=3", "ds.zero_optimization.leaf_module.classes=[Decoder]"), "Block, Attention"),
    ],
)
def test_what_nothing_would_read_is_refused_with_the_reason(overrides, reason):
    line = only(*overrides)
    assert reason in line
    assert "ds." in line


def test_the_same_keys_are_taken_where_they_are_read():
    for overrides in (
        (*SUMS, "ds.bf16.immediate_grad_update=false"),
        (*SUMS, "ds.prescale_gradients=true"),
        ("ds.zero_optimization.reduce_scatter=false", "ds.gradient_predivide_factor=2"),
        (
            "ds.zero_optimization.offload_optimizer.device=cpu",
            "ds.zero_optimization.offload_optimizer.pin_memory=false",
        ),
        ("zero=3", "ds.zero_optimization.stage3_allgather_sequential=true"),
        ("zero=zero3_offload", "ds.zero_optimization.offload_optimizer.device=none"),
        ("zero=3", "ds.zero_optimization.zero_hpz_partition_size=2"),
        ("zero=3", "ds.zero_optimization.leaf_module.classes=[Attention,MLP]"),
    ):
        config(*overrides)


def test_keys_whose_kernels_need_cuda_are_refused_on_the_cpu():
    made = config(
        "zero=3",
        "precision=bf16",
        "ds.zero_optimization.zero_quantized_weights=true",
        "ds.zero_optimization.zero_quantized_gradients=true",
    )
    with pytest.raises(UserError) as caught:
        check_kernels(made.json, torch.device("cpu"))
    assert len(caught.value.problems) == 2
    assert "CUDA only" in caught.value.problems[0]
    check_kernels(made.json, torch.device("cuda"))
    check_kernels(config("zero=3").json, torch.device("cpu"))


def test_leaf_classes_are_those_of_the_decoder_that_hold_several_weights():
    modules = {
        type(module).__name__
        for module in Block(DecoderConfig(**vars(compose("tiny").recipe.model))).modules()
        if len(list(module.parameters())) > 1
    }
    assert set(LEAF_CLASSES) == modules


def test_empty_blocks_and_names_with_dots_are_refused(own_json):
    assert "ds.foo: no such key" in only("ds.foo={}")
    assert "is an empty block, which changes nothing" in only("ds.zero_optimization={}")
    line = only("zero=3", "ds.zero_optimization.offload_param={}")
    assert "ds.zero_optimization.offload_param is an empty block" in line
    assert "recompute=full" in only("ds.activation_checkpointing={}")
    line = only(own_json({"zero_optimization": {"stage": 1}, "bf16": {}}))
    assert "bf16 (" in line
    assert "empty block" in line
    dotted = {"zero_optimization": {"stage": 1}, "zero_optimization.overlap_comm": True}
    assert "a dot in a name" in only(own_json(dotted))


def test_a_pipeline_sends_whole_activations_and_overlaps_nothing_whatever_the_preset():
    for zero in ("zero=1", "zero=pipeline"):
        made = config(zero, "parallel.pipeline=2").json
        assert made["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
        assert made["zero_optimization"]["overlap_comm"] is False
    line = only("parallel.pipeline=2", "ds.pipeline.pipe_partitioned=true")
    assert "a stage sends whole activations" in line
    line = only("parallel.pipeline=2", "ds.zero_optimization.overlap_comm=true")
    assert "DeepSpeed switches it off in a pipeline" in line


def test_null_removes_a_block_of_the_preset():
    made = config("zero=zero3_offload", "ds.zero_optimization.offload_optimizer=null")
    assert "offload_optimizer" not in made.json["zero_optimization"]
    assert not made.is_offloaded


def test_switching_the_preset_leaves_no_key_of_the_other():
    text = json.dumps(config("zero=3", "zero=1").json)
    assert "stage3" not in text
    assert "leaf_module" not in text


def test_paths_are_relative_to_the_repository_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config("zero=ds_configs/zero2.json").stage == 2
    assert config("zero=./ds_configs/zero2.json").origins["zero_optimization.stage"] == (
        "ds_configs/zero2.json"
    )
    line = only("zero=ds_configs/zero9.json")
    assert str(ROOT / "ds_configs" / "zero9.json") in line
    line = only("zero=zer3")
    assert "did you mean zero3?" in line
    assert ", ".join(PRESETS) in line
    assert "there is no file" in only("zero=zero2.json")


def test_a_path_that_no_file_can_have_and_a_key_with_a_line_break_are_told_in_one_line(own_json):
    loop = own_json({})[len("zero=") :]
    Path(loop).unlink()
    Path(loop).symlink_to(loop)  # a loop
    for path in (loop, "a/" * 3000 + "x.json"):
        assert "there is no file" in only(f"zero={path}")
    with pytest.raises(UserError, match="longer than 255 bytes"):
        compose("tiny", [f"zero={'x' * 300}.json"])
    Path(loop).unlink()
    text = '{"zero_optimization": {"stage": 1, "a\\nb": 1}}'
    assert "a\\nb" in only(own_json(text))


def test_a_preset_that_is_not_plain_json_is_refused_with_its_place(own_json):
    assert "own.json: line 1 column 2: comments" in only(own_json("{// x\n}"))
    assert 'key "a" is given twice' in only(own_json('{"a": 1, "a": 2}'))


def test_an_optimizer_that_deepspeed_has_not_tested_is_allowed_only_where_chosen():
    assert config("optim=sgd", "optim.lr=1").json["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in config().json
    assert "set from optim.name" in only("ds.zero_allow_untested_optimizer=true")


def test_no_key_is_both_listed_and_refused():
    assert not KEYS.keys() & REFUSED.keys()
    assert OWNED.keys() <= KEYS.keys()


@pytest.mark.parametrize("key", ["ds.zero_optimization", "ds.zero_optimization.stage"])
def test_the_stage_cannot_be_removed(key):
    assert key in only(f"{key}=null")
