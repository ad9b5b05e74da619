"""Segments of a run: which steps, checkpoints and lines belong to it now, and which are abandoned.

    segment 0   1 ........ 80 | 81 ... 105   abandoned
    segment 1             '---- 81 ............ 140 | 141 ... 160   abandoned
    segment 2                                   '---- 141 ...   current

Rule: history.jsonl alone decides what belongs to the run, and a rewind is one line of it.
Checkpoints have their segment in their name, and lines have it in a field. So a rewind moves and
overwrites nothing, and a kill at any moment leaves either the old lineage or the new one. Each line
ends with a digest of its text, because one flipped bit in a range of skips would change what the
run trains on. Units: steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.jsonl import Line, decode, digest, has_digest

FILE = "history.jsonl"
MARK = "recipe.yaml"  # a folder under runs/ that holds this file is a run
NO_DIGEST = (
    " (runs were once written without digests: where you trust the line, write"
    ' , "digest": "{}"}} in place of its last brace)'
)


@dataclass(frozen=True)
class Span:
    """Steps (after, last] of one segment; `last` None means that the segment goes on."""

    segment: int
    after: int
    last: int | None

    def holds(self, segment: int, step: int) -> bool:
        """Return whether a step of a segment lies in this span."""
        return (
            segment == self.segment
            and step > self.after
            and (self.last is None or step <= self.last)
        )


@dataclass(frozen=True)
class Lineage:
    """The steps that belong to a segment: its own, and those that it goes on from, oldest first."""

    spans: tuple[Span, ...]

    @property
    def segment(self) -> int:
        """Number of the segment whose lineage this is."""
        return self.spans[-1].segment

    @property
    def after(self) -> int:
        """Step that this segment goes on from; 0 = from the start."""
        return self.spans[-1].after

    def holds(self, segment: int, step: int) -> bool:
        """Return whether a step of a segment belongs to the lineage. Step 0 never does."""
        return any(span.holds(segment, step) for span in self.spans)

    def own(self, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return those of `lines` (with `segment` and `step`) that belong to the lineage."""
        return [line for line in lines if self.holds(line.get("segment", 0), line["step"])]


def run_folder(name: str, root: Path) -> Path:
    """Find the folder of a run by its path or by its name under `root`/runs/. Raises UserError."""
    for path in (Path(name), root / "runs" / name):
        if name and (path / MARK).is_file():
            return path.resolve()
    known = sorted(path.parent.name for path in (root / "runs").glob(f"*/{MARK}"))
    there = f"; there are: {', '.join(known[:20])}" if known else ", which is empty"
    raise UserError(f"RUN={name}: no run here or under runs/{there}")


def read(folder: Path) -> list[Line]:
    """Read all lines of a run's history, in order. An incomplete last line, which a kill leaves, is
    ignored.

    Raises UserError where any other line is damaged or has no digest, because another lineage would
    then be chosen.
    """
    path = folder / FILE
    if path.is_dir():
        raise UserError(f"{path} is a folder: the run's lineage depends on it, put the file back")
    if not path.is_file():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    found = []
    for number, text in enumerate(whole, start=1):
        try:
            found.append(decode(text, needs_digest=True))
        except ValueError as problem:
            raise UserError(
                f"{path} line {number} is damaged: {problem}. The run's lineage depends on it: put"
                " it back from a copy, or repair it by hand until text and digest agree"
                + ("" if has_digest(text) else NO_DIGEST.format(digest(text.removesuffix(b"}"))))
            ) from None
    numbers = [line.get("segment") for line in segments(found)]
    if numbers != list(range(len(numbers))):
        raise UserError(f"{path} is damaged: its segments are {numbers}, a line is missing")
    return found


def segments(lines: Iterable[Line]) -> list[Line]:
    """Return the lines that open a segment, in order of number."""
    return [line for line in lines if line.get("kind") == "segment"]


def lineage(lines: Sequence[Line], segment: int | None = None) -> Lineage:
    """Return the lineage of the newest segment, or of `segment`; of segment 0 where none was
    opened.
    """
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
    """Return the current lineage of a run folder."""
    return lineage(read(folder))
