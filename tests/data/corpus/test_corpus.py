"""A corpus folder: its identity, its order, and every damage found before a token of it is used."""

import json
import os
import shutil

import numpy as np
import pytest
from small_corpora import flip_byte, random_documents, rewrite_manifest, write_corpus

from base.errors import UserError
from data.corpus.corpus import MANIFEST, ORDER_RULE, corpus_id, open_corpus, read_manifest


@pytest.fixture
def corpus(tmp_path):
    write_corpus(
        tmp_path / "c", random_documents(40, 3, 20), random_documents(5, 3, 9), shard_bytes=256
    )
    return tmp_path / "c"


def test_manifest_accounts_for_every_shard(corpus):
    manifest = read_manifest(corpus)
    assert len(manifest["splits"]["train"]) > 2
    assert sum(shard["documents"] for shard in manifest["splits"]["train"]) == 40
    assert sum(shard["documents"] for shard in manifest["splits"]["valid"]) == 5
    opened = open_corpus(corpus, vocab_size=1000)
    assert opened.corpus_id == manifest["corpus_id"]
    assert opened.splits["train"].num_documents == 40
    assert opened.notes == []


def test_a_shard_that_the_manifest_does_not_list_does_not_exist(corpus):
    before = open_corpus(corpus)
    for suffix in (".bin", ".idx", ".xxh"):
        shutil.copy(corpus / f"train-00000{suffix}", corpus / f"train-99999{suffix}")
    after = open_corpus(corpus)
    assert after.corpus_id == before.corpus_id
    assert after.splits["train"].num_tokens == before.splits["train"].num_tokens


def test_order_is_numeric_whatever_order_the_shards_were_made_in(tmp_path):
    """Shards 1, 2, 10, listed in two orders in two folders: same manifest, same id, same tokens."""
    ids = {}
    for folder, numbers in (("a", (1, 2, 10)), ("b", (10, 1, 2))):
        documents = [[i] * 7 for i in range(11)]
        manifest = write_corpus(tmp_path / folder, documents, shard_bytes=16)
        shards = manifest["splits"]["train"]
        for shard in shards:
            number = int(shard["name"][-5:])
            for suffix in (".bin", ".idx", ".xxh"):
                old = tmp_path / folder / (shard["name"] + suffix)
                os.rename(old, tmp_path / folder / f"part-{number}{suffix}")
            shard["name"] = f"part-{number}"
        kept = [shards[number] for number in numbers]
        manifest = rewrite_manifest(tmp_path / folder, manifest, splits={"train": kept})
        assert manifest["order_rule"] == ORDER_RULE
        opened = open_corpus(tmp_path / folder)
        ids[folder] = (opened.corpus_id, opened.splits["train"].read(np.array([0]), 24).tolist())
    assert ids["a"] == ids["b"]
    assert ids["a"][1][0][::8] == [1, 2, 10]


@pytest.mark.parametrize("kind", ["name", "symlink", "hardlink", "copy", "spelling"])
def test_the_same_shard_twice_is_refused(corpus, kind):
    manifest = read_manifest(corpus)
    shards = manifest["splits"]["train"]
    twin = dict(shards[0])
    if kind == "spelling":
        twin["name"] = "./train-00000"
    elif kind != "name":
        twin["name"] = "train-00099"
        make = {"symlink": os.symlink, "hardlink": os.link, "copy": shutil.copy}[kind]
        for suffix in (".bin", ".idx", ".xxh"):
            make(corpus / f"train-00000{suffix}", corpus / f"train-00099{suffix}")
    rewrite_manifest(corpus, manifest, splits={"train": [*shards, twin]})
    with pytest.raises(UserError, match=r"same shard|plain file names"):
        open_corpus(corpus)


def test_a_link_to_another_shard_is_the_same_file(corpus):
    """Even where the manifest claims other content: the file itself is compared."""
    manifest = read_manifest(corpus)
    shards = manifest["splits"]["train"]
    twin = dict(shards[0], name="train-00099", bin_xxh3="0" * 32)
    os.symlink(corpus / "train-00000.bin", corpus / "train-00099.bin")
    rewrite_manifest(corpus, manifest, splits={"train": [*shards, twin]})
    with pytest.raises(UserError, match=r"same shard as train-00000 \(equal file\)"):
        open_corpus(corpus)


def cut_one(path):
    os.truncate(path, path.stat().st_size - 1)


def cut_half(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".xxh"])
@pytest.mark.parametrize("damage", [cut_one, cut_half, empty, os.unlink])
def test_a_cut_empty_or_missing_file_is_refused_at_opening(corpus, suffix, damage):
    path = corpus / f"train-00001{suffix}"
    size = path.stat().st_size
    damage(path)
    found = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
    with pytest.raises(UserError) as caught:
        open_corpus(corpus)
    assert f"{path}: expected {size} bytes, found {found}" in str(caught.value)


@pytest.mark.parametrize("suffix", [".idx", ".xxh"])
def test_a_flipped_bit_in_an_index_or_side_file_is_refused_at_opening(corpus, suffix):
    path = corpus / f"train-00001{suffix}"
    flip_byte(path, path.stat().st_size - 3)
    with pytest.raises(UserError, match=rf"train-00001{suffix}: expected xxh3 \w+, found \w+"):
        open_corpus(corpus)


def test_all_damaged_files_are_named_together(corpus):
    os.unlink(corpus / "train-00000.bin")
    cut_one(corpus / "train-00001.idx")
    empty(corpus / "valid-00000.xxh")
    with pytest.raises(UserError) as caught:
        open_corpus(corpus)
    assert len(caught.value.problems) == 3


def test_swapped_shards_are_found(tmp_path):
    """Two shards of equal sizes and other tokens: the block hashes know."""
    write_corpus(tmp_path, [[1, 2, 3], [4, 5, 6]], shard_bytes=8)
    for suffix in (".bin", ".idx"):
        os.rename(tmp_path / f"train-00000{suffix}", tmp_path / "keep")
        os.rename(tmp_path / f"train-00001{suffix}", tmp_path / f"train-00000{suffix}")
        os.rename(tmp_path / "keep", tmp_path / f"train-00001{suffix}")
    split = open_corpus(tmp_path).splits["train"]  # equal sizes, equal indexes
    with pytest.raises(UserError, match=r"train-00000.bin: bytes 0 to 8 .* damaged"):
        split.read(np.array([0]), 4)


def test_a_stale_or_edited_manifest_is_refused(corpus):
    path = corpus / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"].pop()
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest.json: expected corpus_id \w+ .*, found \w+"):
        open_corpus(corpus)
    for text in ("{", '{"format": ' + "[" * 100_000):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a manifest"):
            open_corpus(corpus)
    path.write_text('{"format": "corpus-99"}')
    with pytest.raises(UserError, match="expected format corpus-1, found 'corpus-99'"):
        open_corpus(corpus)
    path.unlink()
    with pytest.raises(UserError, match=r"manifest.json: not found"):
        open_corpus(corpus)


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (["vocab_size"], "the field vocab_size is missing"),
        (["splits"], "the field splits is missing"),
        (["splits", "train"], "the field splits.train is missing"),
        (["splits", "train", 0, "bin_xxh3"], r"the field splits.train\[0\].bin_xxh3 is missing"),
    ],
)
def test_a_manifest_without_a_field_is_refused_by_name(corpus, drop, words):
    manifest = json.loads((corpus / MANIFEST).read_text())
    inner = manifest
    for key in drop[:-1]:
        inner = inner[key]
    del inner[drop[-1]]
    manifest["corpus_id"] = corpus_id(manifest)
    (corpus / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: {words}; build the corpus again"):
        open_corpus(corpus)


def test_a_manifest_with_a_value_of_another_type_or_no_number_is_refused(corpus):
    manifest = json.loads((corpus / MANIFEST).read_text())
    wrong = manifest | {"vocab_size": "many"}
    wrong["corpus_id"] = corpus_id(wrong)
    (corpus / MANIFEST).write_text(json.dumps(wrong))
    with pytest.raises(UserError, match="the field vocab_size is 'many'"):
        open_corpus(corpus)
    (corpus / MANIFEST).write_text(json.dumps(manifest | {"vocab_size": float("nan")}))
    with pytest.raises(UserError, match=r"manifest.json: is not a manifest: .*NaN is not JSON"):
        open_corpus(corpus)


def test_identity_covers_content_and_leaves_out_what_may_differ(corpus):
    manifest = read_manifest(corpus)
    same = rewrite_manifest(corpus, manifest, made_with={"python": "9.9"})
    assert same["corpus_id"] == manifest["corpus_id"]
    other = rewrite_manifest(corpus, manifest, eod_id=1)
    assert other["corpus_id"] != manifest["corpus_id"]


@pytest.mark.parametrize("largest", [101, 500])
def test_an_id_at_or_above_the_models_vocabulary_is_refused(tmp_path, largest):
    write_corpus(tmp_path, [[1, largest, 2]], vocab_size=600)
    with pytest.raises(UserError, match=rf"model.vocab_size=101 .* largest token id is {largest}"):
        open_corpus(tmp_path, vocab_size=101)
    assert open_corpus(tmp_path, vocab_size=largest + 1)


def test_documents_without_their_end_id_are_refused(corpus):
    manifest = read_manifest(corpus)
    for shard in manifest["splits"]["train"]:
        shard["eod_count"] = shard["documents"] - 1
    rewrite_manifest(corpus, manifest)
    with pytest.raises(UserError, match="expected an end id 0 for each of"):
        open_corpus(corpus)


def test_a_manifest_that_contradicts_its_index_is_refused(corpus):
    manifest = read_manifest(corpus)
    manifest["splits"]["train"][0]["documents"] += 1
    rewrite_manifest(corpus, manifest)
    with pytest.raises(UserError, match=r"train-00000.idx: expected .*documents"):
        open_corpus(corpus)


def test_a_read_only_corpus_opens_and_nothing_is_written_beside_it(corpus):
    before = sorted(path.name for path in corpus.iterdir())
    os.chmod(corpus, 0o555)
    try:
        open_corpus(corpus).splits["train"].read(np.array([0]), 10)
    finally:
        os.chmod(corpus, 0o755)
    assert sorted(path.name for path in corpus.iterdir()) == before
