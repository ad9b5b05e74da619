"""base.tail: the newest lines of a file, and what of a long record a start reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from base import tail
from base.jsonl import encode
from base.tail import newest_lines, whole_bytes
from record import records
from record.records import (
    METRICS,
    damage,
    losses,
    notes,
    read_events,
    read_line,
    read_lines,
    truncate_after,
)
from runtime.log.metrics import MetricsWriter


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 16])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"torn", b"a\n", b"a\n\nbc\r\n", b"one\ntwo\nthree\ntorn", b"x" * 50]
)
def test_every_whole_line_comes_with_its_place_newest_first(tmp_path, monkeypatch, block, content):
    monkeypatch.setattr(tail, "BLOCK_BYTES", block)
    path = tmp_path / "x"
    path.write_bytes(content)
    found = list(newest_lines(path))
    assert [line for _, line in found][::-1] == content.split(b"\n")[:-1]
    assert all(content[begins:].startswith(line + b"\n") for begins, line in found)
    assert whole_bytes(path) == content.rfind(b"\n") + 1


def test_a_missing_file_has_no_lines(tmp_path):
    assert list(newest_lines(tmp_path / "x")) == []


@pytest.fixture
def long_run(tmp_path, monkeypatch) -> Path:
    """A run of 3,000 steps, of whose files a start looks at the last 20 lines or so."""
    monkeypatch.setattr(records, "CHECKED_BYTES", 2000)
    lines = [
        encode({"segment": 0, "step": step, "attempt": 1, "skipped_steps": step // 1000}).decode()
        for step in range(1, 3001)
    ]
    lines[1] = "<<<<<<< HEAD\n"
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_work_of_a_start_does_not_grow_with_the_record(long_run, monkeypatch):
    read = []
    monkeypatch.setattr(
        records, "read_line", lambda line, needed=(): read.append(line) or read_line(line, needed)
    )
    writer = MetricsWriter(long_run, segment=0, world=1, after_step=2990, tensorboard=False)
    writer.close()
    assert writer._skipped_steps == 2
    assert 10 < len(read) < 200
    assert [line["step"] for line in read_lines(long_run / METRICS)][-2:] == [2989, 2990]
    told = [event["text"] for event in read_events(long_run, "damaged_record")]
    assert told == [
        "events.jsonl lacks the attempts before attempt 2"
    ]  # what is far back is not looked
    assert "a line is damaged and left out" in damage(long_run / METRICS)  # for, but found here
    assert "(line 2: " in damage(long_run / METRICS)
    assert notes(long_run, 2000) == []


def test_what_is_damaged_or_gone_at_the_end_of_a_long_record_is_told(long_run):
    path = long_run / METRICS
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2993], b"{broken", *lines[2995:]]))
    damaged, gone = losses(long_run, 3000)
    assert "metrics.jsonl: a line is damaged" in damaged
    assert "(line 2994: " in damaged
    assert gone.startswith("metrics.jsonl lacks 2 of the steps up to 3000")
    assert truncate_after(path, 0, 2990) == 8
    assert path.read_bytes().endswith(lines[2989] + b"\n{broken\n")  # what is damaged stays
    path.write_bytes(b"")
    assert losses(long_run, 3000)[0].startswith("metrics.jsonl lacks 3000 of the steps")
