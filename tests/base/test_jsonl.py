"""base.jsonl: lines of a run's files, whole and with a digest, or not there."""

from __future__ import annotations

import errno
import json

import pytest

from base.jsonl import append, append_line, decode, drop_torn_line, encode, has_digest


def test_a_line_comes_back_as_it_was_and_ends_with_its_digest():
    fields = {"step": 3, "loss": 4.25, "text": 'a "quote"', "list": [1, [2]], "none": None}
    line = encode(fields)
    assert line.endswith(b"}\n")
    assert has_digest(line)
    assert decode(line) == decode(line.rstrip()) == fields


def test_a_number_that_json_does_not_know_is_null_and_named():
    line = decode(encode({"loss": float("nan"), "deep": {"list": [1.0, float("inf")]}}))
    assert line == {
        "loss": None,
        "deep": {"list": [1.0, None]},
        "non_finite": ["loss", "deep.list.1"],
    }


def test_a_changed_text_is_refused_and_a_line_of_an_older_version_is_read():
    line = encode({"step": 3})
    with pytest.raises(ValueError, match=r"it has the digest [0-9a-f]{16}, its text gives"):
        decode(line.replace(b"3", b"4", 1))
    assert decode(b'{"step": 3}\n') == {"step": 3}
    with pytest.raises(ValueError, match="it has no digest"):
        decode(b'{"step": 3}\n', needs_digest=True)


@pytest.mark.parametrize("text", [b"[1]", b"NaN", b'{"loss": NaN}', b"{", b""])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(ValueError):
        decode(text)


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path):
    class Full:
        """A file that takes five bytes of each write."""

        name = str(tmp_path / "lines.jsonl")

        def __init__(self):
            self.file = open(self.name, "ab", buffering=0)  # noqa: SIM115

        def write(self, data):
            return self.file.write(data[:5])

        def __getattr__(self, name):
            return getattr(self.file, name)

    append_line(tmp_path / "lines.jsonl", {"step": 1})
    whole = (tmp_path / "lines.jsonl").read_bytes()
    with pytest.raises(OSError) as error:
        append(Full(), encode({"step": 2}))
    assert error.value.errno == errno.ENOSPC
    assert (tmp_path / "lines.jsonl").read_bytes() == whole


def test_a_torn_last_line_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert drop_torn_line(path) == 0
    append_line(path, {"step": 1})
    whole = path.read_bytes()
    assert drop_torn_line(path) == 0
    path.write_bytes(whole + b'{"st')
    assert drop_torn_line(path) == 4
    assert path.read_bytes() == whole
    assert json.loads(whole)["step"] == 1
