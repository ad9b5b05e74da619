"""The decoder against Hugging Face's Llama, Qwen2 and Qwen3 with the same weights, and its own
promises.
"""

import copy

import numpy
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from model import init
from model.config import DecoderConfig, hf_config
from model.decoder import Decoder, compile_blocks

SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
SHAPES = {
    "grouped heads": {},
    "as many kv heads": {"num_key_value_heads": 4},
    "one kv head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "wide heads, other base": {"head_dim": 20, "rope_theta": 500000.0, "num_hidden_layers": 3},
    "qwen2": {"qkv_bias": True},
    "qwen2, tied": {"qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 16, "rms_norm_eps": 1e-6},
    "gelu": {"hidden_act": "gelu"},
    "squared relu, qwen2": {"hidden_act": "relu2", "qkv_bias": True},
    "hidden size is no multiple of heads": {"hidden_size": 42, "head_dim": 12, "qk_norm": True},
}


def build(seed: int = 0, **changes) -> Decoder:
    model = Decoder(DecoderConfig(**SHAPE | changes))
    init.fill(model, seed)
    return model


def batch(rows: int = 2, length: int = 24, seed: int = 0):
    tokens = torch.randint(
        0, SHAPE["vocab_size"], (rows, length + 1), generator=torch.Generator().manual_seed(seed)
    )
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def documents(rows: int, *lengths: int) -> torch.Tensor:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ids.int().expand(rows, -1).contiguous()


def peer_of(model: Decoder) -> PreTrainedModel:
    """Hugging Face's own implementation with random weights, copied into `model`."""
    exported = hf_config(model.config)
    peer = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(exported.pop("model_type"), **exported)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            is_norm = name.endswith("norm.weight")
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if is_norm else 0.0))
    model.load_state_dict(peer.state_dict(), strict=True)
    return peer


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_loss_and_gradients_equal_hugging_face(changes):
    model = build(**changes)
    peer = peer_of(model)
    inputs, labels = batch()
    torch.testing.assert_close(
        model(inputs).logits, peer(input_ids=inputs).logits, rtol=1e-5, atol=1e-5
    )

    loss = model(inputs, labels=labels).loss
    # Transformers shifts labels itself; prepending one column undoes that.
    ours_as_theirs = torch.cat((inputs[:, :1], labels), dim=1)[:, :-1]
    their_loss = peer(input_ids=inputs, labels=ours_as_theirs, shift_labels=labels).loss
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    loss.backward()
    their_loss.backward()
    theirs = dict(peer.named_parameters())
    assert {name for name, _ in model.named_parameters()} == theirs.keys()
    for name, parameter in model.named_parameters():
        scale = theirs[name].grad.abs().max()
        torch.testing.assert_close(
            parameter.grad / scale, theirs[name].grad / scale, rtol=0, atol=2e-5, msg=name
        )


@pytest.mark.parametrize("tied", [False, True])
def test_state_dict_loads_strictly_into_llama_and_back(tied):
    model = build(tie_word_embeddings=tied)
    exported = hf_config(model.config)
    assert exported["architectures"] == ["LlamaForCausalLM"]
    llama = LlamaForCausalLM(LlamaConfig(**exported))
    llama.load_state_dict(model.state_dict(), strict=True)
    again = build(seed=1, tie_word_embeddings=tied)
    again.load_state_dict(llama.state_dict(), strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_save_pretrained_and_from_pretrained_keep_every_weight(tmp_path):
    model = build(tie_word_embeddings=True, qk_norm=True)
    model.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    assert again.config.rope_theta == model.config.rope_theta
    inputs, _ = batch()
    assert torch.equal(again(inputs).logits, model(inputs).logits)


def test_changing_one_document_leaves_the_logits_of_the_other_unchanged():
    model = build()
    inputs, _ = batch(length=20)
    segments = documents(2, 8, 12)
    changed = inputs.clone()
    changed[:, :8] = (changed[:, :8] + 1) % SHAPE["vocab_size"]
    before, after = (model(x, segment_ids=segments).logits for x in (inputs, changed))
    assert torch.equal(before[:, 8:], after[:, 8:])
    assert not torch.equal(before[:, :8], after[:, :8])
    across = model(inputs).logits, model(changed).logits
    assert (across[0] - across[1])[:, 8:].abs().max() > 1e-4


def test_each_document_gets_the_logits_it_would_get_alone():
    model = build(qk_norm=True)
    inputs, _ = batch(length=20)
    packed = model(inputs, segment_ids=documents(2, 5, 1, 14)).logits
    for start, stop in ((0, 5), (5, 6), (6, 20)):
        alone = model(inputs[:, start:stop]).logits
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-6, atol=1e-6)


def test_gradients_stay_inside_documents():
    model = build(num_hidden_layers=1)
    inputs, labels = batch(rows=1, length=20)
    inputs[:, :8], inputs[:, 8:] = 3, 5  # two words, one per document
    labels[:, :8] = -100
    model(inputs, segment_ids=documents(1, 8, 12), labels=labels).loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient[5].abs().max() > 0
    assert gradient[3].abs().max() == 0


def test_runs_in_bf16_close_to_fp32():
    model = build()
    inputs, labels = batch()
    segments = documents(2, 10, 14)
    wide = model(inputs, segment_ids=segments, labels=labels).loss
    narrow = copy.deepcopy(model).bfloat16()
    loss = narrow(inputs, segment_ids=segments, labels=labels).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert narrow(inputs).logits.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(wide.item(), rel=1e-3)
    assert all(
        p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in narrow.parameters()
    )


def test_recompute_runs_each_block_twice_and_changes_no_gradient():
    inputs, labels = batch()
    gradients, calls = {}, {}
    for recompute in ("none", "full"):
        model = build()
        model.recompute = recompute
        calls[recompute] = [0, 0]

        def count(block, args, seen=calls[recompute], layers=model.model.layers):
            seen[list(layers).index(block)] += 1

        for block in model.model.layers:
            block.register_forward_pre_hook(count)
        model(inputs, segment_ids=documents(2, 10, 14), labels=labels).loss.backward()
        gradients[recompute] = [parameter.grad for parameter in model.parameters()]
    assert calls == {"none": [1, 1], "full": [2, 2]}
    assert all(torch.equal(a, b) for a, b in zip(*gradients.values(), strict=True))


def test_recompute_is_not_paid_for_in_evaluation_and_unknown_values_are_refused():
    model = build()
    model.recompute = "full"
    with torch.no_grad():
        assert model(batch()[0], labels=batch()[1]).loss.grad_fn is None
    with pytest.raises(ValueError) as error:
        model.recompute = "some"
    assert "recompute='some'" in str(error.value)


def test_blocks_compile_whole_once_and_give_the_same_gradients():
    torch._dynamo.reset()
    model = build(num_hidden_layers=3)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled.model.layers, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    segments = documents(2, 10, 14)
    for seed in (0, 1):
        inputs, labels = batch(seed=seed)
        for one in (model, compiled):
            one.zero_grad()
            one(inputs, segment_ids=segments, labels=labels).loss.backward()
        for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_bf16_blocks_compile_whole():
    torch._dynamo.reset()
    model = build(num_hidden_layers=1, qk_norm=True, qkv_bias=True).bfloat16()
    compile_blocks(model.model.layers, backend="aot_eager")
    inputs, labels = batch()
    model.recompute = "full"
    model(inputs, labels=labels).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_there_is_no_buffer_that_could_lose_precision_or_be_saved():
    model = build(qk_norm=True, qkv_bias=True)
    assert list(model.buffers()) == []
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters(remove_duplicate=False)}


def test_head_counts_follow_the_width_of_the_projections():
    """Tensor parallelism relies on this: half of the heads give half of the output projection's
    sum.
    """
    whole = build(num_hidden_layers=1)
    attention = whole.model.layers[0].self_attn
    seen = {}
    attention.register_forward_hook(lambda _, args, out: seen.update(args=args, out=out))
    whole(batch()[0])
    total = torch.zeros_like(seen["out"])
    for half in (0, 1):
        part = copy.deepcopy(attention)
        part._forward_hooks.clear()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(attention, name).weight
            getattr(part, name).weight = torch.nn.Parameter(weight.chunk(2, dim=0)[half])
        part.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight.chunk(2, dim=1)[half])
        total += part(*seen["args"])
    torch.testing.assert_close(total, seen["out"], rtol=1e-5, atol=1e-6)


def test_illegal_shapes_are_refused_all_at_once_with_the_way_out():
    with pytest.raises(ValueError) as error:
        DecoderConfig(**SHAPE | {"num_key_value_heads": 3, "hidden_size": 50, "rope_theta": 0})
    message = str(error.value)
    assert "hidden_size=50 is not a multiple of num_attention_heads=4; nearest: 48 or 52" in message
    assert (
        "num_key_value_heads=3 does not divide num_attention_heads=4; legal: [1, 2, 4]" in message
    )
    assert "rope_theta=0 is not above 0" in message
    for changes, part in (
        ({"head_dim": 7}, "head_dim=7 is not an even number"),
        ({"hidden_size": 36}, "head_dim=9 is not an even number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a whole number >= 1"),
        ({"vocab_size": 97.0}, "vocab_size=97.0 is not a whole number >= 1"),
        ({"hidden_act": "tanh"}, "hidden_act='tanh' is not one of silu, gelu, relu2"),
    ):
        with pytest.raises(ValueError) as error:
            DecoderConfig(**SHAPE | changes)
        assert part in str(error.value)


def test_export_names_the_family_and_refuses_what_none_has():
    families = {
        changes: hf_config(DecoderConfig(**SHAPE, **dict(changes)))["model_type"]
        for changes in ((), (("qkv_bias", True),), (("qk_norm", True),))
    }
    assert list(families.values()) == ["llama", "qwen2", "qwen3"]
    with pytest.raises(ValueError) as error:
        hf_config(DecoderConfig(**SHAPE, qkv_bias=True, qk_norm=True))
    assert "no Hugging Face counterpart" in str(error.value)
    uneven = DecoderConfig(**SHAPE | {"hidden_size": 42, "head_dim": 12})
    with pytest.raises(ValueError, match="hidden_size=42 is not a multiple of num_attention"):
        hf_config(uneven)


def test_sizes_of_numpy_are_those_of_python():
    sizes = {name: numpy.int32(size) for name, size in SHAPE.items()}
    config = DecoderConfig(**sizes, head_dim=numpy.int64(8))
    assert {type(getattr(config, name)) for name in (*SHAPE, "head_dim")} == {int}
    assert "hidden_size" in config.to_json_string()
