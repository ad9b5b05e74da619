"""The chunked cross-entropy against the plain one over all logits, and its memory."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import cost, loss
from model.loss import Head, cross_entropy

TOKENS, HIDDEN, VOCAB = 75, 16, 51


def inputs(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=generator) * scale).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::4] = loss.IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden, weight, labels, num_items):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / num_items


@pytest.fixture
def chunks_of_20(monkeypatch):
    """Three whole chunks and a part."""
    monkeypatch.setitem(cost.CHUNK_LOGITS, "cpu", 20 * VOCAB)


@pytest.mark.usefixtures("chunks_of_20")
@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["", "logits beyond exp's range"])
def test_loss_and_gradients_equal_the_plain_form(scale):
    ours, theirs = inputs(scale=scale), inputs(scale=scale)
    mine = cross_entropy(*ours, num_items=37) * 3.0  # an upstream factor, as accumulation applies
    other = plain(*theirs, 37) * 3.0
    assert mine.item() == pytest.approx(other.item(), rel=1e-6)
    mine.backward()
    other.backward()
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6 * b.grad.abs().max().item())


@pytest.mark.usefixtures("chunks_of_20")
def test_gradients_accumulate_over_micro_batches():
    hidden, weight, labels = inputs()
    for rows in (slice(0, 30), slice(30, TOKENS)):
        cross_entropy(hidden[rows], weight, labels[rows], num_items=56).backward()
    whole = inputs()
    plain(*whole, 56).backward()
    torch.testing.assert_close(weight.grad, whole[1].grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(hidden.grad, whole[0].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("chunks_of_20")
def test_bf16_gradients_are_within_one_rounding_of_the_exact_ones():
    ours, exact = inputs(torch.bfloat16), inputs(torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in exact[:2]]
    cross_entropy(*ours).backward()
    F.cross_entropy(wide[0] @ wide[1].t(), exact[2], ignore_index=-100).backward()
    for a, b in zip(ours[:2], wide, strict=True):
        assert a.grad.dtype == torch.bfloat16
        assert (a.grad.double() - b.grad).abs().max() <= 2**-7 * b.grad.abs().max()


@pytest.mark.usefixtures("chunks_of_20")
def test_default_number_of_items_is_the_targets_and_without_targets_the_loss_is_zero():
    hidden, weight, labels = inputs()
    mean = F.cross_entropy(F.linear(hidden, weight), labels, ignore_index=-100)
    assert cross_entropy(hidden, weight, labels).item() == pytest.approx(mean.item(), rel=1e-6)
    count = torch.tensor(int((labels != -100).sum()))
    assert cross_entropy(hidden, weight, labels, count).item() == pytest.approx(
        mean.item(), rel=1e-6
    )
    nothing = cross_entropy(hidden, weight, torch.full_like(labels, -100))
    nothing.backward()
    assert nothing.item() == 0
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


@pytest.mark.usefixtures("chunks_of_20")
def test_evaluation_gives_the_same_loss_without_the_two_gradient_products():
    hidden, weight, labels = inputs()
    with Products() as training:
        trained = cross_entropy(hidden, weight, labels)
    with torch.no_grad(), Products() as evaluation:
        evaluated = cross_entropy(hidden, weight, labels)
    assert evaluated.item() == pytest.approx(trained.item(), rel=1e-6)
    assert (training.count, evaluation.count) == (12, 4)  # 4 chunks


@pytest.mark.usefixtures("chunks_of_20")
def test_a_second_backward_is_refused_rather_than_wrong():
    value = cross_entropy(*inputs()) * 2.0
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        value.backward()


@pytest.mark.usefixtures("chunks_of_20")
@pytest.mark.parametrize("has_gradients", [True, False])
def test_no_tensor_of_the_size_of_all_logits_is_ever_made(has_gradients):
    hidden, weight, labels = inputs()
    with torch.set_grad_enabled(has_gradients), Products() as seen:
        value = cross_entropy(hidden, weight, labels)
        if has_gradients:
            value.backward()
    assert 20 * VOCAB <= seen.largest < TOKENS * VOCAB / 2


def test_head_gives_logits_without_labels_and_the_loss_with_them():
    head = Head(HIDDEN, VOCAB)
    hidden, weight, labels = inputs()
    head.weight.data.copy_(weight.data)
    torch.testing.assert_close(head(hidden), F.linear(hidden, weight))
    assert head(hidden, labels).item() == pytest.approx(
        cross_entropy(hidden, weight, labels).item()
    )
    assert list(head.state_dict()) == ["weight"]


class Products(TorchDispatchMode):
    """Counts matrix products, and the elements of the largest tensor any operation returned."""

    def __init__(self):
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out
