"""Whole corpora from text: equal bytes for any number of workers and any kill, duplicates, what is
held out, filters, the report, provenance.
"""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
from digests import digest
from text_inputs import GOOD, build, gzipped, json_lines, texts_of, write_files, zstd

from base.errors import UserError
from commands import corpus
from data.corpus.corpus import open_corpus, read_manifest
from data.corpus.tokenizer import train_bpe
from data.text import ingest, inputs, unit, unit_plan
from data.text.duplicates import mark_first
from data.text.filters import Filters, class_counts
from data.text.settings import read_settings


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(unit_plan, "UNIT_BYTES", 300)
    monkeypatch.setattr(unit, "BATCH_CHARS", 120)


@pytest.fixture
def mixed(tmp_path):
    """A bit of everything: order, packing, duplicates across files, a sub-folder."""
    return write_files(
        tmp_path / "in",
        {
            "part-10.jsonl": json_lines(GOOD[20:] + GOOD[:5]),
            "part-2.jsonl": json_lines(GOOD[:15]),
            "a.jsonl.gz": gzipped(json_lines(GOOD[10:12]), json_lines(["gzip"])),
            "b/c.jsonl.zst": zstd(json_lines(["zstd"])) + zstd(json_lines(["zstd", "frame"])),
            "b/d.txt": "a text file\n\nwith a blank line",
        },
    )


def test_workers_and_units_do_not_change_a_byte(mixed, tmp_path, small_units, monkeypatch):
    words = ("valid=0.2", "shard_mib=1", "id=id")
    build(mixed, tmp_path / "one", *words)
    monkeypatch.setattr(ingest, "FEW_TEXT_BYTES", 0)
    for workers in (2, 7):
        # Shards of a small corpus are written without workers; once here with them.
        monkeypatch.setattr(ingest, "FEW_BYTES", 0 if workers == 2 else ingest.FEW_BYTES)
        build(mixed, tmp_path / f"w{workers}", *words, workers=workers)
        assert digest(tmp_path / f"w{workers}") == digest(tmp_path / "one")
    monkeypatch.setattr(unit_plan, "UNIT_BYTES", 1 << 20)
    build(mixed, tmp_path / "large", *words)
    assert digest(tmp_path / "large") == digest(tmp_path / "one")
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".work")] == []


def test_documents_keep_input_order_and_the_first_of_equals_stays(mixed, tmp_path, small_units):
    manifest = build(mixed, tmp_path / "c")
    expected = ["gzip", "zstd", "frame", "a text file\n\nwith a blank line"]
    expected = GOOD[10:12] + expected + [t for t in GOOD[:15] if t not in GOOD[10:12]] + GOOD[20:]
    assert texts_of(tmp_path / "c") == expected
    assert manifest["counts"]["duplicates"] == 1 + 2 + 5
    build(mixed, tmp_path / "all", "duplicates=keep")
    assert len(texts_of(tmp_path / "all")) == len(expected) + 8
    assert read_manifest(tmp_path / "all")["corpus_id"] != manifest["corpus_id"]


def test_every_row_is_accounted_for_by_file(mixed, tmp_path):
    write_files(mixed, {"e.jsonl": json_lines(["", "short", "12345 67890", "  "]) + b"\n{broken\n"})
    words = ("min_chars=8", "max_digits=0.5", "max_bad=3", "valid=0.2")
    manifest = build(mixed, tmp_path / "c", *words)
    lines = [json.loads(line) for line in (tmp_path / "c" / "inputs.jsonl").open()]
    assert [line["name"] for line in lines] == [
        "a.jsonl.gz",
        "b/c.jsonl.zst",
        "b/d.txt",
        "e.jsonl",
        "part-2.jsonl",
        "part-10.jsonl",
    ]
    keys = ("documents_train", "documents_valid", "duplicates", "aside_broken_json")
    keys += ("blank_documents", "too_short", "many_digits", "blank_lines")
    for line in [*lines, manifest]:
        counts = line["counts"]
        assert counts["rows"] == sum(counts.get(key, 0) for key in keys), line
    odd = lines[3]["counts"]
    assert (odd["blank_documents"], odd["too_short"], odd["many_digits"]) == (2, 1, 1)
    assert (odd["rows"], odd["blank_lines"], odd["aside_broken_json"]) == (6, 1, 1)
    aside = [json.loads(line) for line in (tmp_path / "c" / "quarantine.jsonl").open()]
    assert [(one["file"], one["row"], one["line"]) for one in aside] == [
        ("e.jsonl", 6, "{broken\n")
    ]
    corpus = open_corpus(tmp_path / "c")
    tokens = {name: split.num_tokens for name, split in corpus.splits.items()}
    counts = manifest["counts"]
    assert tokens == {"train": counts["tokens_train"], "valid": counts["tokens_valid"]}


def test_provenance_names_file_line_and_bytes_of_every_document(mixed, tmp_path, small_units):
    build(mixed, tmp_path / "c", "valid=0.3")
    entries = read_manifest(tmp_path / "c")["splits"]
    number = 0
    for split in ("train", "valid"):
        texts = texts_of(tmp_path / "c", split)
        rows = pq.read_table(tmp_path / "c" / f"{split}-00000.docs.parquet").to_pylist()
        assert [row["document"] for row in rows] == list(range(len(texts)))
        assert entries[split][0]["documents"] == len(texts)
        for row, text in zip(rows, texts, strict=True):
            assert (row["chars"], row["tokens"], row["split"]) == (len(text), len(text) + 1, split)
            path = mixed / row["source"]
            if path.suffix == ".jsonl":
                data = path.read_bytes()
                line = data.split(b"\n")[row["row"] - 1]
                assert data[row["byte_offset"] : row["byte_offset"] + row["bytes"]] == line + b"\n"
                assert json.loads(line)["text"] == text
                number += 1
    assert number == 35 - 2  # all lines of plain files but duplicates of the packed one


def test_held_out_is_by_text_and_never_overlaps(mixed, tmp_path):
    build(mixed, tmp_path / "c", "valid=0.3", "duplicates=keep")
    train, valid = (set(texts_of(tmp_path / "c", split)) for split in ("train", "valid"))
    assert train
    assert valid
    assert not train & valid
    # The same text is on the same side in another corpus.
    other = write_files(tmp_path / "other", {"x.jsonl": json_lines([*sorted(valid), "new text"])})
    build(other, tmp_path / "d", "valid=0.3")
    assert set(texts_of(tmp_path / "d", "valid")) >= valid


def test_a_file_of_texts_or_ids_says_what_is_held_out(tmp_path):
    rows = [{"id": i, "text": text} for i, text in enumerate([*GOOD[:10], GOOD[3]])]
    data = "".join(json.dumps(row) + "\n" for row in rows)
    source = write_files(tmp_path / "in", {"x.jsonl": data})
    held = tmp_path / "held"
    held.write_text(json.dumps({"text": GOOD[1]}) + "\n3\n\n99\n")
    words = (f"held_out={held}", "id=id", "duplicates=keep")
    manifest = build(source, tmp_path / "c", *words)
    # The copy of document 3 under another id is held out with it.
    assert sorted(texts_of(tmp_path / "c", "valid")) == sorted([GOOD[1], GOOD[3], GOOD[3]])
    assert not set(texts_of(tmp_path / "c")) & {GOOD[1], GOOD[3]}
    assert manifest["held_out"]["file_entries_not_in_the_input"] == 1
    with pytest.raises(UserError, match="name the field of the input that holds the id"):
        build(source, tmp_path / "d", words[0])
    held.write_text('{"name": 3}\n')
    with pytest.raises(UserError, match="held:1: has neither a text in 'text' nor an id in 'id'"):
        build(source, tmp_path / "d", *words)
    held.write_text("nobody\n")
    with pytest.raises(UserError, match="none of its 0 texts and 1 ids is in the input"):
        build(source, tmp_path / "d", *words)


@pytest.mark.parametrize("num", [1, 3])
def test_an_empty_part_is_refused_with_the_counts(tmp_path, num):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(GOOD[:num])})
    with pytest.raises(
        UserError, match=f"{num} for training and 0 for validation, of {num} document"
    ):
        build(source, tmp_path / "c", "valid=0.0001")
    build(source, tmp_path / "c", "valid=0")
    assert len(texts_of(tmp_path / "c")) == num
    with pytest.raises(UserError, match=rf"nothing to train on .*{num} too_short"):
        build(source, tmp_path / "d", "min_chars=1000")
    assert not (tmp_path / "d").exists()


def test_a_second_call_does_nothing_and_another_corpus_is_not_overwritten(tmp_path):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(GOOD)})
    build(source, tmp_path / "c")
    said = []
    build(source, tmp_path / "c", log=said.append)
    assert "nothing to do" in said[0]
    with pytest.raises(UserError, match="is a corpus already, of another input"):
        build(source, tmp_path / "c", "min_chars=3")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "x").write_text("precious")
    with pytest.raises(UserError, match="is there and is no corpus"):
        build(source, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "x").read_text() == "precious"


def test_a_failed_build_leaves_no_corpus_and_only_a_changed_file_is_read_again(
    tmp_path, monkeypatch
):
    source = write_files(
        tmp_path / "in", {"a.jsonl": json_lines(GOOD[:9]), "b.jsonl": b'{"text": 3}\n'}
    )
    logged = []
    with pytest.raises(UserError, match=r"b\.jsonl:1: field 'text' is a number"):
        build(source, tmp_path / "c", log=logged.append)
    assert sorted(os.listdir(tmp_path)) == [".c.work", "in"]
    assert f"finished work is kept in {tmp_path / '.c.work'}" in logged[-1]
    write_files(source, {"b.jsonl": json_lines(["mended"])})
    read = []
    plain = ingest.build_unit
    monkeypatch.setattr(
        ingest,
        "build_unit",
        lambda task, *r: (read.append(task.unit.files[0].name), plain(task, *r)),
    )
    build(source, tmp_path / "c")
    assert read == ["b.jsonl"]
    assert texts_of(tmp_path / "c") == [*GOOD[:9], "mended"]


def test_a_build_that_finished_nothing_leaves_no_work_folder(tmp_path):
    source = write_files(tmp_path / "in", {"b.jsonl": b'{"text": 3}\n'})
    with pytest.raises(UserError, match="field 'text' is a number"):
        build(source, tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_an_out_folder_inside_the_input_is_refused_and_nothing_of_it_is_called_removable(tmp_path):
    source = write_files(tmp_path / "in", {"a.jsonl": json_lines(GOOD)})
    for out in (source, source / "deep" / "c"):
        with pytest.raises(UserError, match=r"lies in IN=.*where the next build would read it"):
            build(source, out)
    assert os.listdir(source) == ["a.jsonl"]
    with pytest.raises(UserError, match=r"is there and is no corpus; name another folder$"):
        build(source / "*.jsonl", source)


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(GOOD)})
    plain = ingest.build_unit

    def slow(task, *rest):
        plain(task, *rest)
        write_files(source, {"x.jsonl": json_lines([*GOOD, "late"])})

    monkeypatch.setattr(ingest, "build_unit", slow)
    with pytest.raises(UserError, match=r"x\.jsonl: changed while it was being read"):
        build(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_two_builds_at_once_build_once_and_both_have_it(mixed, tmp_path, monkeypatch):
    built = []
    plain = ingest.build_unit
    monkeypatch.setattr(
        ingest, "build_unit", lambda task, *rest: (built.append(task), plain(task, *rest))
    )
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: build(mixed, tmp_path / "c"), range(2)))
    assert made[0] == made[1]
    assert len(built) == len({task.folder.name for task in built})


def test_a_full_disk_is_told_and_the_same_command_goes_on(mixed, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "write_shard", full)
        with pytest.raises(UserError, match="no space left on the disk; free some"):
            build(mixed, tmp_path / "c")
    said = []
    build(mixed, tmp_path / "c", log=said.append)
    assert "units are finished" in said[0]


def test_the_verb_refuses_what_is_missing_without_a_traceback(mixed, tmp_path, capsys):
    given = {"--in": str(mixed), "--out": str(tmp_path / "c"), "--tokenizer": "bytes"}
    for name, value, problem in (
        ("--in", "", "must be given"),
        ("--out", "..", "is not the name of a new folder"),
        ("--out", "", "must be given"),
        ("--tokenizer", str(tmp_path), "not found; a tokenizer is a folder"),
        ("--workers", "0", "WORKERS=0: is not 1 or more"),
        ("--in", str(tmp_path / "*.jsonl"), "there is no such file"),
    ):
        words = [word for pair in (given | {name: value}).items() for word in pair]
        assert corpus.main(words) == 93
        assert problem in capsys.readouterr().err
    assert corpus.main([word for pair in given.items() for word in pair] + ["valid=0"]) == 0
    assert "documents kept" in capsys.readouterr().out


def test_max_bad_is_a_limit_over_all_files_and_names_the_reasons(tmp_path):
    files = {f"{i}.jsonl": json_lines(GOOD[:3]) + b'{"text": null}\n[1]\n' for i in range(3)}
    source = write_files(tmp_path / "in", files)
    with pytest.raises(
        UserError, match=r"max_bad=5: more bad lines .*3 null_text, 3 not_an_object"
    ):
        build(source, tmp_path / "c", "max_bad=5")
    assert build(source, tmp_path / "c", "max_bad=6")["counts"]["bad"] == 6
    assert build(source, tmp_path / "d", "max_bad=-1")["counts"]["aside_null_text"] == 3


def test_shards_are_cut_between_documents_at_their_size(tmp_path):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(GOOD)})
    texts = [f"{i} " + "x" * 200_000 for i in range(8)]
    write_files(source, {"x.jsonl": json_lines([*texts, "y" * 700_000, "end"])})
    build(source, tmp_path / "c", "shard_mib=1")
    corpus = open_corpus(tmp_path / "c")
    assert [shard.num_documents for shard in corpus.splits["train"].shards] == [2, 2, 2, 2, 1, 1]
    assert texts_of(tmp_path / "c") == [*texts, "y" * 700_000, "end"]


def test_first_of_equals_is_found_in_buckets_of_any_size(tmp_path):
    rng = np.random.default_rng(3)
    words = rng.integers(0, 50, (1000, 2)).astype(np.uint64)
    words[:, 0] *= np.uint64(2**58)
    seen, expected = set(), []
    for row in map(tuple, words.tolist()):
        expected.append(row not in seen)
        seen.add(row)
    for size in (1, 7, 100, 5000):
        found = mark_first(np.array_split(words, 13), 1000, tmp_path / "x", size)
        assert found.tolist() == expected
    assert mark_first([], 0, tmp_path / "x").tolist() == []
    # One text over and over does not pile up.
    same = np.zeros((1000, 2), dtype=np.uint64)
    assert mark_first([same] * 5, 5000, tmp_path / "x", 100).sum() == 1


def test_filters_count_characters_by_class():
    assert class_counts("ab e\u0301 \u4e2d 12\u0663 .,\U0001f600\t\n") == [6, 5, 3, 3]
    filters = Filters(min_chars=3, max_chars=20, min_letters=0.5, max_digits=0.3, max_symbols=0.2)
    cases = {
        "ab": "too_short",
        "x" * 21: "too_long",
        "a ....": "few_letters",
        "abc12": "many_digits",
    }
    cases |= {"abc ab !!": "many_symbols", "abc def 1": None}
    assert {text: filters.reason(text) for text in cases} == cases
    assert Filters().reason("") is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["min_char=3"], "did you mean min_chars=?"),
        (["max_bad=-2", "valid=1"], r"(?s)valid=1.0: is not a share.*max_bad=-2"),
        (["min_letters=2", "max_digits=nan"], "max_digits=nan: is not a finite|is not"),
        (["engine=fast"], "engine=fast: is not one of auto"),
        (["duplicates=some"], "is not one of drop, keep"),
        (["bad_bytes=ignore"], "bad_bytes=ignore: is not one of stop, replace"),
        (["min_chars=1.5"], "min_chars=1.5: is not a whole number"),
        (["bos=perhaps"], "is neither true nor false"),
        (["text="], "text=: is empty"),
        (["held_out=/nowhere"], "held_out=/nowhere: there is no such file"),
        (["min_chars=9", "max_chars=3"], "expected 0 <= least <= most"),
        (["min_chars=9", "min_chars=3"], "min_chars is given twice"),
        (["shard_mib=0"], "shard_mib=0: is not in 1 to"),
    ],
)
def test_a_wrong_knob_is_refused_with_the_rule(words, problem):
    with pytest.raises(
        UserError, match=problem.replace("?", r"\?") if "did" in problem else problem
    ):
        read_settings(words)


def test_a_tokenizer_learns_only_from_what_a_corpus_trains_on(mixed, tmp_path):
    from data.text.train_tokenizer import train, training_texts

    build(mixed, tmp_path / "c", "valid=0.3", "duplicates=keep")
    files, settings = inputs.find_inputs(str(mixed)), read_settings(["valid=0.3"])
    assert sorted(training_texts(files, settings, 1.0)) == sorted(texts_of(tmp_path / "c"))
    some = list(training_texts(files, settings, 0.5))
    assert 0 < len(some) < len(texts_of(tmp_path / "c"))
    said = []
    tokenizer = train(str(mixed), 300, settings, said.append)
    assert tokenizer.definition == train_bpe(training_texts(files, settings, 1.0), 300).definition
    train(str(mixed), 60000, settings, said.append)
    assert "the text gives only" in said[-1]
    with pytest.raises(UserError, match="VOCAB=200: is not in 257 to"):
        train(str(mixed), 200, settings, said.append)
    write_files(mixed, {"e.jsonl": b"{broken\n"})
    with pytest.raises(UserError, match=r"e\.jsonl:1: is not JSON"):
        train(str(mixed), 300, settings, said.append)
