"""A config.json means what Transformers' own class reads in it, or it is refused by its key."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from base.errors import UserError
from checkpoint.load import hf_check, hf_folder
from checkpoint.load.hf_check import check_logits
from checkpoint.load.hf_folder import FolderWeights
from checkpoint.load.outside_weights import check_window, weights_from
from checkpoint.load.weight_rows import check_fit, normal
from model.attention import inverse_frequencies
from model.config import Rotary

SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def folder_of(folder, family="llama", drop=(), **values):
    """A folder with the config.json as somebody wrote it, and weights of the model it describes."""
    config = SIZES | {"model_type": family, "architectures": [CLASSES[family]]} | values
    for name in drop:
        del config[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except Exception:  # what Transformers refuses needs no weights
        return folder
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", CLASSES)
def test_a_folder_of_each_family_gives_transformers_logits(family, tmp_path):
    weights = weights_from(str(folder_of(tmp_path / "m", family)))
    assert "logits compared with Transformers' model" in check_logits(weights, 64)
    assert weights.model["head_dim"] == (128 if family == "qwen3" else 8)  # its class's default


@pytest.mark.parametrize("written", ["silu", "swish", "gelu", "relu2"])
def test_an_activation_is_read_and_gives_transformers_logits(written, tmp_path):
    weights = weights_from(str(folder_of(tmp_path / "m", hidden_act=written)))
    assert weights.model["hidden_act"] == {"swish": "silu"}.get(written, written)
    assert "logits compared with Transformers' model" in check_logits(weights, 64)


def test_a_recipe_of_an_older_version_has_silu():
    old = {name: value for name, value in SIZES.items() if name != "hidden_act"}
    assert normal(old)["hidden_act"] == "silu"


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),  # CKP-30
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 500000, "rope_scaling": {"type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({}, 1e4),
    ],
)
def test_the_rotary_base_is_read_wherever_transformers_reads_it(values, theta, tmp_path):
    weights = weights_from(str(folder_of(tmp_path / "m", **values)))
    assert weights.model["rope_theta"] == theta
    check_fit(weights, SimpleNamespace(**weights.model))
    check_logits(weights, 64)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "rope_factor": 8.0,
                "rope_low_freq_factor": 1.0,
                "rope_high_freq_factor": 4.0,
                "rope_original_max_position_embeddings": 16,
            },
        ),
        ({"rope_scaling": LINEAR}, {"rope_type": "linear", "rope_factor": 4.0}),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 1e6, "factor": 32.0}},
            {"rope_theta": 1e6, "rope_type": "llama3", "rope_factor": 32.0},
        ),
    ],
)
def test_scaled_rotary_positions_give_transformers_logits_beyond_the_original_context(
    family, values, expected, tmp_path
):
    """256 positions where the original context has 16, and all frequencies."""
    weights = weights_from(str(folder_of(tmp_path / "m", family, **values)))
    assert {name: weights.model[name] for name in expected} == expected
    check_logits(weights, 2048)


def test_frequencies_of_a_long_context_are_those_of_transformers():
    config = LlamaConfig(
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 5e5},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    ours = inverse_frequencies(128, Rotary(5e5, "llama3", 8.0, 1.0, 4.0, 8192), "cpu")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert 20 < int((ours == inverse_frequencies(128, Rotary(5e5), "cpu")).sum()) < 40


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta",
        ),
        (
            {
                "rope_scaling": {"rope_type": "default", "rope_theta": 1e4},
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            "rope_scaling.rope_theta",
        ),
        ({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]}, "architectures"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_with_both_values(values, key, tmp_path):
    with pytest.raises(UserError, match="contradicts itself") as caught:
        weights_from(str(folder_of(tmp_path / "m", **values)))
    assert key in str(caught.value)


def test_scaling_beside_default_parameters_is_not_passed_over(tmp_path):
    """CKP-28: Transformers obeys rope_scaling; the logits differed by 16."""
    default = {"rope_type": "default", "rope_theta": 1e4}
    values = {"rope_theta": 1e4, "rope_scaling": LLAMA3, "rope_parameters": default}
    with pytest.raises(UserError, match="rotary") as caught:
        weights_from(str(folder_of(tmp_path / "m", **values)))
    assert "rope_scaling" in str(caught.value)
    assert "llama3" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "values", "window"),
    [
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),  # the default of its class
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, None),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            64,
        ),
        (
            "qwen3",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
            None,
        ),
        ("llama", {"sliding_window": 64}, None),  # Transformers' Llama has none
    ],
)
def test_a_window_is_compared_with_the_sequences_of_the_recipe(family, values, window, tmp_path):
    """CKP-32: a model with a window of 4096 can be trained on sequences of 64."""
    weights = weights_from(str(folder_of(tmp_path / "m", family, **values)))
    assert weights.window == window
    check_logits(weights, 32)
    check_window(weights, 64)
    if window is not None:
        with pytest.raises(UserError) as caught:
            check_window(weights, window + 1)
        assert f"seq_len={window + 1}" in str(caught.value)
        assert f"up to seq_len={window} there is no difference" in str(caught.value)


@pytest.mark.parametrize("theta", [50.0, 10001.0])
def test_a_setting_that_is_misread_here_is_found_by_its_logits_or_frequencies(
    theta, tmp_path, monkeypatch
):
    """10001 in place of 10000 moves no logit of a short sequence beyond rounding."""
    folder = folder_of(tmp_path / "m")
    real = hf_folder._fields
    monkeypatch.setattr(hf_folder, "_fields", lambda config: real(config) | {"rope_theta": theta})
    weights = FolderWeights(folder)
    with pytest.raises(UserError, match=r"gives other logits|rotary frequencies .* differ"):
        check_logits(weights, 64)


def test_a_large_model_is_compared_by_some_layers_and_rows(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "m", "qwen2", num_hidden_layers=4, eos_token_id=399)
    monkeypatch.setattr(hf_check, "WHOLE_BYTES", 1)
    monkeypatch.setattr(hf_check, "SAMPLED_VOCAB", 100)
    assert "(2 layers compared)" in check_logits(weights_from(str(folder)), 64)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": [4.0]}, "rope_scaling"),
        ({"rope_theta": "500000"}, "rope_theta='500000'"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 4.0}}, "dynamic"),
        ({"quantization_config": {"bits": 4, "quant_method": "gptq"}}, "quantization_config"),
        (
            {"hidden_size": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
            r"hidden size \(36\) is not a multiple",
        ),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_its_key(values, key, tmp_path):
    with pytest.raises(UserError, match=key):
        weights_from(str(folder_of(tmp_path / "m", **values)))


def test_weights_of_a_model_with_more_parts_are_refused_and_named(tmp_path):
    folder = folder_of(tmp_path / "m", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = weights_from(str(folder))  # its names are compared with the decoder's by read_origin
    assert "model.layers.0.self_attn.q_proj.bias" in weights.shapes
