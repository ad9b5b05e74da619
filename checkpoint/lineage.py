"""Segments of a run: which steps, checkpoints and lines belong to it now, and which were abandoned.

    segment 0   1 ........ 80 | 81 ... 105   abandoned
    segment 1             '---- 81 ............ 140 | 141 ... 160   abandoned
    segment 2                                   '---- 141 ...   current

The one rule: history.jsonl alone says what belongs to the run, and a rewind is one line of it.
Checkpoints carry their segment in their name, lines in a field, so nothing is moved or overwritten
when a run turns back, and a kill at any moment leaves the old lineage or the new one. Each line
ends with a digest of its text: a bit flipped in a range of skips would train another run. Units:
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.jsonl import Line, decode, digest, has_digest

FILE = "history.jsonl"
MARK = "recipe.yaml"  # what makes a folder under runs/ a run of ours
NO_DIGEST = (
    " (runs were once written without digests: where you trust the line, write"
    ' , "digest": "{}"}} in place of its last brace)'
)


@dataclass(frozen=True)
class Span:
    """Steps (after, last] of one segment; `last` None = it goes on."""

    segment: int
    after: int
    last: int | None

    def holds(self, segment: int, step: int) -> bool:
        """Whether a step of a segment lies in it."""
        return (
            segment == self.segment
            and step > self.after
            and (self.last is None or step <= self.last)
        )


@dataclass(frozen=True)
class Lineage:
    """What belongs to a segment: its own steps and those that it goes on from, oldest first."""

    spans: tuple[Span, ...]

    @property
    def segment(self) -> int:
        """The segment that this is the lineage of."""
        return self.spans[-1].segment

    @property
    def after(self) -> int:
        """The step that this segment goes on from; 0 = from the start."""
        return self.spans[-1].after

    def holds(self, segment: int, step: int) -> bool:
        """Whether step N of a segment belongs to it. Checkpoints count: one of step 0 is none."""
        return any(span.holds(segment, step) for span in self.spans)

    def own(self, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Of lines with `segment` and `step`, those that belong to it."""
        return [line for line in lines if self.holds(line.get("segment", 0), line["step"])]


def run_folder(name: str, root: Path) -> Path:
    """The folder of a run given by path or by its name under `root`/runs/. Raises UserError."""
    for path in (Path(name), root / "runs" / name):
        if name and (path / MARK).is_file():
            return path.resolve()
    known = sorted(path.parent.name for path in (root / "runs").glob(f"*/{MARK}"))
    there = f"; there are: {', '.join(known[:20])}" if known else ", which is empty"
    raise UserError(f"RUN={name}: no run here or under runs/{there}")


def read(folder: Path) -> list[Line]:
    """All lines of a run's history, in order; a torn last one, left by a kill, never happened.

    Raises UserError where another is damaged, or has no digest: without it another lineage would
    be chosen.
    """
    path = folder / FILE
    if path.is_dir():
        raise UserError(f"{path} is a folder: the run's lineage hangs on it, put the file back")
    if not path.is_file():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    found = []
    for number, text in enumerate(whole, start=1):
        try:
            found.append(decode(text, needs_digest=True))
        except ValueError as problem:
            raise UserError(
                f"{path} line {number} is damaged: {problem}. The run's lineage hangs on it: put it"
                " back from a copy, or mend it by hand until text and digest agree"
                + ("" if has_digest(text) else NO_DIGEST.format(digest(text.removesuffix(b"}"))))
            ) from None
    numbers = [line.get("segment") for line in segments(found)]
    if numbers != list(range(len(numbers))):
        raise UserError(f"{path} is damaged: its segments are {numbers}, a line is missing")
    return found


def segments(lines: Iterable[Line]) -> list[Line]:
    """The lines that open a segment, by number."""
    return [line for line in lines if line.get("kind") == "segment"]


def lineage(lines: Sequence[Line], segment: int | None = None) -> Lineage:
    """The lineage of the newest segment, or of `segment`; without any, of segment 0."""
    opened = segments(lines)
    if not opened:
        return Lineage((Span(0, 0, None),))
    number = len(opened) - 1 if segment is None else segment
    spans: list[Span] = []
    last: int | None = None
    while True:
        line = opened[number]
        after = line["first_step"] - 1
        spans.append(Span(number, after, last))
        if line["parent"] is None:
            break
        number, last = line["parent"]["segment"], after
    return Lineage(tuple(reversed(spans)))


def lineage_of(folder: Path) -> Lineage:
    """The current lineage of a run folder."""
    return lineage(read(folder))
