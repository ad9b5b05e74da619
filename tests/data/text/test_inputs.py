"""data/text/inputs.py: which files are inputs, in which order, and what is refused."""

import gzip
import os

import pytest
from text_inputs import GOOD, build, json_lines, texts_of, write_files

from base.errors import UserError
from data.corpus.corpus import read_manifest
from data.text.inputs import find_inputs


def names(source, kind=None):
    return [file.name for file in find_inputs(str(source), kind)]


def test_order_is_numeric_and_not_that_of_the_folder(tmp_path):
    for folder, order in (("a", (1, 2, 10)), ("b", (10, 1, 2))):
        for number in order:
            write_files(tmp_path / folder, {f"part-{number}.jsonl": json_lines([f"text {number}"])})
        assert names(tmp_path / folder) == ["part-1.jsonl", "part-2.jsonl", "part-10.jsonl"]
        build(tmp_path / folder, tmp_path / f"c-{folder}")
    assert texts_of(tmp_path / "c-a") == ["text 1", "text 2", "text 10"]
    ids = {read_manifest(tmp_path / f"c-{one}")["corpus_id"] for one in "ab"}
    assert len(ids) == 1
    assert "numeric order" in read_manifest(tmp_path / "c-a")["input_files"]["order_rule"]
    glob = tmp_path / "a" / "part-1*.jsonl"
    assert names(glob) == ["part-1.jsonl", "part-10.jsonl"]
    both = f"{tmp_path / 'a' / 'part-2.jsonl'} {tmp_path / 'b'}"
    assert names(both) == ["a/part-2.jsonl"] + [f"b/part-{n}.jsonl" for n in (1, 2, 10)]


def test_pages_are_text(tmp_path):
    packed = gzip.compress(b"c", mtime=0)
    files = {"a.md": "# A", "b.markdown": "b", "c.rst.gz": packed, "d.txt": ""}
    folder = write_files(tmp_path / "in", files)
    assert names(folder) == ["a.md", "b.markdown", "c.rst.gz", "d.txt"]
    assert {file.kind for file in find_inputs(str(folder), None)} == {"text"}


def test_one_file_twice_is_refused_under_any_name(tmp_path):
    folder = write_files(tmp_path / "in", {"x.jsonl": json_lines(GOOD)})
    (folder / "link.jsonl").symlink_to(folder / "x.jsonl")
    with pytest.raises(UserError, match="is the same file as"):
        names(folder)
    (folder / "link.jsonl").unlink()
    os.link(folder / "x.jsonl", folder / "hard.jsonl")
    with pytest.raises(UserError, match="is the same file as"):
        names(folder)
    with pytest.raises(UserError, match="is the same file as"):
        names(f"{folder / 'x.jsonl'} {tmp_path / 'in' / '.' / 'x.jsonl'}")


def test_what_is_not_understood_is_refused_and_hidden_files_are_not_read(tmp_path):
    folder = write_files(tmp_path / "in", {"x.jsonl": b"", ".hidden": "x", ".git/y.jsonl": "x"})
    assert names(folder) == ["x.jsonl"]
    write_files(folder, {"README.md": "about"})
    with pytest.raises(
        UserError, match=r"README.md: is a page beside files .*; name what is to be"
    ):
        names(folder)
    (folder / "README.md").rename(folder / "notes.org")
    with pytest.raises(UserError, match=r"notes.org: is of an unknown kind; name what is to be"):
        names(folder)
    with pytest.raises(UserError, match=r"notes.org: is of an unknown kind .*kind=jsonl"):
        names(folder / "notes.org")
    assert names(folder / "notes.org", "text") == ["notes.org"]
    (folder / "notes.org").unlink()
    (folder / "more").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link to a folder"):
        names(folder)
    (folder / "more").unlink()
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a link to nothing"):
        names(folder)
    for nothing in (tmp_path / "nowhere", tmp_path / "*.jsonl", ""):
        with pytest.raises(UserError, match="there is no"):
            names(nothing)


def test_what_a_glob_finds_is_read_whole_or_refused(tmp_path):
    folder = write_files(
        tmp_path / "my texts", {"a.jsonl": b"", "sub/b.jsonl": b"", ".c.jsonl": b""}
    )
    for text in (folder / "*", folder / "**", tmp_path / "my*"):
        assert names(text) == ["a.jsonl", "sub/b.jsonl"]
    assert names(folder / "*.jsonl") == ["a.jsonl"]
    write_files(folder, {"sub/notes.md": "about"})
    with pytest.raises(UserError, match=r"notes.md: is a page beside files of another kind"):
        names(folder / "*")
    folder.rename(tmp_path / "mine")
    both = f"{tmp_path}/mine/sub/b.jsonl {tmp_path}/mine/sub/notes.md"
    assert names(both) == ["b.jsonl", "notes.md"]  # named, so meant
    (tmp_path / "mine").rename(folder)
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone.jsonl: is a link to nothing"):
        names(folder / "*.jsonl")
    (folder / "gone.jsonl").unlink()
    os.mkfifo(folder / "pipe.jsonl")
    for text in (folder / "*.jsonl", folder / "pipe.jsonl"):
        with pytest.raises(UserError, match=r"pipe.jsonl: is a pipe, a socket or a device"):
            names(text)
