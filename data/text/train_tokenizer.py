"""Training a tokenizer: `make tokenizer IN= VOCAB= OUT=`. Byte-level BPE, deterministic.

Rule: it learns from the same documents that a corpus of the same input and settings trains on;
documents held out there by hash are held out here too. From inputs beyond `MOST_BYTES` it takes a
share of the documents, by hash, and logs the share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import xxhash

from base.errors import UserError
from base.values import counted
from data.corpus.corpus_writer import hash_limit
from data.corpus.documents import Document, clean_text
from data.corpus.tokenizer import TextTokenizer, train_bpe
from data.text.inputs import InputFile, find_inputs
from data.text.reading import check_columns, read_unit
from data.text.settings import Settings
from data.text.unit_plan import plan_units
from data.text.workers import progress_bar

MOST_BYTES = 1 << 30  # of input; the trainer counts words in memory
LEAST_VOCAB, MOST_VOCAB = 257, 1 << 24  # 256 bytes and the end token


def training_texts(files: list[InputFile], settings: Settings, share: float) -> Iterator[str]:
    """Cleaned texts of the documents that are not held out, the given share of them by hash.

    Bad lines are passed over up to max_bad; beyond that UserError is raised.
    """
    low, bad = hash_limit(settings.valid_fraction), 0
    high = low + int(share * (2**64 - low))
    for unit in plan_units(files, settings.document):
        for record in read_unit(unit, settings, lambda count: None):
            file = unit.files[record.source]
            place, text = file.place(record.row), None
            problem = record.problem and f"{place}: {record.problem[1]}"
            if record.data is not None:
                try:
                    document = Document(place, record.data)
                    text = clean_text(document, Counter(), settings.bad_bytes)
                except UserError as error:
                    problem = str(error)
            if problem:
                bad += 1
                if 0 <= settings.max_bad < bad:
                    raise UserError(f"{problem}; max_bad={settings.max_bad} bad lines are allowed")
            if text is None or settings.filters.reason(text):
                continue
            if low <= xxhash.xxh3_64_intdigest(text.encode()) < high:
                yield text


def train(
    source: str, vocab_size: int, settings: Settings, log: Callable[[str], None]
) -> TextTokenizer:
    """Train on the inputs behind `source`. Raises UserError."""
    if not LEAST_VOCAB <= vocab_size <= MOST_VOCAB:
        raise UserError(f"VOCAB={vocab_size}: is not in {LEAST_VOCAB} to {MOST_VOCAB}")
    files = find_inputs(source, settings.kind)
    for file in files:
        check_columns(file, settings)
    size = sum(file.bytes for file in files)
    share = min(1.0, MOST_BYTES / max(1, size))
    if share < 1:
        log(f"learning from {share:.4f} of the documents, by hash ({size:,} bytes of input)")
    texts, chars = 0, 0
    with progress_bar("reading", None, unit="char") as bar:

        def texts_counted() -> Iterator[str]:
            nonlocal texts, chars
            for text in training_texts(files, settings, share):
                texts, chars = texts + 1, chars + len(text)
                bar.update(len(text))
                yield text

        tokenizer = train_bpe(texts_counted(), vocab_size)
    if not texts:
        raise UserError(f"IN={source}: holds no text to learn from")
    log(
        f"learned from {counted(texts, 'document')}, {counted(chars, 'character')}:"
        f" {tokenizer.vocab_size:,} tokens"
    )
    if tokenizer.vocab_size < vocab_size:
        log(f"the text gives only {tokenizer.vocab_size} of the {vocab_size} tokens asked for")
    return tokenizer
