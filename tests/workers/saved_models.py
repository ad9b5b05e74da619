"""A run with a checkpoint of a small decoder, for tests of what reads its weights."""

from __future__ import annotations

import torch

from checkpoint.comm import Alone
from checkpoint.format.index import Fragment
from checkpoint.format.rectangles import Box
from checkpoint.save.commit import save
from model.config import DecoderConfig
from model.decoder import Decoder
from model.init import fill

SHAPE = dict(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=None,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    initializer_range=0.2,
)


def trained(run, step=3, init_from=None, data=None, data_state=None, **changes):
    """A run folder with one checkpoint of a decoder with random weights; the decoder."""
    shape = SHAPE | changes
    model = Decoder(DecoderConfig(**shape, max_position_embeddings=64))
    fill(model, seed=step)
    generator = torch.Generator().manual_seed(step)
    fragments = []
    for name, parameter in model.named_parameters():
        with torch.no_grad():  # norms and biases that are not all equal
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        box = Box(tuple(parameter.shape), tuple(parameter.shape))
        flat = parameter.detach().reshape(-1)
        fragments.append(Fragment(name, "weight", box, 0, flat))
        fragments.append(Fragment(name, "exp_avg", box, 0, torch.zeros_like(flat)))
    recipe = {"model": shape, "seq_len": 64, "init_from": init_from, "data": data or {}}
    state = {"step": step, "tokens": 99, "recipe": recipe, "recipe_hash": "abc"}
    state |= {"data": data_state} if data_state else {}
    assert save(run, step, fragments, state, Alone()).ok
    return model.eval()
