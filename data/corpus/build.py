"""Built-in corpora that recipes name, built once and whole.

    python -m data.corpus.build [sotu|stdlib|synthetic] [folder]

    no folder --lock--> remove old temporary folders --> build .name.tmp-* --fsync, rename--> corpus

Rule: a corpus folder appears complete or not at all. Everything is written into a temporary folder
beside it and renamed. A lock (build_lock.py) lets one process build while others wait for its
result. A killed build releases it, and the next build removes the folder that was left.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from base.durable import sync_folder
from base.errors import UserError
from data.corpus import sotu, stdlib, synthetic
from data.corpus.build_lock import SILENT_S, locked
from data.corpus.corpus import MANIFEST, read_manifest
from recipes.schema import Source

BUILDERS: dict[str, Callable[[Path, Callable[[str], None]], dict]] = {
    "sotu": sotu.build,
    "stdlib": stdlib.build,
    "synthetic": synthetic.build,
}


def ensure(source: Source, root: Path) -> Path:
    """The folder of a source's corpus; it is built first where it is absent and the source names a
    built-in corpus.

    Safe to call from many processes at once: one builds, the others wait. Raises UserError where
    there is no corpus and nothing to build it from, or where the folder holds something else.
    """
    folder = root / source.corpus
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(
            f"data.sources.*.corpus={source.corpus}: {folder} is no folder; move it away, or name"
            " another one"
        )
    if not (folder / MANIFEST).is_file():
        if source.build is None:
            raise UserError(
                f"data.sources.*.corpus={source.corpus}: {folder} has no {MANIFEST}; correct the "
                f"path, or let it be built with build={' or build='.join(BUILDERS)}"
            )
        build(source.build, folder)
    if source.build is not None:
        found = read_manifest(folder).get("name")
        if found != source.build:
            raise UserError(
                f"data.sources.*.build={source.build}: {folder} holds the corpus {found!r}; name "
                "another folder, or remove build"
            )
    return folder


def build(name: str, folder: Path) -> None:
    """Build a built-in corpus into `folder`, unless another process has built it meanwhile."""
    progress = ProgressLine(f"corpus {name}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        open(folder.parent / f".{folder.name}.lock", "a").close()
    except OSError as error:
        raise UserError(
            f"{folder}: the corpus is not there and cannot be built: {error.filename}:"
            f" {error.strerror}"
        ) from None
    with locked(folder.parent / f".{folder.name}.lock", progress, SILENT_S) as give_sign:

        def report(text: str) -> None:
            give_sign()
            progress(text)

        if (folder / MANIFEST).is_file():
            return
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"{folder}: is not empty and has no {MANIFEST}; remove it, or name another folder"
            )
        for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
            shutil.rmtree(stale)
        temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
        try:
            manifest = BUILDERS[name](temporary, report)
            for inner in (path for path in temporary.iterdir() if path.is_dir()):
                sync_folder(inner)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(folder.parent)
    tokens = {
        split: sum(shard["tokens"] for shard in some) for split, some in manifest["splits"].items()
    }
    progress.end(
        ", ".join(f"{split} {count:,} tokens" for split, count in tokens.items()) + f" in {folder}"
    )


class ProgressLine:
    """One line on stderr: redrawn on a terminal, at most one every five seconds elsewhere."""

    def __init__(self, title: str):
        self.title = title
        self._start = time.monotonic()
        self._shown = -60.0
        self._is_live = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= (0.1 if self._is_live else 5):
            self._shown = now
            self._print(text, "" if self._is_live else "\n")

    def end(self, text: str) -> None:
        self._print(f"{text} ({time.monotonic() - self._start:.1f} s)", "\n")

    def _print(self, text: str, end: str) -> None:
        before = "\r\x1b[K" if self._is_live else ""
        print(f"{before}{self.title}: {text}", end=end, file=sys.stderr, flush=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Make the folder that OUT goes into.

    Raises UserError with the path: before the work inside begins, where this user may not write
    there; later, for every error of the disk.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(out.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out.parent))
        yield
    except OSError as error:
        raise UserError(f"OUT={out}: {error.filename}: {error.strerror or error}") from None


def main(arguments: list[str] | None = None) -> int:
    """Entry of `python -m data.corpus.build`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m data.corpus.build", description="Build a built-in corpus."
    )
    parser.add_argument("name", nargs="?", default="sotu", choices=sorted(BUILDERS))
    parser.add_argument("folder", nargs="?", type=Path, help="default: corpora/<name>")
    options = parser.parse_args(arguments)
    folder = options.folder or Path("corpora") / options.name
    try:
        ensure(Source(corpus=str(folder), build=options.name), Path("."))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
