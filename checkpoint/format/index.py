"""The index of the pieces that each rank wrote, all indexes merged into one, and read plans.

    fragments --describe--> index of a rank (JSON)      all indexes --merge--> Index
    Index x fragments wanted --plan--> Jobs: which bytes of which file go where

A rank's data file holds, for each group of pieces and each kind (weight, exp_avg, ...), the pieces
one after another; so the index stores flat ranges only, and rectangles are computed from them.
Rule: a plan is a pure function of indexes and fragments. It opens no file and asks no other rank,
and any layout can plan from any other. Units: elements, unless named bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from base.errors import UserError
from checkpoint.format.blocks import Damaged
from checkpoint.format.rectangles import (
    Box,
    Rectangles,
    cut,
    matrix,
    measures,
    overlaps,
    place,
    rectangles_of,
    shift,
)

FORMAT = 1
ITEM_BYTES = {"float32": 4}
WEIGHT = "weight"


@dataclass(frozen=True, eq=False)
class Fragment:
    """A piece that a rank holds: elements [start, start + numel) of the flattened `box` of `name`.

    `kind` is "weight", or the optimizer's name of a state. `tensor` is one-dimensional live memory,
    which a save reads and a load fills. `is_written` is true on exactly one holder of replicated
    data.
    """

    name: str
    kind: str
    box: Box
    start: int
    tensor: Any
    is_written: bool = True

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    @property
    def geometry(self) -> tuple:
        """The values that all kinds of one piece share."""
        return self.name, self.box, self.start, self.count

    @property
    def dtype(self) -> str:
        """Name of the dtype, such as float32."""
        return str(self.tensor.dtype).removeprefix("torch.")


def describe(fragments: Iterable[Fragment]) -> tuple[list[dict], list[Fragment]]:
    """Return (groups of the index, fragments in the order of the data file) for what this rank
    writes.
    """
    pieces: dict[tuple, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        if fragment.is_written and fragment.count:
            pieces[fragment.geometry].append(fragment)
    groups: dict[tuple, list[list[Fragment]]] = defaultdict(list)
    for kinds in pieces.values():
        groups[tuple((f.kind, f.dtype) for f in kinds)].append(kinds)
    described, ordered = [], []
    for kinds, members in groups.items():
        boxes = {box: i for i, box in enumerate(dict.fromkeys(m[0].box for m in members))}
        described.append(
            {
                "kinds": [list(kind) for kind in kinds],
                "boxes": [[b.full, b.shape, b.dim, b.offset] for b in boxes],
                "names": [m[0].name for m in members],
                "box": [boxes[m[0].box] for m in members],
                "start": [m[0].start for m in members],
                "count": [m[0].count for m in members],
            }
        )
        ordered += [member[i] for i in range(len(kinds)) for member in members]
    return described, ordered


@dataclass
class Index:
    """All pieces of a checkpoint, sorted by tensor."""

    tensors: dict[str, int]  # name -> number
    shapes: list[tuple[int, ...]]  # full shape of each tensor
    stored: Rectangles  # `at` counts from the start of the section
    section: np.ndarray  # (n,) section that contains the rectangle
    first: np.ndarray  # (tensors + 1,) rectangles of tensor t are first[t] .. first[t + 1]
    files: np.ndarray  # (sections,) rank whose file holds the section
    bases: dict[str, np.ndarray]  # kind -> (sections,) first byte in the file, -1 where absent
    dtypes: dict[str, str]  # kind -> dtype
    file_bytes: list[int] = field(default_factory=list)  # rank -> size of its data file

    def rectangles(self, tensor: int) -> slice:
        """Return the range of the rectangles of one tensor."""
        return slice(self.first[tensor], self.first[tensor + 1])

    def kinds(self, name: str) -> list[str]:
        """Return the kinds that are stored of a tensor."""
        sections = np.unique(self.section[self.rectangles(self.tensors[name])])
        return [kind for kind, bases in self.bases.items() if (bases[sections] >= 0).any()]


def merge(indexes: Sequence[dict]) -> Index:
    """Merge the indexes of rank 0, 1, ... Raises Damaged where they contradict each other."""
    merged = _Merge()
    for rank, index in enumerate(indexes):
        try:
            if index["format"] != FORMAT or index["rank"] != rank:
                raise Damaged(f"index of rank {rank}: it has another format or rank")
            merged.add(rank, index)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise Damaged(f"index of rank {rank}: {type(error).__name__} {error}") from error
    return merged.finish()


class _Merge:
    """Columns of an Index, collected rank by rank."""

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.columns: list[tuple[np.ndarray, ...]] = []
        self.files: list[int] = []
        self.bases: list[dict[str, int]] = []
        self.dtypes: dict[str, str] = {}
        self.file_bytes: list[int] = []
        self.last: tuple | None = None  # names and shapes of a group, and their numbers

    def add(self, rank: int, index: dict) -> None:
        """Add one rank's index. Raises ValueError, KeyError and the like for a malformed one."""
        end = 0
        for group in index["groups"]:
            boxes = [Box(tuple(f), tuple(s), d, o) for f, s, d, o in group["boxes"]]
            box = np.array(group["box"], np.int64)
            starts, counts = (np.array(group[key], np.int64) for key in ("start", "count"))
            sizes = np.array([math.prod(b.shape) for b in boxes])[box]
            if (counts <= 0).any() or (starts < 0).any() or (starts + counts > sizes).any():
                raise ValueError("a piece lies outside its tensor")
            tensors = self._number(group["names"], box, boxes)
            before = np.cumsum(counts) - counts
            widths = np.array([matrix(b.shape)[1] for b in boxes], np.int64)[box]
            of, pieces = cut(starts, starts + counts, widths)
            at = before[of] + pieces.at
            sharded = [i for i, b in enumerate(boxes) if b.dim is not None]
            whole = ~np.isin(box[of], sharded)
            self._take(tensors[of[whole]], Rectangles(pieces.bounds[whole], at[whole]))
            for i in sharded:
                chosen = np.flatnonzero(box[of] == i)
                source, moved = shift(Rectangles(pieces.bounds[chosen], at[chosen]), boxes[i])
                self._take(tensors[of[chosen[source]]], moved)
            self.files.append(rank)
            self.bases.append({})
            for kind, dtype in group["kinds"]:
                if self.dtypes.setdefault(kind, dtype) != dtype:
                    raise ValueError(f"{kind} is {dtype} here and {self.dtypes[kind]} elsewhere")
                self.bases[-1][kind] = end
                end += int(counts.sum()) * ITEM_BYTES[dtype]
        if end != index["bytes"]:
            raise ValueError(f"pieces have {end} bytes, the file has {index['bytes']}")
        self.file_bytes.append(end)

    def _take(self, tensors: np.ndarray, rectangles: Rectangles) -> None:
        section = np.full(len(tensors), len(self.files))
        self.columns.append((tensors, section, rectangles.bounds, rectangles.at))

    def _number(self, names: list[str], box: np.ndarray, boxes: list[Box]) -> np.ndarray:
        """Return the numbers of the named tensors.

        Under ZeRO-3 all ranks name the same tensors, so the last answer is kept and used again.
        """
        if len(names) != len(box):
            raise ValueError("columns of different length")
        shapes = [boxes[b].full for b in box.tolist()]
        if self.last and self.last[:2] == (names, shapes):
            return self.last[2]
        numbers = np.empty(len(names), np.int64)
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            numbers[i] = number = self.tensors.setdefault(name, len(self.tensors))
            if number == len(self.shapes):
                self.shapes.append(shape)
            elif self.shapes[number] != shape:
                raise ValueError(f"{name} is {shape} here and {self.shapes[number]} elsewhere")
        self.last = (names, shapes, numbers)
        return numbers

    def finish(self) -> Index:
        """Sort the columns by tensor, and return the Index."""
        empty = (
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
            np.zeros((0, 4), np.int64),
            np.zeros(0),
        )
        tensor, section, bounds, at = map(
            np.concatenate, zip(*(self.columns or [empty]), strict=True)
        )
        order = np.argsort(tensor, kind="stable")
        return Index(
            tensors=self.tensors,
            shapes=self.shapes,
            stored=Rectangles(bounds[order], at[order].astype(np.int64)),
            section=section[order],
            first=np.searchsorted(tensor[order], np.arange(len(self.shapes) + 1)),
            files=np.array(self.files, np.int64),
            bases={k: np.array([b.get(k, -1) for b in self.bases]) for k in self.dtypes},
            dtypes=self.dtypes,
            file_bytes=self.file_bytes,
        )


def holes(index: Index) -> list[str]:
    """Return a problem for each tensor and kind of which not every element is stored exactly
    once.
    """
    problems = []
    tensor = np.repeat(np.arange(len(index.shapes)), np.diff(index.first))
    sizes = np.array([math.prod(shape) for shape in index.shapes], np.int64)
    names = list(index.tensors)
    whole = [(0, rows, 0, columns) for rows, columns in map(matrix, index.shapes)]
    expected = measures(np.array(whole, np.int64).reshape(-1, 4))
    for kind, bases in index.bases.items():
        has = bases[index.section] >= 0
        stored, covered = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.uint64)
        np.add.at(stored, tensor[has], index.stored.areas[has])
        np.add.at(covered, tensor[has], index.stored.measures[has])
        wrong = (stored != sizes) | (covered != expected)
        if kind != WEIGHT:
            wrong &= stored > 0
        for number in np.flatnonzero(wrong):
            if stored[number] == sizes[number]:
                problems.append(f"{names[number]} ({kind}): some elements are stored twice, some"
                                " not at all")  # fmt: skip
                continue
            problems.append(
                f"{names[number]} ({kind}): {stored[number]} elements stored, it has"
                f" {sizes[number]}"
            )
    return problems


@dataclass(frozen=True)
class Jobs:
    """Rectangular copies from files to fragments: columns (n,) int64, sorted by file and byte."""

    file: np.ndarray  # rank whose data file is read
    byte: np.ndarray  # of the first element, in the file
    rows: np.ndarray
    columns: np.ndarray
    stride: np.ndarray  # elements between rows in the file
    fragment: np.ndarray  # position in the list of fragments that was planned for
    to: np.ndarray  # first element in the fragment
    to_stride: np.ndarray

    def __len__(self) -> int:
        return len(self.file)


def plan(index: Index, fragments: Sequence[Fragment]) -> Jobs:
    """Plan the reads that fill `fragments`.

    Raises UserError with every tensor or kind that the checkpoint lacks, or stores with another
    shape or dtype; such a checkpoint belongs to another model or optimizer.
    """
    # All kinds of one piece share one search for the stored rectangles.
    pieces: dict[tuple, list[int]] = defaultdict(list)
    for i, fragment in enumerate(fragments):
        if fragment.count:
            pieces[fragment.geometry].append(i)
    problems: list[str] = []
    columns: list[tuple[np.ndarray, ...]] = []
    for (name, box, start, count), members in pieces.items():
        problem = _mismatch(index, name, box)
        if problem:
            problems.append(problem)
            continue
        wanted = rectangles_of(box, start, count)
        section, found = _find(index, index.tensors[name], wanted)
        whole = wanted.measures.sum()
        for i in members:
            fragment = fragments[i]
            bases = index.bases.get(fragment.kind)
            has = bases[section] >= 0 if bases is not None else np.zeros(len(section), bool)
            areas = found["rows"][has] * found["columns"][has]
            if areas.sum() != count:
                problems.append(
                    f"{name} ({fragment.kind}): {areas.sum()} of {count} wanted elements are stored"
                )
            elif found["measure"][has].view(np.uint64).sum() != whole:
                problems.append(
                    f"{name} ({fragment.kind}): some elements are stored twice, some not at all"
                )
            elif index.dtypes[fragment.kind] != fragment.dtype:
                problems.append(
                    f"{name} ({fragment.kind}): stored as {index.dtypes[fragment.kind]}, wanted as"
                    f" {fragment.dtype}"
                )
            else:
                item = ITEM_BYTES[fragment.dtype]
                columns.append(_columns(index, bases, section[has], found, has, i, item))
    if problems:
        raise UserError(*problems)
    joined = np.concatenate(columns, axis=1) if columns else np.zeros((8, 0), np.int64)
    return Jobs(*joined[:, np.lexsort((joined[1], joined[0]))])


def _mismatch(index: Index, name: str, box: Box) -> str | None:
    if name not in index.tensors:
        return f"{name}: not in the checkpoint"
    stored = index.shapes[index.tensors[name]]
    return None if stored == box.full else f"{name}: stored as {stored}, wanted as {box.full}"


def _find(index: Index, tensor: int, wanted: Rectangles) -> tuple[np.ndarray, dict]:
    """Find what is stored of the wanted rectangles: (section of each copy, columns of the copies by
    name).
    """
    own = index.rectangles(tensor)
    bounds, at, section = index.stored.bounds[own], index.stored.at[own], index.section[own]
    parts = []
    for one, target in zip(wanted.bounds, wanted.at, strict=True):
        hits, common = overlaps(one, bounds)
        source, stride = place(common, bounds[hits], at[hits])
        repeated = np.broadcast_to(one, common.shape)
        to, to_stride = place(common, repeated, np.full(len(hits), target))
        rows, columns = common[:, 1] - common[:, 0], common[:, 3] - common[:, 2]
        size = measures(common).view(np.int64)
        parts.append(np.stack([section[hits], source, rows, columns, stride, to, to_stride, size]))
    joined = np.concatenate(parts, axis=1)
    keys = ("source", "rows", "columns", "stride", "to", "to_stride", "measure")
    return joined[0], dict(zip(keys, joined[1:], strict=True))


def _columns(
    index: Index,
    bases: np.ndarray,
    section: np.ndarray,
    found: dict,
    has: np.ndarray,
    fragment: int,
    item_bytes: int,
) -> np.ndarray:
    """Return the columns of Jobs for one fragment, (8, n)."""
    part = {key: column[has] for key, column in found.items()}
    byte = bases[section] + part["source"] * item_bytes
    number = np.full(len(section), fragment)
    order = ("rows", "columns", "stride")
    return np.stack(
        [
            index.files[section],
            byte,
            *(part[key] for key in order),
            number,
            part["to"],
            part["to_stride"],
        ]
    )
