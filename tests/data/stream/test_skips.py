"""Skips: which data step a train step uses, what gives no loss, and that the past stays."""

import numpy as np
import pytest
from small_corpora import counting_document, flip_byte, random_documents, stream_of, write_corpus

from base.errors import UserError
from data.stream.ledger import batch_hash
from data.stream.skips import Skips, merged
from data.stream.trace import pieces_of_step, steps_of_document
from data.stream.windows import IGNORED
from recipes.compose import compose
from recipes.schema import Skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate(("prose", "code")):
        write_corpus(root / name, random_documents(120, 3, 50, seed=seed), shard_bytes=900)
    return root


def entry(source, documents, steps, **tokens):
    return {"source": source, "documents": documents, "steps": steps, **tokens}


def batch_of(stream, step, data_size=1, micro_batch=8):
    """(hash of the own samples, labels, inputs) of all ranks of a step."""
    ranks = [stream.step(step, rank, data_size, micro_batch) for rank in range(data_size)]
    assert len({(r.num_targets, r.num_masked, r.quarantined, r.is_update) for r in ranks}) == 1
    batches = [batch for data in ranks for batch in data.micro_batches]
    labels = np.concatenate([batch.labels for batch in batches])
    assert (labels != IGNORED).sum() == ranks[0].num_targets
    return ranks[0], labels, np.concatenate([batch.input_ids for batch in batches])


def test_train_and_data_steps_agree_with_counting():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ranges = [sorted(rng.choice(60, 2, replace=False).tolist()) for _ in range(rng.integers(6))]
        skips = Skips(Skip(advance=ranges))
        left_out = {d for first, end in ranges for d in range(first, end)}
        used = [d for d in range(200) if d not in left_out]
        assert [skips.data_step(step) for step in range(1, 101)] == used[:100]
        steps = skips.steps_of(np.arange(150)).tolist()
        place = {d: step for step, d in enumerate(used, start=1)}
        assert steps == [place.get(d, 0) for d in range(150)]


def test_a_hundred_thousand_ranges_are_mapped_by_search():
    skips = Skips(Skip(advance=[(10 * i, 10 * i + 5) for i in range(100_000)]))
    assert skips.data_step(1) == 5
    assert skips.data_step(500_000) == 999_999
    assert skips.data_step(500_001) == 1_000_000
    assert skips.steps_of(np.array([999_999, 999_994])).tolist() == [500_000, 0]


def test_overlapping_ranges_count_once_and_their_order_does_not_matter():
    assert merged([(5, 9), (1, 3), (3, 5), (7, 12), (20, 21)]) == ((1, 12), (20, 21))
    one, two = (Skips(Skip(advance=some)) for some in ([(1, 4), (2, 6)], [(2, 6), (1, 6)]))
    assert one.fingerprint() == two.fingerprint()
    assert Skips(Skip()).fingerprint() is None


def test_ranges_added_at_different_times_replay_as_one_list(root):
    """Three overlapping ranges, each added before it is reached: the last list tells it all."""
    lists = [[(4, 8)], [(4, 8), (6, 14)], [(4, 8), (6, 14), (13, 20), (30, 31)]]
    attempts = [(1, 3), (4, 4), (5, 40)]
    sources = {"prose": 3, "code": 1}
    final = stream_of(root, sources, skip=Skip(advance=lists[-1]))
    plain = stream_of(root, sources)
    used = []
    for ranges, (first, last) in zip(lists, attempts, strict=True):
        stream = stream_of(root, sources, skip=Skip(advance=ranges))
        assert final.past(first - 1) == stream.past(first - 1)
        for step in range(first, last + 1):
            data, labels, inputs = batch_of(stream, step)
            used.append(data.data_step)
            rows = plain.whole_batch(data.data_step)[2]
            assert np.array_equal(rows.tokens[:, :-1], inputs)
            again = batch_of(final, step)
            assert again[0].data_step == data.data_step
            assert np.array_equal(again[1], labels)
    assert used == [d for d in range(100) if not 4 <= d < 20 and d != 30][: len(used)]


def test_a_range_in_the_past_changes_the_past(root):
    old = stream_of(root, {"prose": 1}, skip=Skip(advance=[(3, 5)]))
    for ranges in ([], [(3, 6)], [(3, 5), (0, 1)], [(2, 5)]):
        new = stream_of(root, {"prose": 1}, skip=Skip(advance=ranges))
        assert new.past(8)["skips"] != old.past(8)["skips"]
    same = stream_of(root, {"prose": 1}, skip=Skip(advance=[(4, 5), (3, 5), (10, 12)]))
    assert same.past(8) == old.past(8)
    assert same.past(9)["skips"] != old.past(9)["skips"] or same.past(9) == old.past(9)
    assert same.state()["skips"] != old.state()["skips"]


def test_a_range_that_cannot_matter_any_more_is_no_change():
    """no_update of a batch that was left out anyway did nothing, and is not held against a run."""
    one = Skips(Skip(advance=[(3, 5)]))
    two = Skips(Skip(advance=[(3, 5)], no_update=[(4, 5)]))
    assert one.past(10) == two.past(10)


def test_tokens_count_what_was_used_also_on_a_ramp(root):
    ramp = [[0, 2 * 16], [5, 4 * 16], [12, 8 * 16]]
    stream = stream_of(root, {"prose": 1}, batch=ramp, skip=Skip(advance=[(3, 6), (10, 13)]))
    total = 0
    assert stream.tokens_after(0) == 0
    for step in range(1, 21):
        data = stream.step(step, 0, 1, 1)
        total += data.num_tokens
        assert stream.tokens_after(step) == total
        assert len(data.micro_batches) == (data.sample_range[1] - data.sample_range[0])


def test_masked_documents_give_no_loss_and_nothing_else_moves(root):
    sources = {"prose": 3, "code": 1}
    plain = stream_of(root, sources)
    mask = (entry("prose", (10, 40), (5, None)), entry("code", (3, 4), (0, 8)))
    stream = stream_of(root, sources, skip=Skip(mask=mask))
    split = plain.split(plain.uids.index("prose"))
    low, high = split.document_range(10)[0], split.document_range(39)[1]
    seen = 0
    for step in range(1, 21):
        data, labels, inputs = batch_of(stream, step, 2, 2)
        before, old, same = batch_of(plain, step, 2, 2)
        assert np.array_equal(inputs, same)
        hashes = [[b.sample_hashes.tolist() for b in d.micro_batches] for d in (data, before)]
        assert hashes[0] == hashes[1]
        assert data.num_targets + data.num_masked == before.num_targets
        assert (labels == np.where(labels == IGNORED, IGNORED, old)).all()
        if step <= 5:
            assert not data.num_masked or "code" in data.source_counts
        seen += data.num_masked
    assert seen > 0
    # Of one rank, position by position: masked exactly where the target lies in the documents.
    source, start, _ = stream.whole_batch(9)
    data = stream.step(10, 0, 1, 8)
    token = start[:, None] + 1 + np.arange(16)
    inside = (source == plain.uids.index("prose"))[:, None] & (token >= low) & (token < high)
    old = plain.step(10, 0, 1, 8).micro_batches[0].labels
    assert np.array_equal(data.micro_batches[0].labels, np.where(inside, IGNORED, old))


def test_masked_spans_give_no_loss_and_nothing_else_moves(root):
    """Several spans, one open, one that crosses a window, against counting token by token."""
    sources = {"prose": 3, "code": 1}
    plain = stream_of(root, sources)
    split, long = plain.split(plain.uids.index("prose")), []
    for document in range(split.num_documents):
        low, high = split.document_range(document)
        if high - low >= 30:
            long.append((document, low, high))
    spans = [(2, 9), (20, 27), (25, None)]
    mask = [
        entry("prose", (document, document + 1), (3, None), tokens=span)
        for document, *_ in long
        for span in spans
    ]
    stream = stream_of(root, sources, skip=Skip(mask=tuple(mask)))
    masked = {
        token
        for _, low, high in long
        for first, end in spans
        for token in range(low + first, high if end is None else low + end)
    }
    pieces, effects = 0, set()
    for step in range(1, 21):
        views = [batch_of(stream, step, size, 8 // size) for size in (1, 2, 4)]
        assert len({view[0].num_masked for view in views}) == 1
        data, labels, inputs = views[0]
        before, old, same = batch_of(plain, step)
        assert np.array_equal(inputs, same)
        source, start, _ = stream.whole_batch(data.data_step)
        token = start[:, None] + 1 + np.arange(16)
        is_in = np.isin(token, list(masked)) & (source == plain.uids.index("prose"))[:, None]
        is_in &= data.data_step >= 3
        assert np.array_equal(labels, np.where(is_in, IGNORED, old))
        assert data.num_masked == (is_in & (old != IGNORED)).sum()
        assert data.num_targets + data.num_masked == before.num_targets
        for piece in pieces_of_step(stream, data.data_step):
            low = split.document_range(piece.document)[0]
            shown = {low + t for first, end in piece.masked for t in range(first, end)}
            mine = set(range(low + piece.first, low + piece.end)) if piece.source == "prose" else ()
            assert shown == (masked.intersection(mine) if data.data_step >= 3 else set())
            pieces += bool(shown)
    assert pieces > 10
    for document, *_ in long[:20]:
        effects |= {one.effect for one in steps_of_document(stream, "prose", document, 20)}
        inside = steps_of_document(stream, "prose", document, 20, (4, 8))
        assert {one.effect for one in inside if one.data_step >= 3} <= {"masked"}
    assert {"masked in part", "trained"} <= effects


def test_a_span_is_part_of_what_a_run_did(root):
    whole, span, other = (
        stream_of(root, {"prose": 1}, skip=Skip(mask=(entry("prose", (1, 2), (4, 6), **tokens),)))
        for tokens in ({}, {"tokens": (0, 2)}, {"tokens": (1, None)})
    )
    plain = stream_of(root, {"prose": 1})
    all_of_it = entry("prose", (1, 2), (4, 6), tokens=(0, None))
    fingerprints = [one.state()["skips"] for one in (plain, whole, span, other)]
    assert len(set(fingerprints)) == 4
    assert Skips(Skip(mask=(all_of_it,))).fingerprint() == whole.state()["skips"]
    assert plain.past(4) == span.past(4)
    assert plain.past(5)["skips"] != span.past(5)["skips"] != whole.past(5)["skips"]


def test_a_batch_without_any_target_is_no_update(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(200)])
    mask = (entry("c", (0, 1), (2, 4)),)
    stream = stream_of(tmp_path, {"c": 1}, skip=Skip(mask=mask, no_update=[(6, 7)]))
    assert [stream.step(s, 0, 1, 8).is_update for s in range(1, 9)] == [
        True, True, False, False, True, True, False, True,
    ]  # fmt: skip
    assert stream.step(3, 0, 1, 8).num_targets == 0
    assert stream.step(7, 0, 1, 8).num_targets > 0


def test_masks_that_leave_no_target_in_any_step_are_refused_before_step_1(root):
    every = entry("prose", (0, 120), (0, None))
    halves = [entry("prose", (0, 60), (0, None)), entry("prose", (60, 120), (0, 7))]
    for mask in ([every], halves):
        stream = stream_of(root, {"prose": 1}, skip=Skip(mask=tuple(mask)))
        with pytest.raises(UserError, match=r"data.skip.mask leaves no target in any of the 7"):
            stream.check(7)
    assert stream.check(8) == stream_of(root, {"prose": 1}).check(8)  # step 8 trains
    both = stream_of(root, {"prose": 1, "code": 1}, skip=Skip(mask=(every,)))
    assert not [line for line in both.check(7) if "mask" in line]


def test_a_resumed_run_whose_rest_is_without_an_update_is_refused(root):
    """Steps 1 to 4 train; from the resume after step 4 on nothing would."""
    skipping = stream_of(root, {"prose": 1}, skip=Skip(no_update=((4, 8),)))
    assert skipping.check(8) == []
    skipping.check_rest(9, after=4)
    words = "covers all 4 steps after step 4, from which the run goes on: nothing would be trained"
    with pytest.raises(UserError, match=words):
        skipping.check_rest(8, after=4)


def test_masks_that_leave_no_target_after_a_resume_are_refused(root):
    mask = entry("prose", (0, 120), (4, None))
    stream = stream_of(root, {"prose": 1}, skip=Skip(mask=(mask,)))
    assert stream.check(8) == stream_of(root, {"prose": 1}).check(8)
    stream.check_rest(8, after=3)
    words = "no target in any of the 4 steps after step 4, from which the run goes on"
    with pytest.raises(UserError, match=words):
        stream.check_rest(8, after=4)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (entry("prose", (100, 121), (0, None)), r"documents \[100, 121\] .* has 120 to train on"),
        (entry("idle", (0, 1), (0, None)), "idle, which is never drawn"),
        (entry("prose", (120, 121), (0, None), tokens=(0, 1)), r"documents \[120, 121\]"),
        (entry("prose", (7, 8), (0, None), tokens=(0, 60)), r"tokens \[0, 60\] of .*prose:7"),
        (entry("prose", (7, 8), (0, None), tokens=(60, None)), r"tokens \[60, null\] of "),
    ],
)
def test_masks_that_fit_no_document_are_refused(root, mask, message):
    from recipes.schema import Source

    sources = {"prose": 1, "idle": Source(corpus="code", weight=0)}
    with pytest.raises(UserError, match=message):
        stream_of(root, sources, skip=Skip(mask=(mask,)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.skip.advance=5", "is not a list of ranges"),
        ("data.skip.advance=[[5,5]]", "0 <= first < end"),
        ("data.skip.advance=[[-1,5]]", "0 <= first < end"),
        ("data.skip.no_update=[5,6]", "is not a range"),
        ("data.skip.no_update=[[1.5,6]]", "not a whole number"),
        ("data.skip.mask=[[1,2]]", "is not a list of"),
        ("data.skip.mask=[{source:prose,documents:[1,2]}]", "has an entry with source, documents"),
        ("data.skip.mask=[{source:prose,documents:[1,2],steps:[0,9],token:[0,1]}]", "if need be"),
        ("data.skip.mask=[{source:prose,documents:[1,2],steps:[0,9],tokens:[3,3]}]", "first < end"),
        ("data.skip.mask=[{source:prose,documents:[1,3],steps:[0,9],tokens:[0,3]}]", "of one, so"),
        ("data.skip.mask=[{source:prose,documents:[1,2],steps:[0,9],tokens:5}]", "is not a range"),
        ("data.skip.mask=[{source:no,documents:[1,2],steps:[0,null]}]", "data.sources does not"),
        ("data.sources.prose.weight=[[1,2]]", "must start at step 0"),
        ("data.sources.prose.weight=[[0,-2]]", "must be from 0 to"),
        ("data.sources.prose.weight=[[0,1],[9,0]]", "every weight is 0 from data step 9 on"),
        ("data.sources.prose.weight=[0,1]", r"is not a list of \[data step, weight\]"),
    ],
)
def test_a_malformed_list_is_refused_by_name(override, message):
    with pytest.raises(UserError, match=message) as caught:
        compose("tiny", [override])
    assert override.split("=")[0].rsplit(".", 1)[0].split(".prose")[0] in str(caught.value)


def test_a_damaged_block_in_quarantine_masks_its_windows_and_moves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("data.corpus.block_hashes.BLOCK_BYTES", 256)  # 128 tokens
    documents = random_documents(100, 10, 60, seed=3)
    for name in ("good", "bad"):
        write_corpus(tmp_path / name, documents, shard_bytes=1500)
    flip_byte(tmp_path / "bad" / "train-00001.bin", 300)  # block 1: tokens 128 to 255 of the shard
    good = stream_of(tmp_path, {"c": _source("good")})
    bad = stream_of(tmp_path, {"c": _source("bad")}, on_damage="quarantine")
    first = good.split(0)._starts[1] + 128
    found = set()
    for step in range(1, 41):
        views = [batch_of(bad, step, size, 8 // size) for size in (1, 2, 4)]
        assert len({v[0].num_targets for v in views}) == 1
        data, labels, inputs = views[0]
        clean, old, same = batch_of(good, step)
        start = good.locate(*clean.sample_range)[1]
        hit = (start < first + 128) & (start + 17 > first)
        assert list(data.quarantined) == (clean.sample_range[0] + np.flatnonzero(hit)).tolist()
        assert (labels[hit] == IGNORED).all()
        assert (inputs[hit] == 0).all()
        assert np.array_equal(labels[~hit], old[~hit])
        assert np.array_equal(inputs[~hit], same[~hit])
        found |= set(data.quarantined)
        rows = bad.whole_batch(data.data_step, data.quarantined)[2]
        own = np.concatenate([b.sample_hashes for b in bad.step(step, 0, 1, 8).micro_batches])
        assert batch_hash(rows.hashes) == batch_hash(own)
    assert found
    write_corpus(tmp_path / "one", [counting_document(100)])
    flip_byte(tmp_path / "one" / "train-00000.bin", 7)
    monkeypatch.setattr("data.corpus.block_hashes.BLOCK_BYTES", 1024)
    with pytest.raises(UserError, match="every sample of its batch touches a damaged block"):
        stream_of(tmp_path, {"c": _source("one")}, on_damage="quarantine").step(1, 0, 1, 8)
    monkeypatch.setattr("data.corpus.block_hashes.BLOCK_BYTES", 256)
    stop = stream_of(tmp_path, {"c": _source("bad")})
    with pytest.raises(UserError, match=r"train-00001.bin: bytes 256 to 512 have xxh3"):
        [stop.step(step, 0, 1, 8) for step in range(1, 41)]


def _source(corpus):
    from recipes.schema import Source

    return Source(corpus=corpus)
