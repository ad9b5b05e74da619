"""Every kind of bad or odd input: which files, which order, what becomes of each line."""

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_inputs import GOOD, build, gzipped, json_lines, texts_of, write_files, zstd
from word_tokenizers import word_tokenizer

from base.errors import UserError
from data.corpus.corpus import BEGIN_STORED, open_corpus
from data.corpus.tokenizer import byte_tokenizer, load_tokenizer, open_tokenizer
from data.text import reading, unit, unit_plan
from data.text.encoding import Encoder
from data.text.inputs import find_inputs
from data.text.reading import lines_in, read_unit
from data.text.settings import read_settings
from data.text.unit_plan import Unit, plan_units


def records(source, *words):
    settings = read_settings(words)
    files = find_inputs(str(source), settings.kind)
    found = []
    for one in plan_units(files, settings.document):
        found += read_unit(one, settings, lambda count: None)
    return found


def texts(source, *words):
    return [
        one.data.decode() if isinstance(one.data, bytes) else one.data
        for one in records(source, *words)
    ]


# Which files


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("x.jsonl.gz", gzipped(json_lines(GOOD))[:-9], "cannot be read to its end"),
        ("x.jsonl.gz", json_lines(GOOD), r"named .gz but begins with b'\{\"te'"),
        ("x.jsonl", gzipped(json_lines(GOOD)), r"holds .gz data; rename it to x.jsonl.gz"),
        ("x.jsonl.gz", gzipped(json_lines(GOOD)) + b"rest", "cannot be read to its end"),
        ("x.jsonl.zst", zstd(json_lines(GOOD))[:-5], "cannot be read to its end"),
        ("x.jsonl.zst", gzipped(b"x"), r"named .zst but begins with"),
        ("x.txt", zstd(b"x"), r"holds .zst data"),
        ("x.txt.gz", gzipped(b"text")[:12], "cannot be read to its end"),
        ("x.jsonl", "text".encode("utf-16"), "is UTF-16; convert it: iconv"),
        ("x.txt", "text".encode("utf-32"), "is UTF-32; convert it: iconv"),
        ("x.parquet", b"PAR1 no table PAR1", "is no whole Parquet|cannot be read to its end"),
        ("x.parquet", b"", "is no whole Parquet file|cannot be read"),
    ],
)
@pytest.mark.parametrize("words", [(), ("max_bad=-1",)])
def test_a_damaged_or_mislabelled_file_stops_the_build_with_its_name(
    tmp_path, name, data, problem, words
):
    source = write_files(tmp_path / "in", {"good.jsonl": json_lines(GOOD), name: data})
    with pytest.raises(UserError, match=rf"{name}: .*{problem}|{name}: {problem}"):
        build(source, tmp_path / "c", *words)
    assert not (tmp_path / "c").exists()


def test_members_and_frames_are_read_in_full_and_empty_files_are_no_documents(tmp_path):
    source = write_files(
        tmp_path / "in",
        {
            "a.jsonl.gz": gzipped(json_lines(["one"]), json_lines(["two"])),
            # The frame in front is one to be passed over, as pzstd writes it.
            "b.jsonl.zst": b"\x50\x2a\x4d\x18\4\0\0\0size"
            + zstd(json_lines(["three"]))
            + zstd(json_lines(["four"])),
            "c.jsonl.gz": b"",
            "d.jsonl.zst": b"",
            "e.jsonl": b"",
            "f.txt": b"",
            "g.jsonl.gz": gzipped(b""),
        },
    )
    build(source, tmp_path / "c")
    assert texts_of(tmp_path / "c") == ["one", "two", "three", "four"]
    lines = [json.loads(line) for line in (tmp_path / "c" / "inputs.jsonl").open()]
    assert [line["counts"].get("rows", 0) for line in lines] == [1 + 1, 2, 0, 0, 0, 1, 0]
    assert lines[5]["counts"]["blank_documents"] == 1


# What becomes of a line


BAD_LINES = {
    b'{"text": "cut': ("broken_json", "is not JSON"),
    b"not json": ("broken_json", "is not JSON"),
    b"\x00" * 20: ("broken_json", "is not JSON"),
    b'{"text": "a"} {"text": "b"}': ("broken_json", "Extra data"),
    b'{"text": "a", "text": "b"}': ("broken_json", "appears more than once"),
    b'{"x": ' + b"[" * 100_000 + b"}": ("broken_json", "is not JSON"),
    b'["a"]': ("not_an_object", "holds a list"),
    b'"text"': ("not_an_object", "holds text"),
    b'{"body": "b"}': ("no_field", r"has no field 'text' \(it has 'body'\)"),
    b'{"text": null}': ("null_text", "is null"),
    b'{"text": 7}': ("not_text", r"is a number \(7\), expected text"),
    b'{"text": true}': ("not_text", "is true or false"),
    b'{"text": ["a"]}': ("not_text", "is a list"),
    b'{"text": "a\xffb"}': ("bad_bytes", "byte 0xff at 11 of the line is not UTF-8"),
    b'{"text": "\xed\xa0\x80"}': ("bad_bytes", "is not UTF-8"),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode("latin-1"))
def test_a_bad_line_stops_with_file_and_line_or_is_put_aside_and_counted(tmp_path, line):
    reason, problem = BAD_LINES[line]
    good = json_lines(["good"])
    source = write_files(tmp_path / "in", {"x.jsonl": good + line + b"\n" + json_lines(["last"])})
    with pytest.raises(UserError, match=rf"(?s)in/x\.jsonl:2: .*{problem}.*max_bad=100"):
        build(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    counts = build(source, tmp_path / "c", "max_bad=1")["counts"]
    assert counts["bad"] == counts[f"aside_{reason}"] == 1
    assert texts_of(tmp_path / "c") == ["good", "last"]
    (aside,) = [json.loads(one) for one in (tmp_path / "c" / "quarantine.jsonl").open()]
    assert (aside["file"], aside["row"], aside["byte_offset"]) == ("x.jsonl", 2, len(good))
    assert (aside["reason"], aside["bytes"]) == (reason, len(line) + 1)


def test_the_line_number_of_an_error_counts_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_plan, "UNIT_BYTES", 200)
    data = json_lines(GOOD[:30]) + b"\n" + b"broken\n" + json_lines(GOOD[30:])
    source = write_files(tmp_path / "in", {"x.jsonl": data})
    with pytest.raises(UserError, match=r"x\.jsonl:32: is not JSON"):
        build(source, tmp_path / "c")
    build(source, tmp_path / "c", "max_bad=1")
    (aside,) = [json.loads(one) for one in (tmp_path / "c" / "quarantine.jsonl").open()]
    assert aside["row"] == 32
    rows = pq.read_table(tmp_path / "c" / "train-00000.docs.parquet")["row"].to_pylist()
    assert rows == [*range(1, 31), *range(33, 43)]


def test_lines_end_at_line_feed_alone_and_crlf_and_bom_change_nothing(tmp_path):
    odd = [
        "a\u2028b\u2029c\u0085d",
        "tab\t\x0b\x1f nul \x00 end",
        "\U0001f600 e\u0301 \u200f\u05d0",
    ]
    plain = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in odd).encode()
    plain += json_lines(["lone\rcr", "last"])
    files = {
        "lf": plain,
        "crlf": plain.replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + plain,
        "open": plain[:-1],
    }
    tokens = set()
    for name, data in files.items():
        source = write_files(tmp_path / name, {"x.jsonl": data})
        build(source, tmp_path / f"c-{name}")
        assert texts_of(tmp_path / f"c-{name}") == [*odd, "lone\rcr", "last"]
        tokens.add((tmp_path / f"c-{name}" / "train-00000.bin").read_bytes())
    assert len(tokens) == 1


def test_lone_surrogates_and_bad_bytes_are_replaced_and_counted(tmp_path):
    data = b'{"text": "a\\ud83d b"}\n{"text": "c\xffd"}\n{"text": "\\ud83d\\ude00"}\n'
    source = write_files(tmp_path / "in", {"x.jsonl": data, "y.txt": b"e\xfff"})
    with pytest.raises(UserError, match=r"x.jsonl:2: byte 0xff at 11 of the line"):
        build(source, tmp_path / "c")
    counts = build(source, tmp_path / "c", "bad_bytes=replace")["counts"]
    assert texts_of(tmp_path / "c") == ["a\ufffd b", "c\ufffdd", "\U0001f600", "e\ufffdf"]
    assert (counts["lone_surrogates"], counts["bad_bytes"]) == (1, 2)
    with pytest.raises(UserError, match=r"y.txt:1: byte 0xff at 1 of it is not UTF-8"):
        build(source / "y.txt", tmp_path / "d")


def test_lines_of_units_add_up_wherever_a_unit_begins(tmp_path):
    data = b"one\n\n" + b"x" * 50 + b"\ntwo\nlast without end"
    path = tmp_path / "x"
    path.write_bytes(data)
    with open(path, "rb") as stream:
        whole = list(lines_in(stream, 0, None))
        assert b"".join(line for _, line in whole) == data
        for size in range(1, len(data) + 1):
            found = []
            for low in range(0, len(data), size):
                stream.seek(0)
                found += lines_in(stream, low, min(low + size, len(data)))
            assert found == whole, size


def test_a_line_beyond_the_limit_is_a_bad_line_and_the_next_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 1000)
    long = json_lines(["x" * 3000])
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(["a"]) + long + json_lines(["b"])})
    with pytest.raises(UserError, match=r"x.jsonl:2: is longer than 1000 bytes"):
        build(source, tmp_path / "c")
    assert build(source, tmp_path / "c", "max_bad=1")["counts"]["aside_too_long_line"] == 1
    assert texts_of(tmp_path / "c") == ["a", "b"]
    long_text = write_files(tmp_path / "long", {"x.txt": "y" * 1001})
    with pytest.raises(UserError, match=r"x.txt:1: is longer than 1000 bytes: cut it"):
        build(long_text, tmp_path / "d")


# Text files and tables


def test_text_files_are_cut_as_said(tmp_path):
    data = "\ufeffone\ntwo\r\n\r\n \nthree\n<|end|>four\n"
    source = write_files(tmp_path / "in", {"x.txt": data, "y.txt.gz": gzipped(b"packed\n\nagain")})
    assert texts(source) == [data, "packed\n\nagain"]
    assert texts(source, "document=blank") == [
        "\ufeffone\ntwo\r\n",
        "three\n<|end|>four\n",
        "packed\n",
        "again",
    ]
    assert texts(source, "document=line")[:4] == ["\ufeffone", "two", "", " "]
    assert texts(source, "document=<|end|>")[:2] == [data.split("<|end|>")[0], "four\n"]
    found = records(source, "document=<|end|>")
    assert [(one.row, one.offset) for one in found[:2]] == [
        (1, 0),
        (6, data.encode().index(b"four")),
    ]
    assert texts(source, r"document=\n\n")[1:] == ["packed", "again"]
    for rule in ("line", "blank", "file", "<|end|>"):
        build(source, tmp_path / f"c{rule[:2]}", f"document={rule}")
        assert not any("\ufeff" in text for text in texts_of(tmp_path / f"c{rule[:2]}"))


def test_a_delimiter_across_two_reads_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 7)
    source = write_files(tmp_path / "in", {"x.txt": "<sep>".join(GOOD)})
    assert texts(source, "document=<sep>") == GOOD


TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.dictionary(pa.int32(), pa.string()),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_parquet_columns_of_every_text_type_are_read(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(unit_plan, "UNIT_BYTES", 200)
    values = pa.array(GOOD)
    values = values.cast(kind) if not pa.types.is_dictionary(kind) else values.dictionary_encode()
    (tmp_path / "in").mkdir()
    table = pa.table({"n": list(range(40)), "body": values})
    pq.write_table(table, tmp_path / "in" / "x.parquet", row_group_size=7)
    files = find_inputs(str(tmp_path / "in"))
    assert len(plan_units(files, "file")) > 1
    found = records(tmp_path / "in", "text=body", "id=n")
    assert [one.row for one in found] == list(range(40))
    assert [one.id for one in found] == [str(i) for i in range(40)]
    assert texts(tmp_path / "in", "text=body") == GOOD


def test_parquet_rows_without_text_and_wrong_columns_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "x.parquet"
    pq.write_table(pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), path)
    with pytest.raises(UserError, match=r"x.parquet row 1: column 'text' is null"):
        build(path, tmp_path / "c")
    assert build(path, tmp_path / "c", "max_bad=1")["counts"]["aside_null_text"] == 1
    with pytest.raises(UserError, match=r"has no column 'body'; name one of text, n"):
        build(path, tmp_path / "d", "text=body")
    with pytest.raises(UserError, match=r"column 'n' holds int64, expected text"):
        build(path, tmp_path / "d", "text=n")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), path)
    with pytest.raises(UserError, match="has more than one column 'text'"):
        build(path, tmp_path / "d")
    pq.write_table(pa.table({"text": pa.array([b"a\xff"])}), path)
    with pytest.raises(UserError, match=r"x.parquet row 0: byte 0xff at 1"):
        build(path, tmp_path / "d")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"is no whole Parquet|cannot be read to"):
        build(path, tmp_path / "d")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="nothing to train on"):
        build(path, tmp_path / "d")


def test_a_local_data_set_is_read_by_rows_in_its_own_order(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(unit_plan, "UNIT_ROWS", 9)
    table = datasets.Dataset.from_dict({"text": GOOD, "id": list(range(40))})
    mixed = table.select(list(range(39, -1, -1)))  # an order that is not that of the file
    mixed.save_to_disk(tmp_path / "set")
    build(tmp_path / "set", tmp_path / "c", "id=id")
    assert texts_of(tmp_path / "c") == GOOD[::-1]
    rows = pq.read_table(tmp_path / "c" / "train-00000.docs.parquet").to_pylist()
    assert [(row["source"], row["row"], row["id"]) for row in rows[:2]] == [
        ("set", 0, "39"),
        ("set", 1, "38"),
    ]
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "dict")
    with pytest.raises(UserError, match=r"holds the splits train, test .* IN=.*dict/train"):
        build(tmp_path / "dict", tmp_path / "d")
    write_files(tmp_path / "broken", {"dataset_dict.json": "{"})
    with pytest.raises(UserError, match=r"holds the splits \(none\) of a data set"):
        build(tmp_path / "broken", tmp_path / "d")
    with pytest.raises(UserError, match="has no column 'body'"):
        build(tmp_path / "set", tmp_path / "d", "text=body")
    (next((tmp_path / "set").glob("*.arrow"))).write_bytes(b"cut")
    reading.open_dataset.cache_clear()
    with pytest.raises(UserError, match=r"set: `datasets` cannot open it"):
        build(tmp_path / "set", tmp_path / "d")


# Large and special


def test_a_large_document_is_one_document(tmp_path):
    """50 MB, by a tokenizer of long words, so that it is quick."""
    words = ["[UNK]", "w" * 999, "</s>"]
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "t", words, eos="</s>"))
    large = ("w" * 999 + "\n") * 50_000
    source = write_files(
        tmp_path / "in", {"x.txt": large, "y.jsonl": json_lines(["w", "w " + large])}
    )
    manifest = build(source, tmp_path / "c", tokenizer=tokenizer)
    split = open_corpus(tmp_path / "c").splits["train"]
    ids = split.read(np.array([0]), split.num_tokens)[0]
    pieces = [[1] * 50_000, [0], [0] + [1] * 50_000]
    assert ids.tolist() == [i for one in pieces for i in [*one, 2]]
    assert manifest["counts"]["long_documents"] == 2
    assert manifest["counts"]["unknown_tokens"] == 2
    longest = manifest["longest_document"]
    assert (longest["file"], longest["row"], longest["tokens"]) == ("y.jsonl", 2, 50_002)


def test_a_word_of_a_million_characters_is_tokenized(tmp_path):
    word = "w" * 1_000_000
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines([word, "a"])})
    build(source, tmp_path / "c")
    assert texts_of(tmp_path / "c") == [word, "a"]


def test_a_units_memory_does_not_grow_with_it(tmp_path, monkeypatch):
    """A unit writes a batch at a time: what is held does not depend on how much it reads."""
    monkeypatch.setattr(unit, "BATCH_CHARS", 1 << 15)
    settings, peaks = read_settings(["valid=0"]), []
    for number, size in enumerate((100, 100, 400)):
        texts = json_lines([f"{i} " + "text " * 1000 for i in range(size)])
        source = write_files(tmp_path / f"in{number}", {"x.jsonl": texts})
        (one,) = find_inputs(str(source))
        task = unit.UnitTask(Unit((one,), 0, one.bytes), tmp_path / f"k{number}", settings)
        tracemalloc.start()
        unit.build_unit(task, Encoder(byte_tokenizer(), "tokenizers"), lambda count: None)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1], peaks


@pytest.mark.parametrize(
    ("size", "dtype"), [(65535, "uint16"), (65536, "uint16"), (65537, "int32")]
)
def test_the_type_follows_the_largest_possible_id_and_ids_survive(tmp_path, size, dtype):
    words = ["[UNK]", *(f"w{i}" for i in range(size - 2)), "</s>"]
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "t", words, eos="</s>"))
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines([f"w{size - 3} w0", "w1"])})
    manifest = build(source, tmp_path / "c", tokenizer=tokenizer)
    assert (manifest["dtype"], manifest["vocab_size"]) == (dtype, size)
    split = open_corpus(tmp_path / "c").splits["train"]
    ids = split.read(np.array([0]), split.num_tokens)[0].tolist()
    assert ids == [size - 2, 1, size - 1, 2, size - 1]


# Special tokens


def test_strings_of_special_tokens_are_text_and_a_tokenizer_that_cannot_is_refused(tmp_path):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(["a <|endoftext|> b", "c"])})
    counts = build(source, tmp_path / "c")["counts"]
    assert counts["special_token_strings"] == 1
    assert texts_of(tmp_path / "c") == ["a <|endoftext|> b", "c"]
    # An end token that is a plain word of the vocabulary: its string in text would end a document.
    words = word_tokenizer(tmp_path / "t", ["[UNK]", "cat", "end"])
    tokenizer = load_tokenizer(words, eod_token="end")
    source = write_files(tmp_path / "ends", {"x.jsonl": json_lines(["cat", "the end cat"])})
    with pytest.raises(
        UserError, match=r"x.jsonl:2: the tokenizer reads text as the special token"
    ):
        build(source, tmp_path / "d", tokenizer=tokenizer)
    counts = build(source, tmp_path / "d", "max_bad=1", tokenizer=tokenizer)["counts"]
    assert counts["aside_special_token_id"] == 1
    (aside,) = [json.loads(one) for one in (tmp_path / "d" / "quarantine.jsonl").open()]
    assert aside["line"] == "the end cat"


def test_begin_tokens_are_put_where_asked_and_refused_where_there_is_none(tmp_path):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(["cat", "dog"])})
    folder = word_tokenizer(tmp_path / "t", ["[UNK]", "cat", "dog", "<s>", "</s>"], eos="</s>")
    with pytest.raises(UserError, match="bos=true: the tokenizer has no begin token"):
        build(source, tmp_path / "c", "bos=true", tokenizer=load_tokenizer(folder))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    manifest = build(source, tmp_path / "c", "bos=true", tokenizer=load_tokenizer(folder))
    split = open_corpus(tmp_path / "c").splits["train"]
    assert split.read(np.array([0]), 6)[0].tolist() == [3, 1, 4, 3, 2, 4]
    assert (manifest["begin_id"], manifest["begin_policy"]) == (3, BEGIN_STORED)
    none = word_tokenizer(tmp_path / "n", ["[UNK]", "cat"])
    with pytest.raises(UserError, match="has no end token"):
        open_tokenizer(str(none))


def test_a_web_page_in_a_text_file_is_no_document(tmp_path):
    """A download that failed leaves the page of the error (datasets#7718)."""
    page = "\n <!DOCTYPE html>\n<html><title>404 Not Found</title></html>\n"
    files = {"a.txt": "An ordinary document about <html> tags.", "b.txt": page}
    source = write_files(tmp_path / "in", files)
    with pytest.raises(UserError, match=r"b.txt:1: is a web page, as a failed download leaves it"):
        build(source, tmp_path / "c", "valid=0")
    assert build(source, tmp_path / "d", "max_bad=1", "valid=0")["counts"]["aside_web_page"] == 1
    assert texts_of(tmp_path / "d") == [files["a.txt"]]
