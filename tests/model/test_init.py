"""Initial weights as a function of seed and name alone."""

import hashlib
import math

import pytest
import torch

from model import init
from model.config import DecoderConfig
from model.decoder import Decoder

CONFIG = DecoderConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    qkv_bias=True,
    qk_norm=True,
)


def weights(seed=0, config=CONFIG):
    model = Decoder(config)
    init.fill(model, seed)
    return model, dict(model.named_parameters())


def test_every_weight_has_its_documented_distribution():
    _, named = weights()
    for name, value in named.items():
        if name.endswith("norm.weight"):
            assert torch.all(value == 1), name
        elif name.endswith(".bias"):
            assert torch.all(value == 0), name
        else:
            is_output = "o_proj" in name or "down_proj" in name
            expected = 0.02 / math.sqrt(2 * 3) if is_output else 0.02
            # Five standard errors of a standard deviation and of a mean.
            tolerance = 5 / math.sqrt(2 * value.numel())
            assert value.std().item() == pytest.approx(expected, rel=tolerance), name
            assert abs(value.mean().item()) < 5 * expected / math.sqrt(value.numel()), name


def test_a_weight_depends_on_seed_and_name_and_on_nothing_else():
    _, named = weights()
    torch.rand(7)  # the global generator is not used
    for name in reversed(list(named)):
        alone = init.initial_weight(name, tuple(named[name].shape), 0, CONFIG)
        assert torch.equal(alone, named[name]), name
    _, other = weights(seed=1)
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(named[first], other[first])
    assert not torch.equal(named[first], named[second])


def test_the_seed_of_a_block_is_the_documented_hash():
    digest = hashlib.sha256(b"1234|lm_head.weight|2").digest()
    expected = int.from_bytes(digest[:8], "big") % 2**63
    assert init.block_seed(1234, "lm_head.weight", 2) == expected
    generator = torch.Generator().manual_seed(expected)
    block = torch.empty(256, 64).normal_(0.0, 0.02, generator=generator)
    whole = init.initial_weight("lm_head.weight", (1000, 64), 1234, CONFIG)
    assert torch.equal(whole[512:768], block)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(100, 700), slice(256, 512), slice(999, None)])
def test_rows_drawn_alone_equal_the_rows_of_the_whole(rows):
    whole = init.initial_weight("lm_head.weight", (1000, 64), 3, CONFIG)
    part = init.initial_weight("lm_head.weight", (1000, 64), 3, CONFIG, rows=rows)
    assert torch.equal(part, whole[rows])


def test_rows_outside_or_of_another_step():
    assert init.initial_weight("lm_head.weight", (1000, 64), 3, CONFIG, slice(4, 4)).shape == (
        0,
        64,
    )
    assert init.initial_weight("model.norm.weight", (64,), 3, CONFIG, slice(0, 9)).shape == (9,)
    with pytest.raises(ValueError) as error:
        init.initial_weight("lm_head.weight", (1000, 64), 3, CONFIG, slice(0, 9, 2))
    assert "only step 1" in str(error.value)


def test_a_parameter_of_unknown_kind_is_refused():
    with pytest.raises(ValueError) as error:
        init.initial_weight("router.scale", (4,), 0, CONFIG)
    assert "router.scale of shape (4,)" in str(error.value)


def test_tied_weights_are_written_once_and_stay_tied(monkeypatch):
    config = DecoderConfig(**CONFIG.to_dict() | {"tie_word_embeddings": True})
    drawn, draw = [], init.initial_weight

    def counted(name, *arguments):
        drawn.append(name)
        return draw(name, *arguments)

    monkeypatch.setattr(init, "initial_weight", counted)
    model, named = weights(config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert drawn.count("model.embed_tokens.weight") == 4  # blocks of 256 of its 1,000 rows
    assert "lm_head.weight" not in drawn
    embedding = draw("model.embed_tokens.weight", (1000, 64), 0, config)
    assert torch.equal(named["model.embed_tokens.weight"], embedding)


def test_bf16_weights_are_the_rounded_fp32_ones():
    _, named = weights()
    model = Decoder(CONFIG).bfloat16()
    init.fill(model, 0)
    for name, value in model.named_parameters():
        assert torch.equal(value, named[name].bfloat16()), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_near_the_log_of_the_vocabulary(tied):
    config = DecoderConfig(**CONFIG.to_dict() | {"tie_word_embeddings": tied})
    model, _ = weights(config=config)
    tokens = torch.randint(0, 1000, (4, 65), generator=torch.Generator().manual_seed(0))
    value = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).loss.item()
    assert value == pytest.approx(math.log(1000), rel=0.01)
