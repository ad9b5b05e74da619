"""Copies of weights that drift apart: every flipped bit, the first weight, the ranks."""

from __future__ import annotations

import pytest
import torch
from rank_threads import run_threads

from checkpoint.save.replicas import Replica, differing, digests, locate, summary, word_sum

STAGE = "pipeline stage 0"


def weights(dtype=torch.float32):
    """Three weights of a rank, as it holds them."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"first": (5, 3), "norm": (7,), "last": (2, 9)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def held(tensors, holders=STAGE):
    return [Replica(name, holders, tensor) for name, tensor in tensors.items()]


def flip(tensor, element, bit):
    """One bit of one element, in place."""
    integers = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
    width = 8 * tensor.element_size()
    integers[element] ^= (1 << bit) - ((1 << width) if bit == width - 1 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flipped_bit_changes_the_digest_by_either_way(dtype):
    tensor = weights(dtype)["first"]
    ways = (lambda: digests(held({"first": tensor}))[0], lambda: int(word_sum(tensor)))
    before = [way() for way in ways]
    for element in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert all(way() != was for way, was in zip(ways, before, strict=True))
            flip(tensor, element, bit)
    assert [way() for way in ways] == before


def test_the_sum_sees_where_a_value_is():
    tensor = weights()["last"]
    assert int(word_sum(tensor)) != int(word_sum(tensor.flip(1)))
    assert int(word_sum(tensor)) == int(word_sum(tensor.clone()))


def found_among(ranks):
    """(holders that differ, what `locate` found), the same on every rank; ranks: replicas each."""

    def one(comm):
        own = ranks[comm.rank]
        holders = differing(comm.exchange(summary(own), "test"))
        return holders, locate(own, holders, comm) if holders else []

    results = run_threads(len(ranks), one)
    assert all(result == results[0] for result in results)
    return results[0]


def test_equal_copies_say_nothing():
    assert found_among([held(weights())] * 3) == ([], [])


def test_the_rank_that_differs_and_its_first_weight_are_named():
    odd = weights()
    flip(odd["norm"], 3, 11)
    flip(odd["last"], 0, 31)
    holders, (drift,) = found_among([held(weights()), held(odd), held(weights())])
    assert holders == [STAGE]
    assert (drift.parameter, drift.more, drift.ranks) == ("norm", 1, (1,))
    assert "norm and 1 other weights differ" in str(drift)
    assert "rank 1" in str(drift)


def test_of_two_that_differ_none_is_believed():
    odd = weights()
    flip(odd["first"], 0, 0)
    _, (drift,) = found_among([held(odd), held(weights())])
    assert drift.ranks == (0, 1)


def test_only_ranks_with_the_same_holders_are_compared():
    """Tensor ranks hold other parts of a weight; tied ones lie on two pipeline stages."""
    other = {name: tensor + 1 for name, tensor in weights().items()}
    tied = {"embedding": torch.ones(3)}
    ranks = [
        held(weights(), "stage 0, tensor 0") + held(tied, "tied"),
        held(other, "stage 0, tensor 1"),
        held(weights(), "stage 0, tensor 0"),
        held(tied, "tied"),
    ]
    assert found_among(ranks) == ([], [])
    drifted = {"embedding": torch.tensor([1.0, 1.0, 1.5])}
    holders, (drift,) = found_among([*ranks[:3], held(drifted, "tied")])
    assert holders == ["tied"]
    assert (drift.parameter, drift.ranks) == ("embedding", (0, 3))
