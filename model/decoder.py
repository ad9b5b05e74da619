"""The decoder: embedding, blocks of attention and gated MLP, norm, head, under Llama's names.

It is a Hugging Face model. Blocks are pure functions of (hidden, Attend). Head counts come from the
width of the projections, so tensor parallelism only replaces `Linear`s, and a pipeline stage only
takes some of the blocks. Weights are uninitialised until `model.init` or a checkpoint sets them.

Rule: this is single-device code that knows nothing of ranks or hosts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from model.attention import Attend, attention, prepare, rotate
from model.config import DecoderConfig
from model.cost import recomputed
from model.layers import Embedding, Linear, RMSNorm
from model.loss import Head
from model.recompute import run


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions.

    Optional: bias on q, k and v (Qwen2), RMSNorm per head (Qwen3).
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.qkv_bias
        query, key = (
            n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = Linear(hidden, query, bias=bias)
        self.k_proj = Linear(hidden, key, bias=bias)
        self.v_proj = Linear(hidden, key, bias=bias)
        self.o_proj = Linear(query, hidden, bias=False)
        self.has_qk_norm = config.qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        q_BTHD, k_BTKD, v_BTKD = (x.unflatten(-1, (-1, self.head_dim)) for x in self.enter(hidden))
        if self.has_qk_norm:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        q_BTHD, k_BTKD = (rotate(x, attend.cos, attend.sin) for x in (q_BTHD, k_BTKD))
        return self.leave(attention(q_BTHD, k_BTKD, v_BTKD, attend).flatten(2))

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all tokens that attend to each other, (batch, seq, heads * head_dim)."""
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)

    def leave(self, heads: Tensor) -> Tensor:
        """(batch, seq, heads * head_dim) -> (batch, seq, hidden), for the residual stream."""
        return self.o_proj(heads)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


# `hidden_act` -> function of the gate: SwiGLU and GEGLU (Shazeer, 2020), squared ReLU (So et al.,
# 2021).
GATES = {"silu": F.silu, "gelu": F.gelu, "relu2": _relu2}


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), (batch, seq, hidden) -> the same; `act` is `hidden_act`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = GATES[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.enter(hidden)
        return self.down_proj(self.act(gate) * up)

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """gate and up, (batch, seq, intermediate)."""
        return self.gate_proj(hidden), self.up_proj(hidden)


class Block(nn.Module):
    """One decoder layer: (batch, seq, hidden) and an Attend -> (batch, seq, hidden)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Backbone(nn.Module):
    """The modules below the head, under Llama's names; `Decoder` runs them."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(PreTrainedModel):
    """A decoder-only language model. The caller may set `recompute`, see `cost.recomputed`."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.model = Backbone(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._recompute = "none"
        self.post_init()

    def init_weights(self) -> None:
        """Do nothing: weights are tied above and filled by `model.init`.

        Transformers would draw weights here, under zero.Init into parameters of size 0.
        """

    @property
    def recompute(self) -> str:
        return self._recompute

    @recompute.setter
    def recompute(self, value: str) -> None:
        recomputed(value, 0)  # raises where it is none
        self._recompute = value

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutput:
        """Logits (B, T, vocab_size), or with labels the loss and no logits.

        input_ids (B, T) int64. segment_ids (B, T) or cu_seqlens (see `attention.prepare`):
        attention and positions stay inside documents; neither: plain causal. labels (B, T) int64
        are ALREADY SHIFTED, unlike Transformers': labels[b, t] is the target of input_ids[b, t],
        -100 = none. Loss: see `loss.cross_entropy`.
        """
        hidden = self.model.embed_tokens(input_ids)
        head_dim, rotary = self.config.head_dim, self.config.rotary
        like = hidden.new_empty(*input_ids.shape, 0)  # hidden itself may be a part of the tokens
        attend = prepare(like, head_dim, rotary, segment_ids, cu_seqlens, max_seqlen)
        hidden = run_blocks(self.model.layers, hidden, attend, self._recompute)
        hidden = self.model.norm(hidden)
        if labels is None:
            return CausalLMOutput(logits=self.lm_head(hidden))
        return CausalLMOutput(loss=self.lm_head(hidden, labels, num_items_in_batch))


def run_blocks(
    blocks: Iterable[Block], hidden: Tensor, attend: Attend, recompute: str = "none", first: int = 0
) -> Tensor:
    """`hidden` (batch, seq, hidden) after `blocks`; the first is the decoder's block `first`."""
    for index, block in enumerate(blocks, first):
        hidden = run(block, hidden, attend, recomputed(recompute, index))
    return hidden


def compile_blocks(blocks: Iterable[Block], backend: str = "inductor") -> None:
    """Compile every block whole, in place; equal blocks share one compilation.

    `forward` is replaced, not `__call__`, so hooks on the block stay outside: ZeRO-3 gathers there.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
