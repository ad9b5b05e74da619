"""The shape of the decoder as a Hugging Face configuration, and its export as a known family.

Rule: field names and meanings are those of `LlamaConfig`, so a trained model is exported as Llama,
Qwen2 or Qwen3 without renaming a weight. Qwen2 differs from Llama by `qkv_bias`, Qwen3 by
`qk_norm`.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from transformers.configuration_utils import PretrainedConfig

from model.families import ACTIVATIONS, family_of

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
EXPORTED = (
    *SIZES, "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"
)  # fmt: skip


# Kinds of rotary scaling, with the fields that each reads; names are those of `rope_parameters`.
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class Rotary(NamedTuple):
    """Rotary base and scaling. "linear" divides all frequencies by `factor` (kaiokendev, 2023);
    "llama3" (Llama 3.1) divides long wavelengths, keeps short ones, and blends between them.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class DecoderConfig(PretrainedConfig):
    """Shape of a decoder-only language model.

    Sizes are in elements, `max_position_embeddings` in tokens. Raises ValueError naming every
    illegal field at once. `head_dim=None` means hidden_size / num_attention_heads and
    `num_key_value_heads=None` as many as query heads; both are numbers after construction.
    """

    model_type = "decoder"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 256,
        intermediate_size: int = 688,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 2048,
        hidden_act: str = "silu",
        rope_theta: float = 10000.0,
        rope_type: str = "default",
        rope_factor: float = 1.0,
        rope_low_freq_factor: float = 1.0,
        rope_high_freq_factor: float = 4.0,
        rope_original_max_position_embeddings: int = 8192,
        rms_norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ):
        # NumPy's integers would overflow in products and cannot be written as JSON.
        hidden_size, num_attention_heads = _of_python(hidden_size), _of_python(num_attention_heads)
        num_key_value_heads, head_dim = _of_python(num_key_value_heads), _of_python(head_dim)
        self.vocab_size = _of_python(vocab_size)
        self.hidden_size = hidden_size
        self.intermediate_size = _of_python(intermediate_size)
        self.num_hidden_layers = _of_python(num_hidden_layers)
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = (
            num_attention_heads if num_key_value_heads is None else num_key_value_heads
        )
        self.max_position_embeddings = _of_python(max_position_embeddings)
        self.hidden_act = hidden_act
        self.rope_theta = rope_theta
        self.rope_type = rope_type
        self.rope_factor = rope_factor
        self.rope_low_freq_factor = rope_low_freq_factor
        self.rope_high_freq_factor = rope_high_freq_factor
        self.rope_original_max_position_embeddings = rope_original_max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.qkv_bias = qkv_bias
        self.qk_norm = qk_norm
        self.initializer_range = initializer_range
        self.head_dim = head_dim
        problems = _problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        super().__init__(**kwargs)
        # After super(): older bases do not know the field, newer ones give it a default of their
        # own.
        self.tie_word_embeddings = tie_word_embeddings

    @property
    def rotary(self) -> Rotary:
        """Rotary base and scaling."""
        return Rotary(
            self.rope_theta,
            self.rope_type,
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_max_position_embeddings,
        )


def _of_python(value: Any) -> Any:
    return int(value) if isinstance(value, numbers.Integral) else value


def _problems(config: DecoderConfig) -> list[str]:
    problems = [
        f"{name}={getattr(config, name)!r} is not a whole number >= 1"
        for name in SIZES
        if not isinstance(getattr(config, name), int) or getattr(config, name) < 1
    ]
    if problems:
        return problems  # the rules below divide by these

    # Heads divide the width and each other.
    heads, kv_heads, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size,
    )
    if config.head_dim is None and hidden % heads:
        problems.append(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
            f"nearest: {max(1, hidden // heads) * heads} or {(hidden // heads + 1) * heads}, or"
            " set head_dim"
        )
    if heads % kv_heads:
        legal = [number for number in range(1, heads + 1) if heads % number == 0]
        problems.append(
            f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; "
            f"legal: {legal}"
        )
    head_dim = hidden // heads if config.head_dim is None else config.head_dim
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        problems.append(
            f"head_dim={head_dim!r} is not an even number >= 2 (rotary positions turn pairs); "
            "set head_dim, or other hidden_size and num_attention_heads"
        )
    # Single values.
    if config.hidden_act not in ACTIVATIONS:
        problems.append(f"hidden_act={config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
    for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
        if not getattr(config, name) > 0:
            problems.append(f"{name}={getattr(config, name)!r} is not above 0")
    return [*problems, *rope_problems(config)]


def rope_problems(config: Any) -> list[str]:
    """Return what is wrong with the fields of rotary scaling; `config` has them as attributes."""
    kind, defaults = config.rope_type, Rotary(0.0)
    if kind not in ROPE_FIELDS:
        return [f"rope_type={kind!r}: one of {', '.join(ROPE_FIELDS)}"]
    values = {name: getattr(config, f"rope_{name}") for name in Rotary._fields[2:]}
    problems = [
        f"rope_{name}={value} is not read with rope_type={kind}; set rope_type to"
        f" {' or '.join(other for other, read in ROPE_FIELDS.items() if name in read)}, or leave"
        " it out"
        for name, value in values.items()
        if name not in ROPE_FIELDS[kind] and value != getattr(defaults, name)
    ]
    if not values["factor"] >= 1:
        problems.append(f"rope_factor={values['factor']} is not at least 1")
    if kind == "llama3" and not 0 < values["low_freq_factor"] < values["high_freq_factor"]:
        problems.append(
            f"rope_low_freq_factor={values['low_freq_factor']} is not between 0 and"
            f" rope_high_freq_factor={values['high_freq_factor']}"
        )
    return problems


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` of these weights for Transformers and vLLM, as Llama, Qwen2 or Qwen3.

    Names in the state dict are equal, so an export is this dict and the weights. Special token ids
    are those set on `config`, else None. Raises ValueError where no family has these weights
    (`model.families`).
    """
    model_type, architecture = family_of(config)
    exported = {name: getattr(config, name) for name in EXPORTED}
    exported |= {
        name: getattr(config, name, None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    # Transformers 5 reads `rope_parameters`, most other loaders `rope_theta`.
    scaling = {"rope_type": config.rope_type}
    scaling |= {name: getattr(config, f"rope_{name}") for name in ROPE_FIELDS[config.rope_type]}
    rope = scaling | {"rope_theta": config.rope_theta}
    exported |= {"rope_theta": config.rope_theta, "rope_parameters": rope}
    if config.rope_type != "default":
        exported["rope_scaling"] = scaling
    exported |= {"model_type": model_type, "architectures": [architecture]}
    if model_type == "qwen2":
        return exported | {"use_sliding_window": False}
    return exported | {
        "attention_bias": False
    }  # Qwen3's would put one on the output projection as well
