"""DeepSpeed files of real life: what says nothing is taken, what would only fill memory is not."""

from __future__ import annotations

import json

from json_cases import config, only, refused


def test_a_bucket_larger_than_all_gradients_is_refused_before_memory_is_taken_for_it():
    key = "ds.zero_optimization.reduce_bucket_size"
    line = only(f"{key}=10_000_000_000")
    assert line == (
        f"{key}=10000000000 is more than the 5,048,576 gradients of the model, and every rank"
        " takes memory for all of it; at most 500000000"
    )


def test_what_a_file_of_real_life_only_switches_off_is_taken_and_left_out(tmp_path):
    def own_json(content):
        (tmp_path / "own.json").write_text(json.dumps(content))
        return f"zero={tmp_path / 'own.json'}"

    plain = {"zero_optimization": {"stage": 2}}
    off = {
        "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
        "amp": {"enabled": False, "opt_level": "O1"},
        "tensorboard": {"enabled": False, "output_path": "logs"},
        "comms_logger": {"enabled": False},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "dump_state": False,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "pin_memory": True, "nvme_path": "/x"},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }
    made = config(own_json(plain)).json
    found = config(own_json(off)).json
    assert found["zero_optimization"].pop("offload_optimizer") == {"device": "none"}
    assert found == made
    assert config("ds.fp16.enabled=false").json == config().json
    on = off | {"fp16": {"enabled": True}, "dump_state": True}
    assert [line.split()[0] for line in refused(own_json(on))] == ["fp16"]
    assert config(own_json(on | {"dump_state": False}), "ds.fp16.enabled=false").json == (
        config(own_json(off)).json
    )
