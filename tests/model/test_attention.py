"""Attention and rotary positions against formulas written out here."""

import math

import pytest
import torch

from model import attention as module
from model.attention import Attend, attention, document_starts, prepare, rotary_tables, rotate
from model.config import Rotary


def plain_attention(q, k, v, is_seen):
    """softmax(q k^T / sqrt(D)) v with a boolean (B, T, T), in fp64, head by head."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        query, key, value = (
            x.double() for x in (q[:, :, head], k[:, :, head // group], v[:, :, head // group])
        )
        scores = query @ key.transpose(1, 2) / math.sqrt(q.shape[-1])
        out[:, :, head] = scores.masked_fill(~is_seen, -math.inf).softmax(-1) @ value
    return out


def qkv(heads, kv_heads, rows=2, length=11, head_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


SEGMENTS = torch.tensor([[7] * 4 + [9] * 7, [1] * 1 + [2] * 5 + [1] * 5], dtype=torch.int32)
STARTS = torch.tensor([[0] * 4 + [4] * 7, [0] * 1 + [1] * 5 + [6] * 5])
BOUNDARIES = torch.tensor([0, 4, 11, 12, 17, 22, 22, 22], dtype=torch.int32)  # padded


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_attention_is_softmax_over_what_a_query_may_see(
    heads, kv_heads, has_documents, dtype, tolerance
):
    q, k, v = qkv(heads, kv_heads, dtype=dtype)
    places = torch.arange(11)
    is_seen = (places <= places[:, None]).expand(2, -1, -1)
    if has_documents:
        is_seen = is_seen & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
        is_seen[1, 6:, 0] = False  # id 1 comes back for a later document, which is another one
    like = torch.zeros(2, 11, 32, dtype=dtype)
    attend = prepare(like, 8, Rotary(10000.0), SEGMENTS if has_documents else None)
    assert (attend.mask is None) == (not has_documents)
    out = attention(q, k, v, attend)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), plain_attention(q, k, v, is_seen), rtol=tolerance, atol=tolerance
    )


def test_document_starts_from_segment_ids_and_from_padded_boundaries_agree():
    assert torch.equal(document_starts(SEGMENTS, None, 2, 11), STARTS)
    assert torch.equal(document_starts(None, BOUNDARIES, 2, 11), STARTS)


def test_positions_restart_at_each_document():
    like = torch.zeros(2, 11, 32)
    attend = prepare(like, 8, Rotary(10000.0), SEGMENTS)
    cos, sin = rotary_tables(torch.arange(11), 8, Rotary(10000.0), torch.float32)
    assert torch.equal(attend.cos[0, 4:], cos[:7])
    assert torch.equal(attend.sin[1, 1:6], sin[:5])


def test_rotary_turns_pairs_by_position_times_frequency():
    x = torch.randn(1, 5, 1, 4, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_tables(torch.arange(5), 4, Rotary(100.0), torch.float32)
    turned = rotate(x, cos, sin)
    for position in range(5):
        for pair, frequency in ((0, 1.0), (1, 0.1)):  # 100^(-2i/4)
            a, b = x[0, position, 0, pair].item(), x[0, position, 0, pair + 2].item()
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            assert turned[0, position, 0, pair].item() == pytest.approx(a * c - b * s, abs=1e-6)
            assert turned[0, position, 0, pair + 2].item() == pytest.approx(b * c + a * s, abs=1e-6)


def test_rotary_angles_are_exact_far_beyond_what_bf16_can_count():
    cos, _ = rotary_tables(torch.tensor([4095]), 4, Rotary(10000.0), torch.bfloat16)
    exact = [math.cos(4095), math.cos(40.95)] * 2
    torch.testing.assert_close(cos.flatten().float(), torch.tensor(exact), rtol=0, atol=2**-8)


@pytest.mark.parametrize("has_gqa_keyword", [True, False])
def test_the_variable_length_kernel_gets_flat_causal_documents(monkeypatch, has_gqa_keyword):
    """Its arguments, on any machine: the kernel itself needs CUDA."""
    seen = {}

    def kernel(q, k, v, bounds_q, bounds_k, longest_q, longest_k, **keywords):
        seen.update(
            keywords, shapes=[tuple(x.shape) for x in (q, k, v)], longest=(longest_q, longest_k)
        )
        assert bounds_q is bounds_k is BOUNDARIES
        return q

    monkeypatch.setattr(module, "varlen_attn", kernel)
    monkeypatch.setattr(module, "_VARLEN_HAS_GQA", has_gqa_keyword)
    q, k, v = qkv(4, 2)
    attend = Attend(None, None, cu_seqlens=BOUNDARIES, max_seqlen=7)
    assert torch.equal(attention(q, k, v, attend), q)
    assert seen["longest"] == (7, 7)
    assert seen["window_size"] == (-1, 0)
    kv_heads = 2 if has_gqa_keyword else 4
    assert seen["shapes"] == [(22, 4, 8), (22, kv_heads, 8), (22, kv_heads, 8)]
    assert seen.get("enable_gqa", False) == has_gqa_keyword


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length kernel needs CUDA")
def test_the_variable_length_kernel_equals_the_mask():
    q, k, v = (x.cuda() for x in qkv(4, 2, dtype=torch.bfloat16))
    like = torch.zeros(2, 11, 32, dtype=torch.bfloat16, device="cuda")
    kernel = prepare(like, 8, Rotary(10000.0), SEGMENTS.cuda(), BOUNDARIES.cuda(), 7)
    masked = prepare(like, 8, Rotary(10000.0), SEGMENTS.cuda())
    assert kernel.mask is None
    torch.testing.assert_close(
        attention(q, k, v, kernel), attention(q, k, v, masked), rtol=2e-2, atol=2e-2
    )
