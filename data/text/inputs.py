"""The input files of a corpus: their order, their kind, and whether they are packed.

    path, glob or folder --find--> files in numeric order of their names
    .jsonl .ndjson .json .txt .text .md .markdown .rst, each also with .gz .zst .xz .bz2 | .parquet
    | a folder made by `datasets`

Rule: the files and their order follow from the input alone, never from the order in which a file
system lists names. A file of an unknown kind is refused, not passed over.

Units: bytes; rows count from 0 (Parquet, datasets), lines from 1.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.values import first_of

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
}
PAGES = (".md", ".markdown", ".rst")
# First bytes of packed files. A .zst may also begin with a skippable frame, as pzstd writes it.
PACKED = {
    ".gz": rb"\x1f\x8b",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    ".xz": rb"\xfd7zXZ\x00",
    ".bz2": rb"BZh[1-9]",
}
LFS_POINTER = b"version https://git-lfs."
MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # of files
ORDER_RULE = "inputs in numeric order of their names, rows and lines in file order"
MOST_SHOWN = 5


@dataclass(frozen=True)
class InputFile:
    """One file (or folder made by `datasets`). name: relative to the common folder of all."""

    name: str
    path: Path
    kind: str  # jsonl, parquet, text, dataset
    packed: str  # suffix of PACKED, or ""
    bytes: int
    mtime_ns: int

    def place(self, row: int) -> str:
        """Place of a row for a person: path:line, or path and row."""
        return f"{self.path}:{row}" if self.kind in ("jsonl", "text") else f"{self.path} row {row}"


def find_inputs(text: str, kind: str | None = None) -> list[InputFile]:
    """The files behind IN: a path, a glob, or several of them separated by blanks.

    kind: used for every file instead of its suffix. Raises UserError where nothing is found, and
    for an unknown kind, one file under two names, a packed file that does not match its suffix.
    """
    problems, found = [], []
    for part in parts_of(text):
        try:
            found += _expand(part, kind)
        except UserError as error:
            problems += error.problems
    if not found and not problems:
        problems.append(f"IN={text!r}: there is no file; name a file, a folder or a quoted glob")
    if not problems:
        problems += _twice(found)
        problems += _pages_beside_data(found, parts_of(text)) if kind is None else []
    if problems:
        raise UserError(*_few(problems))
    folders = [path if path.is_dir() and is_dataset(path) else path.parent for path in found]
    root = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    files = []
    for path in found:
        try:
            files.append(_input_file(path, root, kind))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*_few(problems))
    return sorted(files, key=lambda file: (numeric(file.name), file.name))


def numeric(name: str) -> list:
    """Sort key: part-2 before part-10."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", name) if p]


def is_dataset(folder: Path) -> bool:
    """True for a folder that `datasets` saved."""
    return (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()


@functools.lru_cache(maxsize=8)
def open_dataset(path: Path):
    """A data set that `datasets` saved, mapped into memory."""
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"{path}: `datasets` cannot open it: {error}") from None


def parts_of(text: str) -> list[str]:
    """The paths and globs in IN: the whole text where it names a file, else its words."""
    return [text] if os.path.lexists(text) or glob.glob(text, recursive=True) else text.split()


def check_unchanged(files: list[InputFile]) -> None:
    """Refuse files that changed since the build began. Raises UserError."""
    problems = []
    for file in files:
        try:
            found = _size_and_time(file.path)
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror} while it was being read")
            continue
        if found != (file.bytes, file.mtime_ns):
            problems.append(
                f"{file.path}: changed while it was being read ({file.bytes} bytes at first, "
                f"{found[0]} now); let its writer finish and give the command again"
            )
    if problems:
        raise UserError(*_few(problems))


def _expand(text: str, kind: str | None) -> list[Path]:
    found = [text] if os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
    if not found:
        raise UserError(f"IN={text}: there is no such file; name a file, a folder or a quoted glob")
    paths: list[Path] = []
    for path in map(Path, found):  # a folder that a glob finds is read like a folder given by name
        paths += _walk(path, kind) if path.is_dir() and not is_dataset(path) else [path]
    return list(dict.fromkeys(paths))  # a folder and what lies in it: `**`


def _walk(folder: Path, kind: str | None) -> list[Path]:
    """All files below a folder but hidden ones; anything unknown is refused."""
    if (folder / "dataset_dict.json").is_file():
        names = sorted(path.name for path in folder.iterdir() if is_dataset(path))
        splits = sorted(names, key=lambda name: name != "train")
        raise UserError(
            f"IN={folder}: holds the splits {', '.join(splits) or '(none)'} of a data set; name "
            f"those to be read, such as IN={folder / (splits[0] if splits else 'train')}"
        )
    found, strange = [], []
    for at, folders, names in os.walk(folder):
        here = Path(at)
        for name in [*folders]:
            if is_dataset(here / name):
                folders.remove(name)
                found.append(here / name)
            elif name.startswith("."):
                folders.remove(name)
            elif (here / name).is_symlink():
                strange.append(f"{here / name}: is a link to a folder, which is not followed")
        for name in names:
            if name.startswith("."):
                continue
            is_known = kind or _suffixes(Path(name))[0] in KINDS
            if is_known:
                found.append(here / name)
            else:
                strange.append(f"{here / name}: is of an unknown kind")
    if strange:
        raise UserError(
            *_few(
                [
                    f"{text}; name what is to be read by a glob, as in IN='{folder}/*.jsonl'"
                    f" (known: {' '.join(KINDS)}), or give OVERRIDES=kind=text"
                    for text in sorted(strange)
                ]
            )
        )
    return found


def _pages_beside_data(found: list[Path], parts: list[str]) -> list[str]:
    """Problems of pages beside tables or JSON: nobody means a README.md there as text.

    A page that IN= names itself is meant.
    """
    if all(path.is_file() and KINDS.get(_suffixes(path)[0], "text") == "text" for path in found):
        return []
    return [
        f"{path}: is a page beside files of another kind; name what is to be read by a glob, as in"
        f" IN='{path.parent}/*.jsonl', or name this file in IN as well"
        for path in found
        if _suffixes(path)[0] in PAGES and str(path) not in parts
    ]


def _input_file(path: Path, root: Path, kind: str | None) -> InputFile:
    name = os.fsencode(os.path.relpath(path.absolute(), root)).decode("utf-8", "backslashreplace")
    if path.is_dir():
        return InputFile(
            name if name != "." else path.name, path, "dataset", "", *_size_and_time(path)
        )
    if not path.is_file():
        raise UserError(
            f"{path}: is a pipe, a socket or a device; write its text into a file first"
        )
    suffix, packed = _suffixes(path)
    kind = kind or KINDS.get(suffix)
    if kind is None:
        raise UserError(
            f"{path}: is of an unknown kind (known: {' '.join(KINDS)}, with {' '.join(PACKED)}); "
            "give its kind: OVERRIDES=kind=jsonl, kind=text or kind=parquet"
        )
    try:
        with open(path, "rb") as file:
            first = file.read(64)
        size, mtime_ns = _size_and_time(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if first.startswith(LFS_POINTER):
        raise UserError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it: git lfs pull"
        )
    if packed and first and not re.match(PACKED[packed], first):
        raise UserError(
            f"{path}: is named {packed} but begins with {first[:4]!r}; rename it to what it is"
        )
    if not packed and kind in ("jsonl", "text"):
        for other, magic in PACKED.items():
            if re.match(magic, first):
                raise UserError(f"{path}: holds {other} data; rename it to {path.name}{other}")
        encoding = next((name for mark, name in MARKS.items() if first.startswith(mark)), None)
        if encoding:
            raise UserError(f"{path}: is {encoding}; convert it: iconv -f {encoding} -t UTF-8")
    return InputFile(name, path, kind, packed, size, mtime_ns)


def _suffixes(path: Path) -> tuple[str, str]:
    packed = path.suffix.lower() if path.suffix.lower() in PACKED else ""
    return (Path(path.stem) if packed else path).suffix.lower(), packed


def _size_and_time(path: Path) -> tuple[int, int]:
    inner = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [one.stat() for one in inner]
    return sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)


def _twice(paths: list[Path]) -> list[str]:
    seen, problems = {}, []
    for path in paths:
        if not path.exists():
            problems.append(f"{path}: is a link to nothing")
            continue
        key = os.stat(path)[1:3]  # inode and device
        if key in seen:
            problems.append(f"{path}: is the same file as {seen[key]}; name it once")
        seen.setdefault(key, path)
    return problems


def _few(problems: list[str]) -> list[str]:
    return first_of(problems, MOST_SHOWN, "of this kind")
