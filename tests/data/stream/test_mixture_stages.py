"""Weights that change over time: exact at every prefix, invertible, and bound to data steps."""

import time

import numpy as np
import pytest
from small_corpora import counting_document, random_documents, stream_of, write_corpus

from base.errors import UserError
from data.stream.mixture import Mixture, Stages
from recipes.schema import Skip, Source

WEIGHTS = [
    (0, {"a": 3, "b": 1}),
    (1000, {"a": 0, "b": 1, "c": 2}),
    (1000, {"a": 1, "b": 1, "c": 1}),  # begins where the one before does: that one is empty
    (1777, {"b": 1}),
    (1801, {"a": 1, "c": 1e-3}),
]


def test_stages_continue_each_source_where_it_stopped():
    """Against counting: the n-th time a source is drawn is its draw n, whatever rests."""
    stages = Stages(WEIGHTS)
    samples = np.arange(200_000)
    source, draw = stages.locate(samples)
    for number in range(3):
        mine = samples[source == number]
        assert np.array_equal(draw[source == number], np.arange(len(mine)))
        assert np.array_equal(stages.sample(np.full(len(mine), number), np.arange(len(mine))), mine)
    for prefix in (0, 1, 999, 1000, 1001, 1777, 1790, 1801, 150_000):
        assert (
            stages.draws_before(prefix).tolist()
            == np.bincount(source[:prefix], minlength=3).tolist()
        )
    assert set(source[:1000]) == {0, 1}
    assert set(source[1777:1801]) == {1}
    assert (stages.sample(np.array([1]), np.array([10**6])) == -1).all()  # b rests for ever


def test_each_stage_is_a_mixture_from_its_first_sample_on():
    stages = Stages(WEIGHTS)
    source, _ = stages.locate(np.arange(1000, 1777))
    inner, _ = Mixture({"a": 1, "b": 1, "c": 1}).locate(np.arange(777))
    assert np.array_equal(source, inner)


def test_one_stage_is_the_mixture_itself():
    weights = {"b": 2, "a": 5, "zero": 0}
    one, plain = Stages([(0, weights)]), Mixture(weights)
    samples = np.arange(0, 10**12, 10**8 + 7)
    assert np.array_equal(one.locate(samples), plain.locate(samples))
    assert one.fingerprint() == plain.fingerprint()
    assert one.uids == plain.uids


def test_the_past_is_what_began_before():
    one, two = Stages(WEIGHTS), Stages([*WEIGHTS[:3], (1801, {"a": 1})])
    assert one.past(1777) == two.past(1777)
    assert one.past(1778) != two.past(1778)
    assert Stages([(0, {"a": 1, "new": 0})]).past(5) == Stages([(0, {"a": 2})]).past(5)


def test_a_thousand_sources_are_built_quickly_and_spread_evenly():
    weights = {f"s{i:04d}": 1 + (i * 7919) % 1000 for i in range(1000)}
    began = time.process_time()
    stages = Stages([(0, weights)])
    assert time.process_time() - began < 1  # the goal is 0.2 s on an idle machine
    samples = np.arange(stages.mixtures[0].period)
    source, draw = stages.locate(samples)
    ideal = samples * stages.mixtures[0].counts[source] / stages.mixtures[0].period
    assert np.abs(draw - ideal).max() <= 3


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate(("prose", "code")):
        write_corpus(root / name, random_documents(150, 3, 50, seed=seed))
    write_corpus(root / "small", [counting_document(16 * 3)])
    write_corpus(root / "long", [counting_document(99)], [counting_document(98)])
    return root


def test_a_stage_begins_at_its_data_step_and_keeps_the_past(root):
    """Prose in data steps 0 to 4, code from 5 on; asked from the middle as from the start."""
    staged = {
        "prose": Source(corpus="prose", weight=((0, 1), (5, 0))),
        "code": Source(corpus="code", weight=((0, 0), (5, 1))),
    }
    counts = [stream_of(root, staged).step(step, 0, 1, 8).source_counts for step in range(1, 11)]
    assert counts == [{"code": 0, "prose": 8}] * 5 + [{"code": 8, "prose": 0}] * 5
    resumed = stream_of(root, staged)
    assert [resumed.step(step, 0, 1, 8).source_counts for step in (6, 5, 4)] == [
        counts[5],
        counts[4],
        counts[3],
    ]
    plain = stream_of(root, {"prose": 1})
    for step in range(1, 6):
        one, two = (s.step(step, 0, 1, 8).micro_batches[0] for s in (resumed, plain))
        assert np.array_equal(one.sample_hashes, two.sample_hashes)
    assert stream_of(root, {"prose": 1}).past(5)["mixture"] == resumed.past(5)["mixture"]
    assert stream_of(root, {"prose": 1}).past(6)["mixture"] != resumed.past(6)["mixture"]
    usage = {use.uid: (use.share, use.stages) for use in resumed.usage(10)}
    assert usage["prose"] == (0.5, ((0, 1.0), (5, 0.0)))


def test_a_stage_begins_with_a_whole_window(root):
    staged = {
        "prose": Source(corpus="prose", weight=((0, 1), (1, 0))),
        "code": Source(corpus="code", weight=((0, 0), (1, 1))),
    }
    stream = stream_of(root, staged, batch=2, window_tokens=64)  # two of a window's four samples
    counts = [stream.step(step, 0, 1, 2).source_counts["prose"] for step in range(1, 5)]
    assert counts == [2, 2, 0, 0]


WARMUP = [(0, 4), (3, 8), (9, 16)]


def test_a_warm_up_of_the_sequence_length_moves_nothing(root):
    """Cut to 4, 8, then whole, on a ramp of batches, with data left out, in windows of 32."""
    sources, skip = {"prose": 3, "code": 1}, Skip(advance=((4, 6),))
    knobs = dict(batch=[[0, 64], [5, 128]], window_tokens=32, skip=skip)
    plain, warm = (
        stream_of(root, sources, **knobs),
        stream_of(root, sources, warmup=WARMUP, **knobs),
    )
    for step in range(1, 13):
        for data_size in (1, 2):
            for rank in range(data_size):
                one, two = (s.step(step, rank, data_size, 2) for s in (plain, warm))
                length = 4 if two.data_step < 3 else 8 if two.data_step < 9 else 16
                assert (two.length, two.is_shortened) == (length, length < 16)
                same = ("data_step", "sample_range", "num_targets", "num_tokens", "source_counts")
                assert all(getattr(one, name) == getattr(two, name) for name in same)
                for ours, theirs in zip(two.micro_batches, one.micro_batches, strict=True):
                    assert ours.input_ids.shape == (2 * 16 // length, length)
                    assert np.array_equal(ours.labels.ravel(), theirs.labels.ravel())
                    assert np.array_equal(ours.input_ids.ravel(), theirs.input_ids.ravel())
                    assert np.array_equal(ours.sample_hashes, theirs.sample_hashes)
    assert warm.tokens_after(12) == plain.tokens_after(12)
    held_out = stream_of(root, {"long": 1}, warmup=WARMUP).evaluation(0, 1, 2, 64).batches
    assert {batch.labels.shape for batch in held_out} == {(2, 16)}


def test_what_was_cut_is_past_and_what_comes_may_change(root):
    plain, warm, other = (
        stream_of(root, {"prose": 1}, warmup=warmup)
        for warmup in ((), WARMUP, [*WARMUP[:2], (6, 16)])
    )
    assert plain.past(0) == warm.past(0)
    assert plain.past(1)["data_step"] == warm.past(1)["data_step"]
    assert plain.past(1) != warm.past(1)
    assert warm.past(6) == other.past(6)
    assert warm.past(7) != other.past(7)
    assert len({one.state()["schedule"] for one in (plain, warm, other)}) == 3
    assert "lengths" not in plain.past(9)


def test_a_source_smaller_than_one_batch_is_repeated_in_new_order(root):
    """Three windows, a third of batches of 16: epochs pass inside one batch, each window evenly."""
    stream = stream_of(root, {"small": 1, "prose": 2}, batch=16)
    drawn = []
    for step in range(1, 10):
        source, start, _ = stream.whole_batch(step - 1)
        drawn += start[source == stream.uids.index("small")].tolist()
    epochs = [tuple(drawn[i : i + 3]) for i in range(0, len(drawn) - 2, 3)]
    assert all(sorted(epoch) == [0, 16, 32] for epoch in epochs)
    assert len(set(epochs)) > 1


def test_a_rare_source_comes_as_often_as_its_weight_says(root):
    stream = stream_of(root, {"prose": 0.999, "code": 0.001}, batch=8)
    counts = [stream.step(step, 0, 1, 8).source_counts["code"] for step in range(1, 501)]
    assert sum(counts) == 4
    assert max(counts) == 1


def test_a_run_that_ends_with_its_source_repeats_nothing(root):
    """40 windows in 20 steps of 2: the last step is the last of the epoch."""
    write_corpus(root / "exact", [counting_document(16 * 40)])
    stream = stream_of(root, {"exact": Source(corpus="exact", max_epochs=1)}, batch=2)
    assert stream.check(20) == []
    starts = np.concatenate([stream.whole_batch(step)[1] for step in range(20)])
    assert sorted(starts.tolist()) == list(range(0, 640, 16))
    with pytest.raises(UserError, match=r"max_epochs=1: the run would take 1\.05 epochs"):
        stream.check(21)
