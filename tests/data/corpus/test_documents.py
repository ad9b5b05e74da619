"""Document rules: what is changed, dropped, counted, refused, and what stays as it is."""

from collections import Counter

import pytest

from base.errors import UserError
from data.corpus.documents import Document, clean_text, pieces_of


def clean(data, **options):
    counts = Counter()
    return clean_text(Document("file.txt", data), counts, **options), dict(counts)


def test_lf_crlf_and_byte_order_mark_give_the_same_text():
    text = "one\ntwo\n\nthree"
    assert clean(text.encode()) == (text, {})
    assert clean(text.replace("\n", "\r\n").encode()) == (text, {"newlines": 3})
    assert clean(text.encode("utf-8-sig")) == (text, {"byte_order_mark": 1})
    assert clean("\ufeff" + text) == (text, {"byte_order_mark": 1})


def test_control_characters_marks_and_other_line_ends_are_kept():
    text = "a\x00b\t\x0b\x1f \u2028\u2029\x85 lone\rcr \u200f e\u0301 \U0001f600 \ufeff inside"
    assert clean(text.encode()) == (text, {})


@pytest.mark.parametrize("blank", [b"", b" \t\r\n ", "\u3000\u2028", b"\xef\xbb\xbf", "\r\n"])
def test_blank_documents_are_dropped_and_counted(blank):
    text, counts = clean(blank)
    assert text is None
    assert counts["blank_documents"] == 1


def test_lone_surrogates_become_the_replacement_character_and_are_counted():
    text, counts = clean("a\ud83d b\udc00")
    assert text == "a\ufffd b\ufffd"
    assert counts == {"lone_surrogates": 2}
    text.encode("utf-8")


def test_bad_bytes_stop_with_place_or_are_replaced_and_counted():
    with pytest.raises(UserError, match=r"file.txt: byte 0xff at offset 4 is not UTF-8"):
        clean(b"good\xffbad")
    assert clean(b"good\xffbad", bad_bytes="replace") == ("good\ufffdbad", {"bad_bytes": 1})
    with pytest.raises(UserError, match="bad_bytes='ignore' is not one of stop, replace"):
        clean(b"good", bad_bytes="ignore")


def test_a_name_that_is_no_text_can_be_printed_and_written():
    assert Document("caf\udce9.txt", b"").name == "caf\ufffd.txt"


def test_long_text_is_cut_after_newlines_and_loses_nothing():
    text = "".join(f"line {i}\n" for i in range(1000)) + "x" * 500
    pieces = list(pieces_of(text, limit=100))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 100
    assert all(piece.endswith("\n") for piece in pieces[:50])
    assert list(pieces_of("", 10)) == [""]
    assert list(pieces_of("x" * 25, 10)) == ["x" * 10, "x" * 10, "x" * 5]
    assert list(pieces_of("\n" + "x" * 12, 10)) == ["\n", "x" * 10, "xx"]
