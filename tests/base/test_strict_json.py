"""One rule for JSON files, and refusals that name line and column."""

from __future__ import annotations

import json

import pytest

from base import strict_json
from base.errors import UserError


def problem(tmp_path, raw: bytes) -> str:
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(UserError) as caught:
        strict_json.read(path, "x.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": 1, // why\n  "b": 2\n}', "line 2 column 11: comments are not JSON"),
        ('{"a": 1 /* why */}', "line 1 column 9: comments are not JSON"),
        ('{\n  # why\n  "a": 1\n}', "line 2 column 3: comments are not JSON"),
        ('{\n  "a": 1,\n}', "line 2 column 9: a trailing comma"),
        ('{"a": [1, 2, ]}', "line 1 column 12: a trailing comma"),
        ('{"a": {"b": 1,\n "b": 2}}', 'line 2 column 2: key "b" is given twice'),
        ('{"a": 1, "\\u0061": 2}', "line 1 column 10: key "),
        ('{"a": NaN}', "line 1 column 7: NaN is not JSON"),
        ('{"a": 1,\n"b": %s}' % ("9" * 5000), "line 2 column 6: a number of too many digits"),
        ("[1]", "line 1 column 1: must be an object"),
        ("", "line 1 column 1"),
        ('{"a": 1', "line 1 column 8"),
    ],
)
def test_what_is_not_plain_json_is_refused_with_its_place(text, expected, tmp_path):
    assert problem(tmp_path, text.encode()).startswith(f"x.json: {expected}")


def test_a_byte_order_mark_and_bad_utf8_are_refused(tmp_path):
    assert "line 1 column 1: a byte-order mark" in problem(tmp_path, b'\xef\xbb\xbf{"a": 1}')
    assert "line 2 column 3: not UTF-8" in problem(tmp_path, b'{\n "\xff": 1}')


def test_every_repeated_key_is_reported(tmp_path):
    text = '{"a": 1, "b": {"c": "a,\\"b\\":", "c": 2}, "a": 3, "d": [{"e": 1}, {"e": 2}]}'
    lines = problem(tmp_path, text.encode()).splitlines()
    assert [line.split("key ")[1].split()[0] for line in lines] == ['"c"', '"a"']


def test_plain_json_is_read_as_python_reads_it(tmp_path):
    text = '{"a": [1, -2.5e3, true, null, "\\u00e9,}"], "b": {}}'
    path = tmp_path / "x.json"
    path.write_text(text)
    assert strict_json.read(path, "x.json") == json.loads(text)
