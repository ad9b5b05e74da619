"""The ledger: what it writes, what a kill leaves, and hashes that depend on the text alone."""

import json
import os

import numpy as np
import pytest
import xxhash

from base.errors import UserError
from data.stream.ledger import (
    HAVE,
    STEPS_FILE,
    Ledger,
    batch_hash,
    in_batch_order,
    read_ledger,
    sample_hashes,
)
from record.records import LEDGER_HAVE


def append(ledger: Ledger, step: int) -> None:
    ledger.append(
        step=step,
        samples=(8 * (step - 1), 8 * step),
        batch_hash=f"{step:016x}",
        tokens=128,
        targets=120,
        sources={"prose": 8},
    )


def test_a_line_says_what_the_step_trained_on(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    append(ledger, 1)
    append(ledger, 2)
    ledger.close()
    first, second = read_ledger(tmp_path / "ledger")
    assert first == {
        "step": 1,
        "data_step": 0,
        "segment": 0,
        "samples": [0, 8],
        "batch_hash": f"{1:016x}",
        "tokens": 128,
        "targets": 120,
        "sources": {"prose": 8},
    }
    assert second["step"] == 2


def test_lines_can_be_made_durable_before_the_end(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    ledger = Ledger(tmp_path)
    append(ledger, 1)
    ledger.sync()
    assert synced == [str(tmp_path / STEPS_FILE)]


def test_a_torn_last_line_is_ignored_and_cut_before_the_next_append(tmp_path):
    ledger = Ledger(tmp_path)
    append(ledger, 1)
    append(ledger, 2)
    ledger.close()
    path = tmp_path / STEPS_FILE
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert [line["step"] for line in read_ledger(tmp_path)] == [1]
    again = Ledger(tmp_path)
    append(again, 2)
    again.close()
    assert path.read_bytes() == whole


def test_a_damaged_line_is_passed_over_and_stays(tmp_path):
    ledger = Ledger(tmp_path)
    for step in (1, 2, 3, 4):
        append(ledger, step)
    ledger.close()
    path = tmp_path / STEPS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"step": 2', b'"stop": 2'))
    assert [line["step"] for line in read_ledger(tmp_path)] == [1, 3, 4]
    Ledger(tmp_path, after_step=3).close()
    assert [line["step"] for line in read_ledger(tmp_path)] == [1, 3]
    assert path.read_bytes().count(b"\n") == 3


def test_a_flipped_value_is_found_by_its_digest_and_a_line_without_one_is_read(tmp_path):
    ledger = Ledger(tmp_path)
    for step in (1, 2):
        append(ledger, step)
    ledger.close()
    path = tmp_path / STEPS_FILE
    first, second = path.read_bytes().splitlines(keepends=True)
    old = json.loads(first)
    del old["digest"]
    path.write_bytes(json.dumps(old).encode() + b"\n" + second)
    assert [line["step"] for line in read_ledger(tmp_path)] == [1, 2]
    path.write_bytes(first + second.replace(b'"step": 2', b'"step": 3'))
    assert [line["step"] for line in read_ledger(tmp_path)] == [1]


def test_a_missing_ledger_is_refused(tmp_path):
    with pytest.raises(UserError, match="has recorded no step"):
        list(read_ledger(tmp_path))


def test_sample_hash_does_not_depend_on_the_storage_width():
    ids = np.array([[1, 2, 65535], [0, 7, 9]])
    expected = [xxhash.xxh3_64_intdigest(np.array(row, "<i4").tobytes()) for row in ids]
    for dtype in (np.uint16, np.int32, np.int64, np.uint32):
        assert sample_hashes(ids.astype(dtype)).tolist() == expected


def test_batch_hash_depends_on_samples_and_their_order_only():
    hashes = np.array([5, 2**64 - 1, 7], dtype=np.uint64)
    assert batch_hash(hashes) == xxhash.xxh3_64_hexdigest(hashes.astype("<u8").tobytes())
    assert batch_hash(hashes[::-1]) != batch_hash(hashes)


def test_gathered_hashes_return_to_batch_order():
    batch = np.arange(24)
    ranks, micro_steps, micro = 2, 4, 3
    gathered = batch.reshape(micro_steps, ranks, micro).transpose(1, 0, 2)
    assert np.array_equal(in_batch_order(gathered), batch)


def test_lines_are_plain_json_even_for_many_sources(tmp_path):
    ledger = Ledger(tmp_path)
    sources = {f"source-{i}": i for i in range(50)}
    ledger.append(
        step=3, samples=(0, 1), batch_hash="0", tokens=1, targets=1, sources=sources, segment=2
    )
    ledger.close()
    (line,) = (tmp_path / STEPS_FILE).read_text().splitlines()
    assert json.loads(line)["sources"] == sources
    assert json.loads(line)["segment"] == 2


def test_a_line_is_whole_to_its_writer_as_it_is_to_the_runs_verbs():
    assert set(LEDGER_HAVE) == HAVE
