"""The stream: one global batch per step in any layout, and what is refused before step 1."""

import numpy as np
import pytest
from small_corpora import (
    EOD,
    counting_document,
    flip_byte,
    random_documents,
    rewrite_manifest,
    stream_of,
    write_corpus,
)
from word_tokenizers import word_tokenizer

from base.errors import UserError
from data.corpus.corpus import BEGIN_STORED, open_corpus, read_manifest
from data.corpus.corpus_writer import write_text_corpus
from data.corpus.documents import Document
from data.corpus.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from data.stream.evaluation import few_documents
from data.stream.ledger import batch_hash, in_batch_order
from data.stream.order import order_seed, splitmix64
from data.stream.windows import IGNORED, own_positions
from recipes.schema import Skip, Source


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two corpora of short documents over several shards, with held-out parts."""
    root = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate(("prose", "code")):
        documents = random_documents(150, 3, 50, seed=seed)
        write_corpus(
            root / name, documents, random_documents(12, 3, 50, seed=9 + seed), shard_bytes=900
        )
    return root


def global_batch(stream, step, data_size, micro_batch):
    """(hash, targets, tokens of all rows) of a step, put together from all ranks."""
    steps = [stream.step(step, rank, data_size, micro_batch) for rank in range(data_size)]
    hashes = [np.stack([b.sample_hashes for b in one.micro_batches]) for one in steps]
    labels = [b.labels for one in steps for b in one.micro_batches]
    assert len({one.num_targets for one in steps}) == 1
    assert sum(int((some != IGNORED).sum()) for some in labels) == steps[0].num_targets
    assert len({one.sample_range for one in steps}) == 1
    return batch_hash(in_batch_order(np.stack(hashes))), steps[0].num_targets


def all_tokens(stream, steps, data_size=1, micro_batch=1):
    """Input rows of some steps in order, (samples, T)."""
    return np.concatenate(
        [
            batch.input_ids
            for step in steps
            for batch in stream.step(step, 0, data_size, micro_batch).micro_batches
        ]
    )


@pytest.mark.parametrize("attend", ["within", "across"])
def test_global_batch_is_the_same_for_every_layout_and_prefetch_depth(root, attend):
    seen = {step: set() for step in range(1, 31)}
    for prefetch in (0, 1, 4):
        sources = {"prose": 3, "code": 1}
        stream = stream_of(root, sources, batch=16, prefetch=prefetch, attend=attend)
        for data_size in (1, 2, 4, 8):
            for micro_batch in (1, 2):
                for step in (1, 7, 30):
                    seen[step].add(global_batch(stream, step, data_size, micro_batch))
        with stream.prefetch(1, 30, 1, 2, 2) as items:
            for item in items:
                direct = stream.step(item.step, 1, 2, 2)
                for one, other in zip(item.micro_batches, direct.micro_batches, strict=True):
                    assert np.array_equal(one.labels, other.labels)
                    assert np.array_equal(one.sample_hashes, other.sample_hashes)
    assert all(len(seen[step]) == 1 for step in (1, 7, 30))
    assert len(set.union(*seen.values())) == 3


def test_resume_in_the_middle_gives_what_an_unbroken_run_gives(root):
    """Also across the ends of epochs: 30 steps are several epochs of the smaller source."""
    unbroken = stream_of(root, {"prose": 1, "code": 9})
    hashes = [global_batch(unbroken, step, 1, 2) for step in range(1, 121)]
    assert unbroken.usage(120)[0].epochs > 2
    for first in (2, 31, 119):
        resumed = stream_of(root, {"prose": 1, "code": 9})
        assert [global_batch(resumed, step, 4, 1) for step in range(first, 121)] == hashes[
            first - 1 :
        ]
    assert len(set(hashes)) == 120


def test_steps_asked_in_any_order_give_the_same_batches(root, monkeypatch):
    """Rewinds and jumps, with a look-ahead so short that each of them leaves it."""
    sources = {"prose": 3, "code": 1}
    in_order = [global_batch(stream_of(root, sources), step, 1, 8) for step in range(1, 13)]
    monkeypatch.setattr("data.stream.stream.LOCATE_AHEAD", 10)
    stream = stream_of(root, sources)
    for step in (12, 1, 2, 3, 2, 7, 6, 5, 12, 11):
        assert global_batch(stream, step, 1, 8) == in_order[step - 1]


def test_ranks_take_contiguous_micro_batches_of_each_slab():
    taken = [own_positions(12, rank, 3, 2).tolist() for rank in range(3)]
    assert taken == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    with pytest.raises(
        UserError, match=r"12 sequences is not a multiple of 4 data ranks x .*8 or 16"
    ):
        own_positions(12, 0, 4, 2)
    with pytest.raises(UserError, match="nearest: 16 sequences"):
        own_positions(8, 0, 4, 4)


def test_every_window_comes_once_per_epoch_and_epochs_differ(root):
    """Documents of 3 to 50 tokens: each token once over all ranks, as input, in each epoch."""
    stream = stream_of(root, {"prose": 1}, batch=1)
    split = open_corpus(root / "prose").splits["train"]
    windows = (split.num_tokens - 1) // 16
    row = split.read(np.array([0]), windows * 16)[0].reshape(windows, 16).tolist()
    epochs = [
        all_tokens(stream, range(e * windows + 1, (e + 1) * windows + 1)).tolist() for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(row)
    assert epochs[0] != epochs[1]


def test_shifted_windows_cut_each_epoch_at_other_places(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(16 * 41)], vocab_size=1000)
    stream = stream_of(tmp_path, {"c": 1}, batch=1, shift_windows=True)
    windows = int(stream.order.num_windows[0])
    assert windows == 40  # one is lost, whatever the shift
    shifts = []
    for epoch in range(6):
        rows = all_tokens(stream, range(epoch * windows + 1, (epoch + 1) * windows + 1))
        assert np.array_equal(np.sort(rows.ravel()), rows.min() + np.arange(16 * windows))
        shifts.append(int(rows.min()) - 1)
    assert len(set(shifts)) > 3
    assert all(0 <= shift < 16 for shift in shifts)
    seed = order_seed(stream.seed, "c", 2)
    assert shifts[2] == int(splitmix64(seed, 7)[0]) * 16 >> 64
    plain = stream_of(tmp_path, {"c": 1}, batch=1)
    assert "shift_windows" in stream.state()
    assert "shift_windows" not in plain.state()
    write_corpus(tmp_path / "short", [counting_document(29)])
    with pytest.raises(UserError, match="has 30 tokens to train on, a shifted window needs 32"):
        stream_of(tmp_path, {"short": 1}, batch=1, shift_windows=True)


def test_a_source_gets_its_share_and_keeps_its_order_beside_others(root):
    alone = stream_of(root, {"prose": 1}, batch=4)
    both = stream_of(root, {"code": 1, "prose": 3}, batch=4)
    data = [both.step(step, 0, 1, 4) for step in range(1, 26)]
    assert sum(item.source_counts["prose"] for item in data) == 75
    assert all(sum(item.source_counts.values()) == 4 for item in data)
    hashes = np.concatenate([b.sample_hashes for item in data for b in item.micro_batches])
    own = np.concatenate(
        [b.sample_hashes for s in range(1, 19) for b in alone.step(s, 0, 1, 4).micro_batches]
    )
    assert [h for h in hashes.tolist() if h in set(own.tolist())][:72] == own.tolist()


def test_a_longer_window_is_cut_into_consecutive_samples(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(16 * 40)], vocab_size=1000)
    stream = stream_of(tmp_path, {"c": 1}, seq_len=16, batch=2, window_tokens=64)
    rows = all_tokens(stream, range(1, 21)).reshape(10, 64)
    assert (np.diff(rows, axis=1) == 1).all()  # parts of one window follow each other
    assert ((rows[:, 0] - 1) % 64 == 0).all()
    other = stream_of(tmp_path, {"c": 1}, seq_len=32, batch=1, window_tokens=64)
    assert np.array_equal(all_tokens(other, range(1, 21)).reshape(10, 64), rows)


def test_labels_are_the_next_token_of_the_corpus(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(500)])
    batch = stream_of(tmp_path, {"c": 1}).step(1, 0, 1, 8).micro_batches[0]
    assert np.array_equal(batch.labels, batch.input_ids + 1)
    assert not batch.segment_ids.any()


def test_isolated_documents_do_not_depend_on_their_neighbours(tmp_path):
    """Change document A in the window: labels, segments and inputs of B stay; A's change shows.

    B begins with A's end id, which is its first input, so its first token is a target.
    """
    batches = {}
    for name, first in (("x", 1), ("y", 501)):
        documents = [np.arange(first, first + 7), np.arange(100, 120)]
        write_corpus(tmp_path / name, documents)
        batches[name] = stream_of(tmp_path, {name: 1}, batch=1).step(1, 0, 1, 1).micro_batches[0]
    x, y = batches["x"], batches["y"]
    assert x.segment_ids[0].tolist() == [0] * 7 + [1] * 9
    assert x.cu_seqlens[:3].tolist() == [0, 7, 16]
    assert x.input_ids[0, 7] == EOD
    assert x.labels[0, 7] == 100  # B's first token is predicted from the end id alone
    assert x.labels[0, 6] == EOD  # and A's end is predicted
    assert np.array_equal(x.input_ids[0, 7:], y.input_ids[0, 7:])
    assert np.array_equal(x.labels[0, 6:], y.labels[0, 6:])
    assert not np.array_equal(x.input_ids[0, :7], y.input_ids[0, :7])
    across = stream_of(tmp_path, {"x": 1}, batch=1, attend="across").step(1, 0, 1, 1)
    assert across.micro_batches[0].labels[0, 7] == 100
    assert across.num_targets == 16


def test_a_corpus_without_begin_tokens_keeps_its_meaning(tmp_path):
    """Written by an older version: the first token of a document is no target; a note says so."""
    documents = [np.arange(1, 8), np.arange(100, 120)]
    manifest = write_corpus(tmp_path / "c", documents)
    old = {key: value for key, value in manifest.items() if not key.startswith("begin_")}
    new = stream_of(tmp_path, {"c": 1}, batch=1)
    assert not [line for line in new.check(1) if "no token precedes" in line]
    rewrite_manifest(tmp_path / "c", old)
    stream = stream_of(tmp_path, {"c": 1}, batch=1)
    data = stream.step(1, 0, 1, 1)
    batch = data.micro_batches[0]
    assert batch.segment_ids[0].tolist() == [0] * 8 + [1] * 8
    assert batch.labels[0, 6:9].tolist() == [EOD, IGNORED, 101]
    assert data.num_targets == 15
    (line,) = [line for line in stream.check(1) if "no token precedes" in line]
    assert "data.sources.c: no token precedes the documents of" in line
    across = stream_of(tmp_path, {"c": 1}, batch=1, attend="across")
    assert not [line for line in across.check(1) if "no token precedes" in line]


def test_a_stored_begin_token_is_the_first_input_of_its_document_and_no_target(tmp_path):
    """Documents as [begin, ids, end]: the first id after the begin token is a target."""
    begin = {"begin_id": 999, "begin_policy": BEGIN_STORED}
    write_corpus(tmp_path / "c", [[999, *range(1, 7)], [999, *range(100, 120)]], **begin)
    data = stream_of(tmp_path, {"c": 1}, batch=1).step(1, 0, 1, 1)
    batch = data.micro_batches[0]
    assert batch.input_ids[0, 6:10].tolist() == [6, EOD, 999, 100]
    assert batch.labels[0, 5:10].tolist() == [6, EOD, IGNORED, 100, 101]
    assert batch.segment_ids[0].tolist() == [0] * 8 + [1] * 8
    assert data.num_targets == 15


def test_sources_that_begin_their_documents_differently_mix(tmp_path):
    """Each window follows the rule of its own corpus; targets are counted as labels show them."""
    documents = random_documents(60, 2, 9)
    write_corpus(tmp_path / "new", documents)
    manifest = write_corpus(tmp_path / "old", random_documents(60, 2, 9, seed=1))
    old = {key: value for key, value in manifest.items() if not key.startswith("begin_")}
    rewrite_manifest(tmp_path / "old", old)
    stream = stream_of(tmp_path, {"new": 1, "old": 1}, batch=8)
    for step in range(1, 6):
        data = stream.step(step, 0, 1, 4)
        labels = np.concatenate([batch.labels for batch in data.micro_batches])
        assert data.num_targets == (labels != IGNORED).sum()
        source, _, rows = stream.whole_batch(data.data_step)
        is_lost = (labels == IGNORED).any(axis=1)
        assert (is_lost <= (source == stream.uids.index("old"))).all()
        assert set(rows.start_is_begun[source[rows.start_row] == 0]) == {True}


def test_an_end_id_inside_a_document_is_no_boundary(tmp_path):
    write_corpus(tmp_path / "c", [[5, 6, EOD, 7, 8], counting_document(20, 50)])
    batch = stream_of(tmp_path, {"c": 1}, batch=1).step(1, 0, 1, 1).micro_batches[0]
    assert batch.input_ids[0, :7].tolist() == [5, 6, EOD, 7, 8, EOD, 50]
    assert batch.segment_ids[0].tolist() == [0] * 5 + [1] * 11


def test_a_batch_larger_than_the_corpus_goes_on_in_the_next_epoch(tmp_path):
    """10 samples, a global batch of 16: no empty run, every sample once before any comes twice."""
    write_corpus(tmp_path / "c", [counting_document(160)])
    stream = stream_of(tmp_path, {"c": 1}, batch=16)
    rows = all_tokens(stream, [1, 2], micro_batch=16)
    first = rows[:, 0].tolist()
    for epoch in range(3):
        assert len(set(first[epoch * 10 : epoch * 10 + 10])) == 10
    assert stream.usage(2)[0].epochs == pytest.approx(3.2)


@pytest.mark.parametrize("tokens", [0, 1, 32])
def test_a_corpus_shorter_than_one_window_is_refused_with_both_numbers(tmp_path, tokens):
    documents = [counting_document(tokens - 1)] if tokens else []
    write_corpus(tmp_path / "c", documents)
    with pytest.raises(UserError, match=rf"has {tokens} tokens to train on, one window takes 33"):
        stream_of(tmp_path, {"c": 1}, seq_len=32)


@pytest.mark.parametrize(
    ("tokens", "windows", "dropped"), [(33, 1, 0), (34, 1, 1), (64, 1, 31), (65, 2, 0)]
)
def test_whole_windows_are_counted_and_the_rest_is_said(tmp_path, tokens, windows, dropped):
    write_corpus(tmp_path / "c", [counting_document(tokens - 1)])
    (use,) = stream_of(tmp_path, {"c": 1}, seq_len=32).usage(1)
    assert (use.tokens, use.windows, use.dropped) == (tokens, windows, dropped)


def test_a_ramp_keeps_its_batch_sizes_wherever_it_is_resumed(root):
    ramp = [[0, 2 * 16], [5, 4 * 16], [12, 8 * 16]]
    stream = stream_of(root, {"prose": 1}, batch=ramp)
    sizes = [len(all_tokens(stream, [step])) for step in range(1, 21)]
    assert sizes == [2] * 5 + [4] * 7 + [8] * 8
    plain = all_tokens(stream_of(root, {"prose": 1}, batch=2), range(1, 10))
    assert np.array_equal(all_tokens(stream, range(1, 8)), plain)


def test_evaluation_is_one_set_with_equal_batch_counts_in_every_layout(root):
    """Uneven: the number of windows divides by no layout; every rank still gets as many batches."""
    stream = stream_of(root, {"prose": 3, "code": 1})
    sets = []
    for data_size, micro_batch in ((1, 1), (2, 1), (2, 4), (4, 2), (3, 5)):
        ranks = [
            stream.evaluation(r, data_size, micro_batch, 16 * 19 + 3).batches
            for r in range(data_size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        rows = [b.input_ids[i] for batches in ranks for b in batches for i in range(micro_batch)]
        labels = [b.labels[i] for batches in ranks for b in batches for i in range(micro_batch)]
        real = [i for i, row in enumerate(labels) if (row != IGNORED).any()]
        assert len(real) == 19
        sets.append(sorted((rows[i].tolist(), labels[i].tolist()) for i in real))
    assert all(one == sets[0] for one in sets)
    held_out = open_corpus(root / "prose").splits["valid"]
    assert held_out.read(np.array([0]), 16).tolist()[0] in [row for row, _ in sets[0]]


def test_five_samples_on_two_ranks_give_the_same_number_of_batches(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(100)], [counting_document(16 * 5)])
    stream = stream_of(tmp_path, {"c": 1})
    ranks = [stream.evaluation(rank, 2, 2, 10**6).batches for rank in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    has_targets = [[(b.labels != IGNORED).any(axis=1).tolist() for b in some] for some in ranks]
    assert has_targets == [[[True, True], [True, False]], [[True, True], [False, False]]]


def test_a_held_out_part_of_a_few_documents_is_warned_of_where_it_is_evaluated(root):
    assert few_documents(1)[0].startswith("only 1 document is held out for validation: its loss")
    prose, both = stream_of(root, {"prose": 1}), stream_of(root, {"prose": 1, "code": 1})
    assert prose.check(1) == []
    (warning,) = prose.check(1, 10**5)
    assert warning.startswith("only 12 documents are held out for validation: its loss depends on")
    assert both.check(1, 10**5) == []  # 24 documents


def test_evaluation_without_held_out_text_is_refused_with_the_way_out(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(100)])
    stream = stream_of(tmp_path, {"c": 1})
    with pytest.raises(UserError, match="no source has 17 held-out tokens"):
        stream.evaluation(0, 1, 1, 1000)
    with pytest.raises(UserError, match=r"eval_tokens=15 is less than one sequence of seq_len=16"):
        stream.evaluation(0, 1, 1, 15)


def test_state_is_small_and_differs_where_batches_would(root):
    base = dict(sources={"prose": 3, "code": 1}, seed=1234, batch=8)
    state = stream_of(root, **base).state()
    assert len(repr(state)) < 1024
    assert stream_of(root, **base).state() == state
    for change, field in (
        (dict(seed=1235), "seed"),
        (dict(batch=16), "schedule"),
        (dict(sources={"prose": 2, "code": 1}), "mixture"),
        (dict(sources={"prose": 3}), "corpora"),
        (dict(window_tokens=32), "window_tokens"),
        (dict(attend="across"), "attend"),
    ):
        other = stream_of(root, **(base | change)).state()
        assert other[field] != state[field]


def test_order_depends_on_the_seed(root):
    rows = [all_tokens(stream_of(root, {"prose": 1}, seed=seed), [1]) for seed in (1, 2)]
    assert not np.array_equal(*rows)


def test_usage_says_how_often_each_source_is_repeated(root):
    stream = stream_of(root, {"prose": 3, "code": 1, "unused": Source(corpus="nowhere", weight=0)})
    code, prose = stream.usage(40)
    assert (code.uid, prose.uid) == ("code", "prose")
    assert (code.draws, prose.draws) == (80, 240)
    assert prose.epochs == pytest.approx(240 / prose.windows)
    assert (code.share, prose.share) == (0.25, 0.75)


def test_many_epochs_warn_and_a_limit_refuses_before_step_one(root):
    stream = stream_of(root, {"prose": 1})
    assert stream.check(10) == []
    (warning,) = stream.check(500)
    assert "data.sources.prose" in warning
    limited = stream_of(root, {"prose": Source(corpus="prose", max_epochs=1.5)})
    assert limited.check(10) == []
    with pytest.raises(UserError, match=r"prose.max_epochs=1.5: the run would take"):
        limited.check(500)
    accepted = warning.split("max_epochs=")[1].split()[0]
    allowed = stream_of(root, {"prose": Source(corpus="prose", max_epochs=float(accepted))})
    assert allowed.check(500) == []


def test_a_run_whose_steps_are_all_without_an_update_is_refused(root):
    skip = Skip(no_update=((0, 8),), advance=((8, 10),))
    stream = stream_of(root, {"prose": 1}, skip=skip)
    assert stream.check(9) == []
    with pytest.raises(UserError, match="covers all 8 steps: nothing would be trained"):
        stream.check(8)


def test_an_id_that_the_manifest_hides_is_refused_with_its_batch(tmp_path):
    write_corpus(tmp_path / "c", [[1, 999, *range(2, 60)]])
    manifest = read_manifest(tmp_path / "c")
    manifest["splits"]["train"][0]["max_id"] = 60
    rewrite_manifest(tmp_path / "c", manifest)
    stream = stream_of(tmp_path, {"c": 1}, vocab_size=999)
    with pytest.raises(UserError, match=r"data.sources.c: found token id 999, expected .* 998"):
        all_tokens(stream, range(1, 5))


def test_an_index_that_belongs_to_another_bin_is_refused(tmp_path):
    """Same sizes, same counts, other boundaries: the end ids do not confirm them."""
    write_corpus(tmp_path / "a", [counting_document(30), counting_document(50)])
    manifest = write_corpus(tmp_path / "b", [counting_document(50), counting_document(30)])
    (tmp_path / "b" / "train-00000.idx").replace(tmp_path / "a" / "train-00000.idx")
    entry = read_manifest(tmp_path / "a")
    entry["splits"]["train"][0]["idx_xxh3"] = manifest["splits"]["train"][0]["idx_xxh3"]
    rewrite_manifest(tmp_path / "a", entry)
    stream = stream_of(tmp_path, {"a": 1}, batch=4)
    with pytest.raises(UserError, match="expected the end id 0 before a document start"):
        stream.step(1, 0, 1, 4)


def test_the_same_corpus_under_two_names_is_refused(root):
    sources = {"a": Source(corpus="prose"), "b": Source(corpus="./code/../prose")}
    with pytest.raises(UserError, match=r"data.sources.b and data.sources.a are the same corpus"):
        stream_of(root, sources)


def test_equal_shards_of_two_corpora_are_a_warning(tmp_path):
    documents = random_documents(20, 10, 30)
    write_corpus(tmp_path / "a", documents)
    write_corpus(tmp_path / "b", documents, name="the same text under another manifest")
    write_corpus(tmp_path / "c", random_documents(20, 10, 30, seed=1))
    stream = stream_of(tmp_path, {"a": 1, "b": 1, "c": 1})
    (line,) = [line for line in stream.check(1) if "count twice" in line]
    assert "data.sources.b and data.sources.a share 1 equal shard of" in line


def test_another_tokenizer_of_equal_size_is_refused(tmp_path):
    texts = ["the cat sat on the mat " * 40, "lorem ipsum dolor sit amet " * 40]
    for name, text in zip("xy", texts, strict=True):
        tokenizer = train_bpe([text], vocab_size=262)
        tokenizer.save(tmp_path / f"tokenizer-{name}")
        write_text_corpus(
            tmp_path / name,
            [Document("d", text)],
            tokenizer,
            fields={"name": name},
            valid="none",
        )
    byte_tokenizer().save(tmp_path / "bytes")
    assert stream_of(tmp_path, {"x": 1}, tokenizer="tokenizer-x")
    for wrong in ("tokenizer-y", "bytes"):
        with pytest.raises(UserError, match=rf"data.tokenizer={wrong} has the fingerprint \w+"):
            stream_of(tmp_path, {"x": 1}, tokenizer=wrong)
    with pytest.raises(UserError, match="made with different tokenizers"):
        stream_of(tmp_path, {"x": 1, "y": 1})


def test_corpora_of_one_tokenizer_with_different_ends_mix_with_a_warning(tmp_path):
    words = ["[UNK]", "cat", "sat", "mat", "</s>", "<|im_end|>"]
    folder = word_tokenizer(tmp_path / "tokenizer", words, eos="</s>")
    for name, end in (("x", "</s>"), ("y", "<|im_end|>")):
        write_text_corpus(
            tmp_path / name,
            [Document("d", f"{name} cat sat mat " * 40)],
            load_tokenizer(folder, end),
            fields={"name": name},
            valid="none",
        )
    stream = stream_of(tmp_path, {"x": 1, "y": 1}, tokenizer="tokenizer")
    (line,) = [line for line in stream.check(1) if "different ids" in line]
    assert "data.sources end their documents with different ids (x: 4, y: 5)" in line
    assert not [line for line in stream_of(tmp_path, {"y": 1}).check(1) if "different" in line]


def test_all_problems_of_the_sources_are_reported_together(root, tmp_path):
    write_corpus(root / "tiny", [[1, 2]])
    sources = {"prose": 1, "tiny": 1, "absent": 1}
    with pytest.raises(UserError) as caught:
        stream_of(root, sources, vocab_size=500, window_tokens=24)
    text = str(caught.value)
    assert "data.window_tokens=24 is not a multiple of seq_len 16; nearest: 16 or 32" in text
    assert "model.vocab_size=500 is too small" in text
    assert "has 3 tokens to train on" in text
    assert "corpus=absent" in text
    assert len(caught.value.problems) == 4


def test_a_flipped_byte_stops_the_first_step_that_touches_it(tmp_path):
    write_corpus(tmp_path / "c", [counting_document(900)])
    flip_byte(tmp_path / "c" / "train-00000.bin", 1000)
    stream = stream_of(tmp_path, {"c": 1}, prefetch=2)
    with stream.prefetch(1, 5, 0, 1, 8) as items:
        with pytest.raises(UserError, match=r"train-00000.bin: bytes 0 to 1802 have xxh3"):
            next(items)
