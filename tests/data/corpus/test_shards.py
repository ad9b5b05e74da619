"""Reading across shards: the same tokens and document starts as one plain row would give."""

import gc
import os
import threading

import numpy as np
import pytest
from ranks import PATIENCE
from small_corpora import EOD, flip_byte, random_documents, write_corpus

from base.errors import UserError
from data.corpus.block_hashes import BlockHasher
from data.corpus.corpus import open_corpus
from data.corpus.indexed import check_shard
from data.corpus.shards import Split


def flat(documents):
    return np.concatenate([np.append(ids, EOD) for ids in documents])


def plain_starts(documents, start, count):
    """Document starts in a range, by counting."""
    begins = np.cumsum([0, *(len(ids) + 1 for ids in documents)])[:-1]
    return [int(b - start) for b in begins if start <= b < start + count]


@pytest.mark.parametrize("shard_bytes", [1 << 20, 200, 60])
def test_ranges_across_shards_give_the_tokens_and_starts_of_one_row(tmp_path, shard_bytes):
    documents = random_documents(60, 1, 30, seed=3)
    write_corpus(tmp_path, documents, shard_bytes=shard_bytes)
    split = open_corpus(tmp_path).splits["train"]
    row = flat(documents)
    assert split.num_tokens == len(row)
    rng = np.random.default_rng(0)
    for count in (1, 2, 17, 90, len(row)):
        start = rng.integers(0, len(row) - count + 1, 20)
        expected = np.stack([row[s : s + count] for s in start])
        assert np.array_equal(split.read(start, count), expected)
        rows, positions = split.document_starts(start, count)
        for number, s in enumerate(start):
            assert positions[rows == number].tolist() == plain_starts(documents, s, count)


def test_three_hundred_shards_are_read_with_few_files_open(tmp_path):
    documents = [[1 + i % 900, 2, 3] for i in range(300)]
    write_corpus(tmp_path, documents, shard_bytes=8)
    corpus = open_corpus(tmp_path)
    assert len(corpus.splits["train"].shards) == 300
    split = Split(corpus.splits["train"].shards, max_open=4)
    start = np.random.default_rng(0).permutation(300) * 4
    expected = flat(documents).reshape(300, 4)[start // 4]
    assert np.array_equal(split.read(start, 4), expected)
    assert np.array_equal(split.read(start, 4), expected)
    assert len(split._open) <= 4
    split.close()
    assert np.array_equal(split.read(start[:3], 4), expected[:3])


def test_a_split_that_is_dropped_gives_its_files_back(tmp_path):
    """A sweep checks one recipe after the other and closes none of their streams.

    Only files of this corpus count: other tests' objects may be collected in between.
    """

    def descriptors() -> int:
        targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(target.startswith(str(tmp_path)) for target in targets)

    write_corpus(tmp_path, random_documents(20, 1, 30, seed=3), shard_bytes=60)
    assert descriptors() == 0
    for _ in range(3):
        split = open_corpus(tmp_path).splits["train"]
        split.read(np.zeros(1, dtype=np.int64), split.num_tokens)
        assert descriptors() > 0
        del split
        gc.collect()
        assert descriptors() == 0


def test_empty_documents_and_empty_shards_make_no_extra_boundary(tmp_path):
    from index_bytes import encode

    for name, lengths in (("a", [2, 0, 0, 3]), ("b", []), ("c", [0, 4, 0])):
        (tmp_path / name).mkdir()
        offsets = np.concatenate([[0], np.cumsum(lengths)])[: len(lengths)].astype(int) * 2
        ids = np.arange(sum(lengths), dtype="<u2").tobytes()
        encode(tmp_path / name, 8, lengths, offsets.tolist(), range(len(lengths) + 1), ids)
        hasher = BlockHasher()
        hasher.update(memoryview(ids))
        (tmp_path / name / "s.xxh").write_bytes(hasher.side_file())
    split = Split([check_shard(tmp_path / name / "s") for name in "abc"])
    rows, positions = split.document_starts(np.array([0, 1, 4]), 5)
    assert [positions[rows == i].tolist() for i in range(3)] == [[0, 2], [1, 4], [1]]
    assert split.read(np.array([3]), 4).tolist() == [[3, 4, 0, 1]]


def test_several_sequences_of_one_document_have_one_start(tmp_path):
    from index_bytes import write

    write(tmp_path, [range(1, 8), [1, 2], [3]], max_sequence_items=3)
    split = Split([check_shard(tmp_path / "s")])
    _, positions = split.document_starts(np.array([0]), 10)
    assert positions.tolist() == [0, 7, 9]


def test_a_flipped_bit_is_found_at_first_touch_of_its_block_only(tmp_path, monkeypatch):
    monkeypatch.setattr("data.corpus.block_hashes.BLOCK_BYTES", 64)
    write_corpus(tmp_path, [np.arange(1, 200)])
    flip_byte(tmp_path / "train-00000.bin", 150)  # block 2: tokens 64 to 95
    split = open_corpus(tmp_path).splits["train"]
    assert split.read(np.array([0, 10]), 50).tolist()[0][0] == 1
    with pytest.raises(
        UserError, match=r"train-00000.bin: bytes 128 to 192 .*expected [0-9a-f]{16}"
    ):
        split.read(np.array([0, 60]), 5)
    with pytest.raises(UserError, match="damaged"):  # and again: a bad block never becomes good
        split.read(np.array([95]), 1)
    assert split.read(np.array([195]), 4).tolist() == [[196, 197, 198, 199]]
    with pytest.raises(UserError, match="damaged"):  # in the middle of a range with good ends
        split.read(np.array([0]), 199)


def test_a_file_cut_while_in_use_is_an_error_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("data.corpus.block_hashes.BLOCK_BYTES", 64)
    write_corpus(tmp_path, [np.arange(1, 200)])
    split = open_corpus(tmp_path).splits["train"]
    split.read(np.array([0]), 199)
    with open(tmp_path / "train-00000.bin", "r+b") as file:
        file.truncate(101)
    assert split.read(np.array([0]), 50)[0, 49] == 50
    with pytest.raises(UserError, match=r"train-00000.bin: expected 20 bytes at 90, found 11"):
        split.read(np.array([45]), 10)


def test_two_threads_read_the_same_tokens(tmp_path):
    documents = random_documents(200, 5, 20, seed=1)
    write_corpus(tmp_path, documents, shard_bytes=64)
    split = Split(open_corpus(tmp_path).splits["train"].shards, max_open=2)
    row, wrong = flat(documents), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            start = rng.integers(0, len(row) - 30, 4)
            if not np.array_equal(
                split.read(start, 30), np.stack([row[s : s + 30] for s in start])
            ):
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60 * PATIENCE)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
