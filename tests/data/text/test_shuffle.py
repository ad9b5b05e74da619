"""Documents that are shuffled while a corpus is made. That a kill changes no byte of it: see
test_ingest.py.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from digests import digest
from text_inputs import GOOD, build, json_lines, texts_of, write_files

from base.errors import UserError
from data.stream.order import forward
from data.text import ingest, shuffle, unit, unit_plan
from data.text.settings import read_settings


def test_shuffled_documents_are_the_same_ones_in_the_order_of_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_plan, "UNIT_BYTES", 300)
    monkeypatch.setattr(unit, "BATCH_CHARS", 120)
    files = {"a.jsonl": json_lines(GOOD[:25]), "b.jsonl": json_lines(GOOD[20:]), "c.txt": "text"}
    mixed = write_files(tmp_path / "in", files)
    build(mixed, tmp_path / "plain", "valid=0.2")
    words = ("valid=0.2", "shuffle=7")
    manifest = build(mixed, tmp_path / "c", *words)
    assert manifest["document_order"]["shuffled"] == 7
    for split in ("train", "valid"):
        plain = texts_of(tmp_path / "plain", split)
        seed = xxhash.xxh3_64_intdigest(f"documents1|7|{split}".encode())
        position = forward(np.arange(len(plain)), len(plain), seed).tolist()
        expected = [text for _, text in sorted(zip(position, plain, strict=True))]
        assert texts_of(tmp_path / "c", split) == expected != plain
    # What the side file says of a document is about the document that stands there.
    monkeypatch.setattr(shuffle, "HELD_ROWS", 3)

    def in_small_shards(units, selection, max_tokens, *rest):
        return shuffle.plan_shuffled(units, selection, 40, *rest)

    monkeypatch.setattr(ingest, "plan_shuffled", in_small_shards)
    many = build(mixed, tmp_path / "many", *words, "id=id")
    assert len(many["splits"]["train"]) > 5
    rows = [
        row
        for shard in many["splits"]["train"]
        for row in pq.read_table(tmp_path / "many" / f"{shard['name']}.docs.parquet").to_pylist()
    ]
    assert [row["document"] for row in rows] == list(range(len(rows)))
    for row, text in zip(rows, texts_of(tmp_path / "many"), strict=True):
        assert row["xxh3"] == xxhash.xxh3_128_digest(text.encode())
    assert texts_of(tmp_path / "many") == texts_of(tmp_path / "c")
    monkeypatch.setattr(unit_plan, "UNIT_BYTES", 1 << 20)
    build(mixed, tmp_path / "large", *words, "id=id")
    assert digest(tmp_path / "large") == digest(tmp_path / "many")
    other = build(mixed, tmp_path / "other", "valid=0.2", "shuffle=8")
    assert other["corpus_id"] != manifest["corpus_id"]


@pytest.mark.parametrize("seed", ["-1", str(2**63), "yes", "1.5"])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(UserError, match=f"shuffle={seed}: "):
        read_settings([f"shuffle={seed}"])
