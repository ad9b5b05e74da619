"""A second corpus for mixtures: the source code of the running Python's standard library.

Rule: it has the tokenizer of the default corpus, so that the two mix. The text belongs to the
installed interpreter and differs between Python versions: never use it for numbers that must
repeat.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import xxhash

from base.errors import UserError
from data.corpus.corpus_writer import write_text_corpus
from data.corpus.documents import Document
from data.corpus.sotu import read_documents as read_prose
from data.corpus.tokenizer import train_bpe

# Installed packages are not the library; its tests are mostly data, partly broken on purpose.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
HELD_OUT_ONE_IN = 20  # files, by the hash of their bytes


def build(folder: Path, progress: Callable[[str], None]) -> dict:
    """Write the corpus into `folder`, return its manifest."""
    documents = read_documents()
    prose = [one.data.decode("utf-8") for one in read_prose() if one.split == "train"]
    progress("training the default corpus's tokenizer")
    tokenizer = train_bpe(prose)

    def report(done: int, tokens: int) -> None:
        progress(f"tokenizing: {done}/{len(documents)} files, {tokens:,} tokens")

    fields = {"name": "stdlib", "source": f"Python {sysconfig.get_python_version()} library"}
    return write_text_corpus(
        folder,
        documents,
        tokenizer,
        fields=fields,
        valid="required",
        bad_bytes="replace",
        progress=report,
    )


def read_documents() -> list[Document]:
    """All modules of the library in order of their paths; a module is a document."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not set(path.relative_to(root).parts) & set(LEFT_OUT)
    )
    if not files:
        raise UserError(
            f"data.sources.*.build=stdlib: {root} has no .py files; this Python came without the"
            " source of its library, use another one or name a corpus that exists"
        )
    documents = []
    for path in files:
        data = (root / path).read_bytes()
        is_held_out = xxhash.xxh3_64_intdigest(data) % HELD_OUT_ONE_IN == 0
        documents.append(Document(path.as_posix(), data, "valid" if is_held_out else "train"))
    return documents
