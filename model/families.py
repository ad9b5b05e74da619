"""Hugging Face families that have exactly the decoder's weights. No torch, no Transformers.

Rule: a shape belongs to one family or to none, and the reason for none is one line.
"""

from __future__ import annotations

from typing import Any

# (qkv_bias, qk_norm) -> model_type and architecture.
FAMILIES = {
    (False, False): ("llama", "LlamaForCausalLM"),
    (True, False): ("qwen2", "Qwen2ForCausalLM"),
    (False, True): ("qwen3", "Qwen3ForCausalLM"),
}
# Values of `hidden_act`, under the names of Transformers' ACT2FN; "swish" is silu's other name.
ACTIVATIONS = ("silu", "gelu", "relu2")
SYNONYMS = {"swish": "silu"}


def family_of(shape: Any) -> tuple[str, str]:
    """(model_type, architecture) of a shape with the fields of `recipes.schema.Model`.

    Raises ValueError with the reason where no family has these weights.
    """
    problem = export_problem(shape)
    if problem:
        raise ValueError(problem)
    return FAMILIES[bool(shape.qkv_bias), bool(shape.qk_norm)]


def export_problem(shape: Any) -> str | None:
    """The reason why no family has the weights of a shape, with the way out; None: one has them."""
    if shape.qkv_bias and shape.qk_norm:
        return (
            "qkv_bias=True with qk_norm=True has no Hugging Face counterpart (Qwen2 has the first,"
            " Qwen3 the second); set one of them to False to export"
        )
    is_even = shape.hidden_size % shape.num_attention_heads == 0
    if not shape.qkv_bias and not shape.qk_norm and not is_even:
        return (
            f"hidden_size={shape.hidden_size} is not a multiple of"
            f" num_attention_heads={shape.num_attention_heads}, which Transformers' LlamaConfig"
            " demands even where head_dim is given; change one of them, or set qk_norm or qkv_bias"
            " (Qwen3, Qwen2) to export"
        )
    return None
