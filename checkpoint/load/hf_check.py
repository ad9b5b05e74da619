"""Compares the decoder with Transformers' own model of a family: logits and rotary frequencies.

Import and export both end here. Rule: the two sides are read apart. On one side our decoder is
built from the fields that this project has read, on the other side Transformers builds its model
from the configuration that it has read itself; only the numbers of the weights are shared. Units:
tokens, bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig

from base.errors import UserError
from base.units import GIB
from checkpoint.load.hf_folder import FolderWeights
from checkpoint.load.weight_rows import Weights
from model.attention import inverse_frequencies
from model.config import DecoderConfig
from model.cost import num_parameters
from model.decoder import Decoder

PIECE_BYTES = 64 << 20
# A model whose fp32 weights need more is compared with this many layers and rows of the table: all
# layers of these families are alike, and the sizes of all weights are checked before.
WHOLE_BYTES = GIB
SAMPLED_LAYERS, SAMPLED_VOCAB = 2, 4096
LENGTH = 256  # tokens; the rotary frequencies are compared for all positions
TOLERANCE = 1e-4  # of the largest logit
ROWS = ("model.embed_tokens.weight", "lm_head.weight")  # weights with a row per token id


def pieces(weights: Weights, name: str, rows: int | None = None) -> Iterator[torch.Tensor]:
    """Give a weight (or its first `rows`) in order, some rows at a time, fp32."""
    shape = weights.shapes[name]
    width = 1
    for side in shape[1:]:
        width *= side
    step = max(1, PIECE_BYTES // (4 * width))
    stop = shape[0] if rows is None else min(rows, shape[0])
    for start in range(0, stop, step):
        yield weights.read_rows(name, start, min(start + step, stop))


@torch.no_grad()
def fill(model: torch.nn.Module, weights: Weights, dtype: torch.dtype = torch.float32) -> None:
    """Fill the parameters of a model by name, rounded to `dtype`. The model may have fewer layers
    and fewer rows of the table than the weights.
    """
    for name, parameter in model.named_parameters():
        at = 0
        for rows in pieces(weights, name, len(parameter)):
            parameter[at : at + len(rows)] = rows.to(dtype)
            at += len(rows)


@torch.no_grad()
def largest_difference(ours: Decoder, theirs: Any, length: int) -> tuple[float, float]:
    """Return the largest difference of logits on random tokens, and the limit for it.

    Raises UserError where the rotary frequencies differ although these logits do not: short
    sequences hide a difference at late positions.
    """
    config = ours.config
    length = max(1, min(config.max_position_embeddings, length))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    expected, got = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    difference = float((expected - got).abs().max())
    limit = TOLERANCE * max(1.0, float(expected.abs().max()))
    frequencies = inverse_frequencies(config.head_dim, config.rotary, "cpu")
    rotary = theirs.model.rotary_emb
    if difference <= limit and not (
        rotary.attention_scaling == 1
        and torch.allclose(rotary.inv_freq.float(), frequencies, rtol=1e-5, atol=0)
    ):
        raise UserError(
            "the rotary frequencies of Transformers' model differ from those of the decoder:"
            f" {rotary.inv_freq[:4].tolist()} and {frequencies[:4].tolist()} for the first pairs"
        )
    return difference, limit


def check_logits(weights: FolderWeights, seq_len: int) -> str:
    """Compare the decoder, as config.json was read here, with Transformers' model; a line about it.

    Raises UserError where logits differ by more than rounding, or Transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    small, config = reduced(weights.model, weights.config, seq_len)
    ours = Decoder(small).float().eval()
    fill(ours, weights)
    try:
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        fill(theirs, weights)
        length = min(LENGTH, weights.window or LENGTH)
        difference, limit = largest_difference(ours, theirs, length)
    except UserError as error:
        raise UserError(
            *(f"init_from={weights.label}: {line}" for line in error.problems)
        ) from None
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise UserError(
            f"init_from={weights.label}: Transformers cannot build a model from its config.json:"
            f" {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None
    if not difference <= limit:
        raise UserError(
            f"init_from={weights.label}: with these weights Transformers' {type(theirs).__name__}"
            f" gives other logits than this decoder (largest difference {difference:.3g}, limit"
            f" {limit:.3g}): its config.json has something that is not read correctly here"
        )
    layers = small.num_hidden_layers
    part = "" if layers == weights.model["num_hidden_layers"] else f" ({layers} layers compared)"
    return f"logits compared with Transformers' model: they differ by {difference:.1e}{part}"


def reduced(
    model: dict[str, Any], config: PretrainedConfig, seq_len: int
) -> tuple[DecoderConfig, PretrainedConfig]:
    """Return both configurations, with fewer layers and token ids where the model is large."""
    ours = DecoderConfig(**model, max_position_embeddings=seq_len)
    theirs = copy.deepcopy(config)
    if 4 * num_parameters(ours) > WHOLE_BYTES:
        layers = min(SAMPLED_LAYERS, ours.num_hidden_layers)
        vocab = min(SAMPLED_VOCAB, ours.vocab_size)
        for one in (ours, theirs):
            one.num_hidden_layers, one.vocab_size = layers, vocab
        if getattr(theirs, "layer_types", None):
            theirs.layer_types = theirs.layer_types[:layers]
    theirs.pad_token_id = None  # may lie beyond the rows that are compared
    return ours, theirs
