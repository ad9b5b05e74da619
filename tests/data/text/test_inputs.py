"""Packed inputs of every kind that can be read, and files that are refused with the way out."""

import bz2
import gzip
import lzma

import pytest
from text_inputs import GOOD, build, json_lines, texts_of, write_files, zstd

from base.errors import UserError
from data.text.inputs import find_inputs

PACKERS = {".gz": gzip.compress, ".zst": zstd, ".xz": lzma.compress, ".bz2": bz2.compress}
# An integer that Python refuses to convert, as valid JSON.
LONG_INTEGER = "9" * 5000


def long_window(data: bytes) -> bytes:
    """A zstd frame of one raw block with a window of 2 GiB, as `zstd --long=31` writes in a pipe.

    RFC 8878: magic, frame header 0 (no size, no checksum), window 2**(10 + 21), block header.
    """
    block = (1 | len(data) << 3).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0, 21 << 3]) + block + data


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_file_gives_the_same_documents_as_the_plain_one(tmp_path, suffix):
    pack, lines = PACKERS[suffix], json_lines(GOOD[:20])
    source = write_files(
        tmp_path / "in",
        {
            f"a.jsonl{suffix}": pack(lines) + pack(json_lines(GOOD[20:])),  # two members
            f"b.txt{suffix}": pack(b"a text file"),
        },
    )
    build(source, tmp_path / "c")
    assert texts_of(tmp_path / "c") == [*GOOD, "a text file"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_file_that_is_cut_or_misnamed_is_refused(tmp_path, suffix):
    packed = PACKERS[suffix](json_lines(GOOD))
    cases = {
        f"cut.jsonl{suffix}": (packed[:-9], "cannot be read to its end"),
        f"plain.jsonl{suffix}": (json_lines(GOOD), f"is named {suffix} but begins with"),
        "hidden.jsonl": (packed, f"holds {suffix} data; rename it to hidden.jsonl{suffix}"),
    }
    for name, (data, message) in cases.items():
        source = write_files(tmp_path / name.split(".")[0], {name: data})
        with pytest.raises(UserError, match=message):
            build(source, tmp_path / "c")
        assert not (tmp_path / "c").exists()


def test_a_long_window_is_refused_as_that_with_the_command_that_repacks_it(tmp_path):
    name = "a long one.jsonl.zst"
    write_files(tmp_path, {name: zstd(json_lines(GOOD[:1])) + long_window(json_lines(GOOD[1:]))})
    with pytest.raises(UserError) as caught:
        build(tmp_path / name, tmp_path / "c")
    (problem,) = caught.value.problems
    assert "packed with a window of more than 128 MiB" in problem
    assert f"zstd -d --long=31 -c '{tmp_path / name}' | zstd -o " in problem
    assert "damaged" not in problem
    assert "a long one.short.jsonl.zst" in problem


def test_a_pointer_of_git_lfs_is_never_text(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for name in ("x.txt", "x.jsonl", "x.jsonl.gz", "x.parquet"):
        write_files(tmp_path, {name: pointer})
        with pytest.raises(UserError, match=r"is a Git LFS pointer.*git lfs pull"):
            find_inputs(str(tmp_path / name))


def test_an_integer_of_any_length_beside_the_text_changes_nothing(tmp_path):
    line = f'{{"text": "kept", "n": {LONG_INTEGER}, "id": {LONG_INTEGER}}}\n'
    write_files(tmp_path, {"x.jsonl": line, "y.jsonl": f'{{"text": {LONG_INTEGER}}}\n'})
    for words in ((), ("id=id",), ("id=n",)):
        build(tmp_path / "x.jsonl", tmp_path / f"c{len(words)}{words[-1:]}", *words)
        assert texts_of(tmp_path / f"c{len(words)}{words[-1:]}") == ["kept"]
    with pytest.raises(UserError, match=r"y.jsonl:1: field 'text' is a number \(.*expected text"):
        build(tmp_path / "y.jsonl", tmp_path / "d")
    twice = f'{{"text": "a", "n": {LONG_INTEGER}, "text": "b"}}\n'
    write_files(tmp_path, {"z.jsonl": twice})
    with pytest.raises(UserError, match="appears more than once"):
        build(tmp_path / "z.jsonl", tmp_path / "e")


def test_a_held_out_file_may_hold_integers_of_any_length_and_no_endless_nesting(tmp_path):
    lines = [f'{{"text": "{text}", "id": {LONG_INTEGER}{i}}}\n' for i, text in enumerate(GOOD)]
    write_files(tmp_path, {"x.jsonl": "".join(lines), "held": f'{{"id": {LONG_INTEGER}0}}\n'})
    build(tmp_path / "x.jsonl", tmp_path / "c", "id=id", f"held_out={tmp_path / 'held'}")
    assert texts_of(tmp_path / "c", "valid") == GOOD[:1]
    write_files(tmp_path, {"deep": '{"id": ' + "[" * 100_000 + "]" * 100_000 + "}\n"})
    with pytest.raises(UserError, match="deep:1: is neither JSON nor an id"):
        build(tmp_path / "x.jsonl", tmp_path / "d", "id=id", f"held_out={tmp_path / 'deep'}")


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
@pytest.mark.parametrize("zeros", [0, 4, 3 << 20])
def test_every_stream_of_a_packed_file_is_read_and_nothing_behind_one_is_passed_over(
    tmp_path, suffix, zeros
):
    """Library readers end in silence at zeros or rubbish behind a stream, and lose the rest."""
    pack, half = PACKERS[suffix], json_lines(GOOD[:20])
    packed = pack(half) + bytes(zeros) + pack(json_lines(GOOD[20:])) + bytes(zeros)
    write_files(tmp_path, {f"x.jsonl{suffix}": packed})
    build(tmp_path / f"x.jsonl{suffix}", tmp_path / "c")
    assert texts_of(tmp_path / "c") == GOOD
    for number, rest in enumerate((b"rest", packed[:3], pack(half)[:-20])):
        name = f"{number}.jsonl{suffix}"
        write_files(tmp_path, {name: pack(half) + bytes(zeros) + rest})
        with pytest.raises(UserError, match=rf"{name}: cannot be read to its end"):
            build(tmp_path / name, tmp_path / f"d{number}")
