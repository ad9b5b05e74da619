"""The sources of a recipe: opened, checked, and the part of each that a run uses.

Rule: everything that can be known to be wrong is reported together, before step 1. A source of
weight 0 is never drawn and never opened.

Units: tokens, windows of `window_tokens`, epochs (passes over all windows of a source).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from base.errors import UserError
from data.corpus.build import ensure
from data.corpus.corpus import MANIFEST, Corpus, open_corpus
from data.corpus.shards import Split
from data.corpus.tokenizer import load_tokenizer
from data.stream.mixture import shares_of
from recipes.schema import Data


def open_sources(data: Data, seq_len: int, root: Path, vocab_size: int) -> dict[str, Corpus]:
    """The corpora of a recipe by source name, built first where they are built-in and absent.

    Raises UserError with all problems: weights, window, damage, sizes, vocabulary, tokenizers.
    """
    window_tokens = data.window_tokens or seq_len
    problems, corpora = _window_problems(window_tokens, seq_len), {}
    for uid in drawn(data):
        try:
            corpora[uid] = open_corpus(ensure(data.sources[uid], root), vocab_size)
        except UserError as error:
            problems += error.problems
    for uid, corpus in corpora.items():
        problems += _size_problems(uid, corpus, seq_len, window_tokens, data.shift_windows)
    problems += _same_corpus_problems(corpora)
    problems += _tokenizer_problems(data, corpora, root)
    if problems:
        raise UserError(*problems)
    return corpora


def corpus_problems(data: Data, root: Path) -> list[str]:
    """Problems of the corpora themselves, for a recipe that is refused for another reason.

    So a person sees all problems at once. No corpus is built.
    """
    problems = []
    try:
        for uid in drawn(data):
            source = data.sources[uid]
            if source.build is None or (root / source.corpus / MANIFEST).is_file():
                try:
                    open_corpus(ensure(source, root))
                except UserError as error:
                    problems += error.problems
    except UserError as error:  # the weights
        problems += error.problems
    return problems


def drawn(data: Data) -> list[str]:
    """Names of the sources with a weight above 0 at some step, sorted.

    Raises UserError for a weight that is not a finite number of 0 or more.
    """
    steps = {first for source in data.sources.values() for first, _ in source.stages()}
    return sorted(
        {
            uid
            for step in sorted(steps)
            for uid in shares_of({u: one.weight_at(step) for u, one in data.sources.items()})
        }
    )


def num_windows(split: Split | None, window_tokens: int, shifts: int = 1) -> int:
    """Number of whole windows, for any start of the first one below `shifts`.

    A window takes `window_tokens` tokens and one more, which the next window begins with.
    """
    return max(0, split.num_tokens - shifts) // window_tokens if split else 0


def _window_problems(window_tokens: int, seq_len: int) -> list[str]:
    if window_tokens % seq_len == 0:
        return []
    low = window_tokens // seq_len * seq_len
    nearest = f"{low} or {low + seq_len}" if low else f"{seq_len}"
    return [
        f"data.window_tokens={window_tokens} is not a multiple of seq_len {seq_len}; "
        f"nearest: {nearest}"
    ]


def _size_problems(
    uid: str, corpus: Corpus, seq_len: int, window_tokens: int, is_shifted: bool
) -> list[str]:
    tokens = corpus.splits["train"].num_tokens
    if tokens >= window_tokens + 1:
        if not is_shifted or tokens >= 2 * window_tokens:
            return []
        return [
            f"data.shift_windows=true: data.sources.{uid}: {corpus.folder} has {tokens} tokens to "
            f"train on, a shifted window needs {2 * window_tokens}; leave it out"
        ]
    is_plain = window_tokens == seq_len
    knob = f"seq_len {seq_len}" if is_plain else f"data.window_tokens {window_tokens}"
    return [
        f"data.sources.{uid}: {corpus.folder} has {tokens} tokens to train on, one window takes "
        f"{window_tokens + 1} ({knob} + 1); use a larger corpus or a shorter window"
    ]


def _same_corpus_problems(corpora: Mapping[str, Corpus]) -> list[str]:
    problems, by_id = [], {}
    for uid, corpus in corpora.items():
        if corpus.corpus_id in by_id:
            problems.append(
                f"data.sources.{uid} and data.sources.{by_id[corpus.corpus_id]} are the same "
                f"corpus ({corpus.folder}); keep one and give it the sum of their weights"
            )
        by_id.setdefault(corpus.corpus_id, uid)
    return problems


def _tokenizer_problems(data: Data, corpora: Mapping[str, Corpus], root: Path) -> list[str]:
    """Corpora that another tokenizer made than `data.tokenizer`, or than the first corpus's.

    The end token that a corpus chose is no part of its tokenizer (see `different_ends`).
    """
    problems = []
    recorded = {uid: corpus.tokenizer_fingerprint for uid, corpus in corpora.items()}
    if data.tokenizer:
        try:
            wanted = load_tokenizer(root / data.tokenizer, needs_end=False)
        except UserError as error:
            return error.problems
        problems += [
            f"data.tokenizer={data.tokenizer} has the fingerprint {wanted.fingerprint()[:16]}, "
            f"data.sources.{uid} was made with {str(recorded[uid])[:16]}; name the tokenizer of "
            "the corpus, or tokenize the text again"
            for uid, corpus in corpora.items()
            if not corpus.is_made_with(wanted)
        ]
    if len(set(recorded.values())) > 1 and not _are_made_alike(list(corpora.values())):
        made = ", ".join(f"{uid}: {str(found)[:16]}" for uid, found in recorded.items())
        problems.append(
            f"data.sources were made with different tokenizers ({made}), so equal ids mean "
            "different text; tokenize them with one"
        )
    return problems


def _are_made_alike(corpora: Sequence[Corpus]) -> bool:
    """True where the tokenizer stored with the first corpus made all of them."""
    if any(corpus.tokenizer_fingerprint is None for corpus in corpora):
        return False
    try:
        first = load_tokenizer(corpora[0].tokenizer_folder, needs_end=False)
    except UserError:
        return False
    return all(corpus.is_made_with(first) for corpus in corpora)
