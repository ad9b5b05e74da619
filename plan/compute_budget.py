"""What a budget of GPU-hours trains best: parameters, tokens, loss, and what over-training costs.

    GPU-hours x planned speed = FLOPs  ->  N and D of least loss  ->  a shape  ->  its plan

The loss is the fit of Besiroglu et al. 2024 to the runs of Hoffmann et al. 2022,
L(N, D) = E + A / N**alpha + B / D**beta, in nats per token of their text and tokenizer:
differences carry over to other text, values do not. Rule: the fit by Hoffmann et al. themselves
(approach 3, as printed) implies 70 tokens per parameter and contradicts their approaches 1 and 2;
it is not used.
Units: parameters, tokens, FLOPs (C = 6 N D).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from model.cost import num_parameters
from recipes.schema import Model

E, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
OVER_TRAINED = (1, 2, 4, 8, 16, 32)  # times the tokens per parameter of least loss
WIDTH_PER_LAYER = (80, 176)  # hidden_size / num_hidden_layers: Llama 102 to 128, GPT-3 128
HEAD = 128


@dataclass(frozen=True)
class Allocation:
    """How a number of FLOPs is spent."""

    parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        """6 N D."""
        return 6 * self.parameters * self.tokens

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.parameters

    @property
    def loss(self) -> float:
        """Nats per token, by the fit."""
        return E + A / self.parameters**ALPHA + B / self.tokens**BETA


def best_allocation(flops: float) -> Allocation:
    """The least loss of `flops`: L has no slope along 6 N D = C there (Hoffmann, eq. 4)."""
    scale = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    parameters = scale * (flops / 6) ** (BETA / (ALPHA + BETA))
    return Allocation(parameters, flops / 6 / parameters)


def over_trained(best: Allocation, times: float) -> Allocation:
    """The same FLOPs with `times` the tokens per parameter: a smaller model, trained for longer."""
    return Allocation(best.parameters / times**0.5, best.tokens * times**0.5)


def flops_for_loss(loss: float, times: float) -> float:
    """FLOPs with which a model over-trained `times` reaches `loss`."""
    low, high = 1e12, 1e36
    for _ in range(200):
        middle = (low * high) ** 0.5
        reached = over_trained(best_allocation(middle), times).loss
        low, high = (middle, high) if reached > loss else (low, middle)
    return high


def table_rows(best: Allocation) -> list[list[str]]:
    """What over-training by k does to size, loss and the FLOPs for the same loss."""
    head = ["over-trained", "parameters", "tokens", "tokens per parameter", "loss"]
    rows = [[*head, "against the best", "FLOPs for the best loss"]]
    for times in OVER_TRAINED:
        one = over_trained(best, times)
        more = flops_for_loss(best.loss, times) / best.flops
        rows.append(
            [
                f"{times} x",
                f"{one.parameters:.3g}",
                f"{one.tokens:.3g}",
                f"{one.ratio:.3g}",
                f"{one.loss:.4f}",
                f"{one.loss - best.loss:+.4f}",
                f"{more:.2f} x",
            ]
        )
    return rows


def shape_with(parameters: float, like: Model) -> Model:
    """A decoder of about so many parameters, with the vocabulary and the kind of `like`.

    Widths are multiples of 2 heads of 128, from 16 heads on of 8, so that tensor parallelism can
    split them and products keep their best tiles; the MLP is 8/3 as wide, a multiple of 256.
    """
    share = max(1, like.num_attention_heads // like.num_key_value_heads)
    found, nearest = None, float("inf")
    for heads in (*range(2, 16, 2), *range(16, 257, 8)):
        hidden = HEAD * heads
        kv_heads = heads // share if heads % share == 0 else heads
        ffn = -(-8 * hidden // 3 // 256) * 256
        for layers in range(max(2, hidden // WIDTH_PER_LAYER[1]), hidden // WIDTH_PER_LAYER[0] + 2):
            model = dataclasses.replace(
                like,
                hidden_size=hidden,
                intermediate_size=ffn,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=None,
            )
            distance = abs(num_parameters(model) / parameters - 1)
            if distance < nearest:
                found, nearest = model, distance
    assert found is not None
    return found
