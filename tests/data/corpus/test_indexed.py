"""The .bin/.idx format: what we write, decoded by struct alone, and the dialects and damages we
read.
"""

import struct

import numpy as np
import pytest
from index_bytes import encode, write

from base.errors import UserError
from data.corpus.indexed import IndexView, check_shard, first_at_least, token_dtype
from data.corpus.shard_writer import ShardWriter

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 9, 9, 9, 9, 0]]


def decode(folder):
    """The index read with struct alone, as the format's table says: nothing of ours."""
    raw = (folder / "s.idx").read_bytes()
    magic, version, code, num_sequences, num_entries = struct.unpack_from("<9sQBQQ", raw, 0)
    at = 34
    lengths = struct.unpack_from(f"<{num_sequences}i", raw, at)
    at += 4 * num_sequences
    offsets = struct.unpack_from(f"<{num_sequences}q", raw, at)
    at += 8 * num_sequences
    documents = struct.unpack_from(f"<{num_entries}q", raw, at)
    assert at + 8 * num_entries == len(raw)
    return magic, version, code, lengths, offsets, documents


@pytest.mark.parametrize(("dtype", "code", "width"), [("<u2", 8, "H"), ("<i4", 4, "i")])
def test_written_files_hold_what_the_table_of_the_format_says(tmp_path, dtype, code, width):
    entry = write(tmp_path, DOCUMENTS, dtype)
    size = struct.calcsize(width)
    magic, version, found_code, lengths, offsets, documents = decode(tmp_path)
    assert (magic, version, found_code) == (b"MMIDIDX\0\0", 1, code)
    assert lengths == (4, 2, 6)
    assert offsets == (0, 4 * size, 6 * size)
    assert documents == (0, 1, 2, 3)
    flat = [i for ids in DOCUMENTS for i in ids]
    assert (tmp_path / "s.bin").read_bytes() == struct.pack(f"<{len(flat)}{width}", *flat)
    assert len((tmp_path / "s.idx").read_bytes()) == 42 + 20 * len(DOCUMENTS)
    assert (entry["tokens"], entry["documents"], entry["eod_count"]) == (12, 3, 3)
    assert (entry["min_id"], entry["max_id"]) == (0, 9)


def test_a_long_document_becomes_several_sequences_of_one_document(tmp_path):
    write(tmp_path, [range(1, 8), [1, 2]], max_sequence_items=3)
    *_, lengths, offsets, documents = decode(tmp_path)
    assert lengths == (3, 3, 1, 2)
    assert offsets == (0, 6, 12, 14)
    assert documents == (0, 3, 4)
    shard = check_shard(tmp_path / "s")
    assert (shard.num_tokens, shard.num_documents, shard.num_sequences) == (9, 2, 4)


def test_nothing_has_its_final_name_before_close_and_abort_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path / "s", np.dtype("<u2"), eod_id=0)
    writer.add(np.array([1, 2]))
    assert all(path.name.endswith(".tmp") for path in tmp_path.iterdir())
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_index_of_many_documents_is_the_same_through_the_spill(tmp_path, monkeypatch):
    """More values than the buffers hold, so that running sums cross chunks."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 9, n) for n in rng.integers(0, 12, 500)]
    monkeypatch.setattr("data.corpus.shard_writer.SPILL_ITEMS", 7)
    monkeypatch.setattr("data.corpus.shard_writer.CHUNK", 13)
    monkeypatch.setattr("data.corpus.indexed.CHUNK", 11)
    write(tmp_path, documents)
    *_, lengths, offsets, starts = decode(tmp_path)
    assert lengths == tuple(map(len, documents))
    assert offsets == tuple(2 * sum(lengths[:i]) for i in range(500))
    assert starts == tuple(range(501))
    assert check_shard(tmp_path / "s").num_tokens == sum(lengths)


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(2, "uint16"), (65535, "uint16"), (65536, "uint16"), (65537, "int32"), (70000, "int32")],
)
def test_width_is_chosen_from_the_largest_possible_id(vocab_size, name):
    assert token_dtype(vocab_size).name == name


def test_id_65541_survives_in_a_vocabulary_of_70000(tmp_path):
    write(tmp_path, [[65541, 0]], token_dtype(70000))
    assert np.fromfile(tmp_path / "s.bin", "<i4").tolist() == [65541, 0]


def test_ids_that_are_no_whole_numbers_are_refused(tmp_path):
    writer = ShardWriter(tmp_path / "s", np.dtype("<u2"), eod_id=0)
    with pytest.raises(UserError, match="token ids are float64, not whole numbers"):
        writer.add(np.array([1.0, 2.5]))
    writer.add(np.array([]))  # a document without tokens has no type
    writer.abort()


@pytest.mark.parametrize("bad", [65536, 65541, -1])
def test_an_id_that_does_not_fit_is_refused_never_wrapped(tmp_path, bad):
    writer = ShardWriter(tmp_path / "s", np.dtype("<u2"), eod_id=0)
    with pytest.raises(UserError, match=f"token id {bad} does not fit uint16"):
        writer.add(np.array([1, bad]))
    writer.abort()


@pytest.mark.parametrize(
    ("code", "written", "found"),
    [
        (1, "u1", "uint8"),
        (4, "<i4", "int32"),
        (5, "<i8", "int64"),
        (8, "<u2", "uint16"),  # Megatron
        (6, "<u2", "uint16"),  # DeepSpeed's data sampler ...
        (7, "<u4", "uint32"),
        (8, "<u8", "uint64"),
    ],
)
def test_type_is_what_the_size_of_the_bin_says(tmp_path, code, written, found):
    size = np.dtype(written).itemsize
    ids = np.arange(6).astype(written).tobytes()
    prefix = encode(tmp_path, code, [4, 2], [0, 4 * size], [0, 1, 2], ids)
    shard = check_shard(prefix)
    assert shard.dtype.name == found
    assert shard.num_tokens == 6


def test_a_type_that_fits_no_meaning_names_both(tmp_path):
    prefix = encode(tmp_path, 8, [4, 2], [0, 8], [0, 1, 2], b"\0" * 13)
    with pytest.raises(UserError, match=r"13 bytes.*uint16 as Megatron.*uint64 as DeepSpeed"):
        check_shard(prefix)
    prefix = encode(tmp_path, 9, [4, 2], [0, 8], [0, 1, 2], b"\0" * 12)
    with pytest.raises(UserError, match="type code from 1 to 8, found 9"):
        check_shard(prefix)


def test_multimodal_tail_and_several_sequences_per_document_are_read(tmp_path):
    prefix = encode(tmp_path, 8, [1, 2, 3], [0, 2, 6], [0, 2, 3], b"\0" * 12, tail=b"\0\1\0")
    shard = check_shard(prefix)
    assert (shard.num_documents, shard.num_sequences, shard.notes) == (2, 3, ())


def test_a_document_array_that_does_not_end_at_the_last_sequence_is_tolerated_aloud(tmp_path):
    prefix = encode(tmp_path, 8, [1, 2, 3], [0, 2, 6], [0, 1, 2], b"\0" * 12)
    shard = check_shard(prefix)
    assert shard.num_documents == 3
    assert "ends at 2, not at 3" in shard.notes[0]


def test_offsets_wrapped_past_2_gib_are_computed_again_and_reported(tmp_path):
    """A sparse .bin of 4 GiB, its offsets added up in int32 as under numpy 2."""
    lengths = [2**30, 2**29, 2**29, 10]
    true = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    wrapped = true.astype(np.int32).astype(np.int64)
    assert wrapped.min() < 0
    prefix = encode(tmp_path, 8, lengths, wrapped.tolist(), [0, 1, 2, 3, 4], b"")
    with open(tmp_path / "s.bin", "r+b") as file:
        file.truncate(2 * sum(lengths))
    shard = check_shard(prefix)
    assert shard.offsets.tolist() == true.tolist()
    assert "wrapped past 2**31" in shard.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(offsets=[0, 6]), "expected byte offset 8 for sequence 1, found 6"),
        (dict(offsets=[2, 8]), "expected byte offset 0 for sequence 0, found 2"),
        (dict(lengths=[7, -1]), "expected lengths >= 0, found -1 for sequence 1"),
        (dict(documents=[0, 2, 1]), "descending at document 2"),
        (dict(documents=[1, 1, 2]), "ascend from 0"),
        (dict(documents=[0, 1, 3]), "to 2 sequences"),
        (dict(magic=b"TNTIDX\0\0\0"), "old TNTIDX format"),
        (dict(magic=b"NOTANIDX\0"), "not a Megatron index"),
        (dict(tail=b"\0"), "expected 82 bytes"),
        (dict(lengths=[2**31 - 1, 2]), "found 12 bytes, expected 2147483649 tokens"),
    ],
)
def test_a_damaged_index_is_refused_with_what_was_expected_and_found(tmp_path, change, message):
    fields = dict(lengths=[4, 2], offsets=[0, 8], documents=[0, 1, 2]) | change
    prefix = encode(tmp_path, 8, ids=b"\0" * 12, **fields)
    with pytest.raises(UserError, match=message) as caught:
        check_shard(prefix)
    assert str(tmp_path / "s.") in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 33, 34, 60])
def test_a_cut_index_is_refused(tmp_path, size):
    prefix = encode(tmp_path, 8, [4, 2], [0, 8], [0, 1, 2], b"\0" * 12)
    whole = (tmp_path / "s.idx").read_bytes()
    (tmp_path / "s.idx").write_bytes(whole[:size])
    with pytest.raises(UserError, match=r"s\.idx: expected"):
        check_shard(prefix)


def test_search_in_an_unaligned_array_agrees_with_numpy(tmp_path):
    rng = np.random.default_rng(1)
    for size in (0, 1, 2, 3, 7, 8, 9, 100, 1000):
        lengths = rng.integers(0, 4, size)
        offsets = (np.cumsum(lengths) - lengths) * 2
        encode(tmp_path, 8, lengths, offsets, range(size + 1), b"\0" * int(lengths.sum()) * 2)
        view = IndexView(tmp_path / "s.idx", size, size + 1)
        wanted = rng.integers(-2, 2 * int(lengths.sum()) + 4, 50)
        expected = np.searchsorted(offsets, wanted)
        assert np.array_equal(first_at_least(view.offsets, wanted), expected)
