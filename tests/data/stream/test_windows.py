"""From windows to model inputs: against plain loops over tokens, in both modes of attention."""

import numpy as np
import pytest

from data.stream.windows import IGNORED, Rows, cumulative_lengths, make_batches, num_targets

BEGUN = {"never": [], "always": range(12), "some": [0, 1, 3, 4, 7, 10]}  # rows of such sources


def random_rows(num_rows=12, seq_len=16, seed=0, begun=()):
    """Rows with random document starts; in `begun` rows an end id before a start begins it."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 50, (num_rows, seq_len + 1)).astype(np.int32)
    is_start = rng.random((num_rows, seq_len + 1)) < 0.2
    is_start[0] = False  # a row inside one document
    is_start[1] = True  # documents of one token each
    is_start[2, 1:-1] = False
    is_start[2, [0, -1]] = True  # a start at the first token and one at the last target
    row, position = np.nonzero(is_start)
    is_begun = np.isin(row, list(begun))
    return Rows(tokens, row, position, np.arange(num_rows, dtype=np.uint64), is_begun), is_start


def plain(tokens, is_start, attend, is_begun=False):
    """Inputs, labels and segments of one row, token by token.

    A document begins with its first token, or, in begun rows, with the token before that one.
    """
    seq_len = len(tokens) - 1
    labels, segments, segment = [], [], 0
    for t in range(seq_len):
        if attend == "within" and is_start[t + is_begun] and t > 0:
            segment += 1
        segments.append(segment)
        is_lost = attend == "within" and is_start[t + 1] and not is_begun
        labels.append(IGNORED if is_lost else int(tokens[t + 1]))
    return tokens[:-1].tolist(), labels, segments


@pytest.mark.parametrize("attend", ["within", "across"])
@pytest.mark.parametrize("micro_batch", [1, 3, 12])
@pytest.mark.parametrize("begun", BEGUN)
def test_batches_are_what_a_loop_over_tokens_gives(attend, micro_batch, begun):
    rows, is_start = random_rows(begun=BEGUN[begun])
    batches = make_batches(rows, micro_batch, attend)
    assert len(batches) == 12 // micro_batch
    targets = 0
    for number, batch in enumerate(batches):
        assert batch.input_ids.dtype == batch.labels.dtype == np.int64
        assert batch.segment_ids.dtype == batch.cu_seqlens.dtype == np.int32
        assert batch.input_ids.shape == batch.labels.shape == batch.segment_ids.shape
        ends = [0]
        for i in range(micro_batch):
            row = number * micro_batch + i
            expected = plain(rows.tokens[row], is_start[row], attend, row in BEGUN[begun])
            got = (batch.input_ids[i], batch.labels[i], batch.segment_ids[i])
            assert tuple(column.tolist() for column in got) == expected
            assert batch.sample_hashes[i] == row
            lengths = np.bincount(expected[2])
            ends += (ends[-1] + np.cumsum(lengths)).tolist()
        found = batch.cu_seqlens.tolist()
        assert found[: len(ends)] == ends
        assert set(found[len(ends) :]) <= {ends[-1]}
        assert max(np.diff(ends)) <= batch.max_seqlen <= 16
        targets += int((batch.labels != IGNORED).sum())
    starts = rows.start_row, rows.start_position, attend, rows.start_is_begun
    assert num_targets(1, 12, 16, *starts) == [targets]
    if begun == "always" or attend == "across":
        assert targets == 12 * 16  # each token is a target
    parts = num_targets(3, 4, 16, *starts)
    for part, counted in zip(rows.split(3), parts, strict=True):
        (batch,) = make_batches(part, 4, attend)
        assert counted == int((batch.labels != IGNORED).sum())
    assert sum(parts) == targets


@pytest.mark.parametrize("attend", ["within", "across"])
@pytest.mark.parametrize("length", [2, 8])
@pytest.mark.parametrize("begun", BEGUN)
def test_cut_rows_are_those_of_shorter_windows_over_the_same_tokens(attend, length, begun):
    """The model sees what it would with that seq_len; hashes and masks stay the whole windows'."""
    rows, is_start = random_rows(begun=BEGUN[begun])
    is_masked = np.random.default_rng(1).random(is_start.shape) < 0.1
    parts = 16 // length
    at = np.arange(parts)[:, None] * length + np.arange(length + 1)
    cut_start = is_start[:, at].reshape(-1, length + 1)
    tokens = rows.tokens[:, at].reshape(-1, length + 1)
    row, position = np.nonzero(cut_start)
    is_begun = np.isin(row // parts, list(BEGUN[begun]))
    short = Rows(tokens, row, position, np.zeros(12 * parts, dtype=np.uint64), is_begun)
    masked = is_masked[:, at].reshape(-1, length + 1)
    expected = make_batches(short, 3 * parts, attend, is_masked=masked)
    found = make_batches(rows, 3, attend, is_masked=is_masked, length=length)
    whole = make_batches(rows, 3, attend, is_masked=is_masked)
    assert len(found) == len(expected) == 4
    for ours, theirs, uncut in zip(found, expected, whole, strict=True):
        for name in ("input_ids", "labels", "segment_ids", "cu_seqlens"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).flags.c_contiguous
        assert ours.input_ids.shape == (3 * parts, length)
        assert ours.max_seqlen == theirs.max_seqlen
        assert np.array_equal(ours.sample_hashes, uncut.sample_hashes)
        for name in ("input_ids", "labels"):
            assert np.array_equal(getattr(ours, name).ravel(), getattr(uncut, name).ravel())


def test_padding_rows_have_no_target():
    rows, _ = random_rows(4)
    is_padding = np.array([False, False, True, True])
    first, second = make_batches(rows, 2, "within", is_padding)
    assert (first.labels != IGNORED).any()
    assert (second.labels == IGNORED).all()


def test_shapes_do_not_depend_on_the_documents():
    """Compiled blocks and pipeline engines see one shape, whatever the text."""
    none = cumulative_lengths(np.array([], dtype=int), 4, 256)
    some = cumulative_lengths(np.arange(5, 4 * 256, 60), 4, 256)
    assert none[0].shape == some[0].shape == (33,)
    assert none[1] == 256
    assert some[1] == 64


def test_documents_shorter_than_the_fixed_count_allows_are_all_kept():
    inner = np.array([i for i in range(64) if i % 16])
    ends, longest = cumulative_lengths(inner, 4, 16)
    assert ends[:65].tolist() == list(range(65))
    assert longest == 1
    assert len(ends) == 65
