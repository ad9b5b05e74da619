"""The arithmetic of model/cost.py against built models, hand-worked numbers and counted bytes."""

import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils._pytree import tree_leaves

from model import attention, cost, init, layers, loss, recompute
from model.config import DecoderConfig
from model.decoder import Decoder
from parallel.stages import balanced_bounds


def shape(vocab, hidden, inner, depth, heads, kv_heads, **others) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **others,
    )


ODD_SHAPES = [
    shape(101, 48, 77, 3, 6, 2),
    shape(7, 12, 5, 1, 3, 1, head_dim=10),
    shape(257, 40, 111, 2, 5, 5, tie_word_embeddings=True),
    shape(33, 64, 171, 4, 8, 1, qkv_bias=True),
    shape(33, 64, 171, 2, 4, 2, qk_norm=True, head_dim=6),
    shape(130, 56, 149, 5, 7, 7, qkv_bias=True, qk_norm=True, tie_word_embeddings=True),
    shape(2, 2, 1, 1, 1, 1),
]


@pytest.mark.parametrize("config", ODD_SHAPES)
def test_parameter_counts_equal_the_built_model(config):
    model = Decoder(config)
    counted = cost.parameters(config)

    def count(parameters):
        return sum(parameter.numel() for parameter in parameters)

    assert cost.num_parameters(config) == counted.total == count(model.parameters())
    assert counted.embedding == count(model.model.embed_tokens.parameters())
    head = 0 if config.tie_word_embeddings else count(model.lm_head.parameters())
    assert counted.head == head
    assert counted.block == count(model.model.layers[0].parameters())
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
    assert counted.norms == count(norms)


def test_published_models_have_their_published_sizes():
    llama_2_7b = shape(32000, 4096, 11008, 32, 32, 32)
    qwen3_0_6b = shape(
        151936, 1024, 3072, 28, 16, 8, head_dim=128, qk_norm=True, tie_word_embeddings=True
    )
    assert cost.num_parameters(llama_2_7b) == 6_738_415_616
    assert cost.num_parameters(qwen3_0_6b) == 596_049_920


HAND = shape(100, 32, 80, 2, 4, 2, max_position_embeddings=64)


def test_flops_of_a_model_worked_out_by_hand():
    """4 query heads, 2 key/value heads, head_dim 8, gated MLP, 2 layers, 64 tokens."""
    q, k, v, o = 32 * 32, 32 * 16, 32 * 16, 32 * 32  # 1024 + 512 + 512 + 1024 = 3072
    mlp = 3 * 32 * 80  # 7680
    matrices = 2 * (q + k + v + o + mlp) + 100 * 32  # 2 * 10752 + 3200 = 24704
    scores_and_values = 2 * 2 * (2 * 4 * 8 * 64)  # layers * (q k^T and p v) * multiply-adds
    assert matrices == 24704
    forward = 2 * matrices + scores_and_values
    assert cost.flops_per_token(HAND, 64) == 3 * forward == 197376
    assert cost.flops_per_token(HAND, 64, "6n") == 6 * (24704 + 3200 + 5 * 32)


def test_tying_the_head_leaves_the_work_and_the_embedding_lookup_is_free():
    tied = shape(100, 32, 80, 2, 4, 2, tie_word_embeddings=True)
    assert cost.flops_per_token(tied, 64) == cost.flops_per_token(HAND, 64)


def test_forward_flops_equal_those_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = Decoder(HAND)
    init.fill(model, 0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.long))
    # Torch has no count for the CPU's attention kernel; it is the 12 L A D T term.
    products = cost.flops_per_token(HAND, 0) // 3 * 64
    attended = (cost.flops_per_token(HAND, 64) - cost.flops_per_token(HAND, 0)) // 3 * 64
    assert counter.get_total_flops() in (products, products + attended)


def saved_bytes(model, micro_batch, length):
    """Unique storages that autograd keeps between forward and backward, without parameters."""
    storages = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = (
                tensor,
                storage.nbytes(),
            )  # kept alive: addresses stay unique
        return tensor

    inputs = torch.zeros(micro_batch, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs, labels=inputs)
    return sum(size for _, size in storages.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        shape(64, 64, 160, 3, 4, 2),
        shape(64, 48, 100, 2, 4, 4, head_dim=20, qk_norm=True, qkv_bias=True),
        shape(64, 64, 160, 3, 4, 2, hidden_act="gelu"),
        shape(64, 64, 160, 3, 4, 2, hidden_act="relu2"),
    ],
)
def test_activation_bytes_are_those_autograd_saves(monkeypatch, config, precision):
    # A GPU multiplies bf16 as it is; this CPU may keep fp32 copies, which the formula leaves out.
    for module in (layers, attention, loss):
        monkeypatch.setattr(module, "product_dtype", lambda tensor: tensor.dtype)
    model = Decoder(config)
    init.fill(model, 0)
    width = cost.BYTES[precision]
    model.to(torch.float32 if precision == "fp32" else torch.bfloat16)
    head_gradient = width * config.vocab_size * config.hidden_size  # part of the workspace
    counted = {rows: saved_bytes(model, rows, 96) - head_gradient for rows in (1, 2, 4)}
    for rows, size in counted.items():
        expected = cost.activation_bytes(config, rows, 96, precision).saved
        assert expected == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("how", ["none", "selective", "full", "every-2"])
def test_activation_bytes_are_linear_in_the_micro_batch(how):
    one, two, four = (
        cost.activation_bytes(HAND, rows, 64, recompute=how).saved for rows in (1, 2, 4)
    )
    assert four == 2 * two == 4 * one


def test_recompute_keeps_block_inputs_and_one_block():
    config = shape(64, 64, 160, 6, 4, 2)
    model = Decoder(config)
    init.fill(model, 0)
    head_gradient = 4 * 64 * 64
    per_block = cost.activation_bytes(config, 2, 96, "fp32").saved
    per_block -= cost.activation_bytes(shape(64, 64, 160, 5, 4, 2), 2, 96, "fp32").saved
    model.recompute = "full"
    between = saved_bytes(model, 2, 96) - head_gradient  # before any block is run again
    expected = cost.activation_bytes(config, 2, 96, "fp32", recompute="full").saved
    assert expected == pytest.approx(between + per_block, rel=0.02)
    with pytest.raises(ValueError):
        cost.activation_bytes(config, 2, 96, "fp32", recompute="some")
    with pytest.raises(ValueError):
        cost.flops_per_token(config, 96, "8n")


def test_every_second_block_keeps_its_input_and_the_others_all():
    config = shape(64, 64, 160, 6, 4, 2)
    sizes = {
        how: cost.activation_bytes(config, 2, 96, "fp32", recompute=how).saved
        for how in ("none", "full", "every-1", "every-2", "every-6")
    }
    assert sizes["every-1"] == sizes["full"] < sizes["every-2"] < sizes["every-6"] < sizes["none"]
    with pytest.raises(ValueError):
        cost.blocks_recomputed("every-0", 6)


def test_selective_recomputation_keeps_products_and_attention(monkeypatch):
    config = shape(64, 64, 160, 3, 4, 2)
    model = Decoder(config)
    init.fill(model, 0)
    model.recompute = "selective"
    made = []
    real = recompute.create_selective_checkpoint_contexts
    monkeypatch.setattr(
        recompute,
        "create_selective_checkpoint_contexts",
        lambda policy: made.append(real(policy)) or made[-1],
    )
    between = saved_bytes(model, 2, 96) - 4 * 64 * 64
    kept = [
        getattr(leaf, "val", leaf)
        for forward, _ in made
        for outputs in forward.storage.values()
        for leaf in tree_leaves(list(outputs.values()))
    ]
    sizes = sum(leaf.nbytes for leaf in kept if isinstance(leaf, torch.Tensor))
    block = cost.activation_bytes(config, 2, 96, "fp32", recompute="full").saved
    block -= between  # of which `between` keeps the inputs
    expected = cost.activation_bytes(config, 2, 96, "fp32", recompute="selective").saved
    assert expected == pytest.approx(between + sizes + block, rel=0.02)


def test_workspace_holds_a_chunk_of_logits_and_never_all_of_them():
    config = shape(128256, 4096, 14336, 32, 32, 8)
    many = cost.activation_bytes(config, 8, 8192)
    assert many.workspace == cost.activation_bytes(config, 1, 8192).workspace
    all_logits = 8 * 8192 * 128256 * 4
    assert 128256 * 4096 * 4 < many.workspace < all_logits / 4
    assert many.total == many.saved + many.workspace


@pytest.mark.parametrize("kind", [numpy.int16, numpy.int32, numpy.int64, numpy.uint32])
def test_numbers_of_numpy_do_not_overflow(kind):
    sizes = dict(vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    sizes |= dict(num_attention_heads=64, num_key_value_heads=8)
    others = dict(head_dim=None, tie_word_embeddings=False, qkv_bias=False, qk_norm=False)
    plain = SimpleNamespace(**sizes, **others)
    given = SimpleNamespace(**{name: kind(size) for name, size in sizes.items()}, **others)
    assert cost.num_parameters(given) == cost.num_parameters(plain) == 68_976_648_192
    assert cost.flops_per_token(given, kind(8192)) == cost.flops_per_token(plain, 8192)
    for recompute_ in ("none", "selective", "full", "every-2"):
        found = cost.activation_bytes(given, kind(64), kind(8192), recompute=recompute_)
        assert found == cost.activation_bytes(plain, 64, 8192, recompute=recompute_)
    assert cost.parameters(given) == cost.parameters(plain)
    assert cost.head_dim(given) == 128
    assert balanced_bounds(given, 8192, 8) == balanced_bounds(plain, 8192, 8)


def test_a_size_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError):
        cost.num_parameters(SimpleNamespace(**vars(HAND) | {"hidden_size": 32.5}))


def test_cost_imports_no_torch():
    code = "import model.cost, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
