"""The sources of a recipe: opened, checked, and the part of each that a run uses.

Rule: everything that can be known to be wrong is reported together, before step 1. A source of
weight 0 is never drawn and never opened.

Units: tokens, windows of `window_tokens`, epochs (passes over all windows of a source).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.values import counted
from data.corpus.build import ensure
from data.corpus.corpus import MANIFEST, Corpus, open_corpus
from data.corpus.shards import Split
from data.corpus.tokenizer import load_tokenizer
from data.stream.mixture import shares_of
from data.stream.skips import Skips, merged
from recipes.schema import Data

MANY_EPOCHS = 4  # beyond it repeated text gives little (Muennighoff et al. 2023, arXiv:2305.16264)


@dataclass(frozen=True)
class SourceUse:
    """The use of one source in a run."""

    uid: str
    corpus: str
    corpus_id: str
    tokens: int  # in its training split
    windows: int
    dropped: int  # tokens at its end that fill no window
    draws: int
    epochs: float
    share: float  # of the run's samples
    stages: tuple[tuple[int, float], ...]  # (first data step, share from there on)
    max_epochs: float | None


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


def check_epochs(uses: list[SourceUse], steps: int) -> list[str]:
    """Warnings about repeated sources; raises UserError where one exceeds its max_epochs."""
    problems, warnings = [], []
    for use in uses:
        text = f"{use.epochs:.2f} epochs of {use.corpus} ({use.tokens:,} tokens) in {steps} steps"
        if use.max_epochs is not None and use.epochs > use.max_epochs:
            problems.append(
                f"data.sources.{use.uid}.max_epochs={use.max_epochs}: the run would take {text}; "
                "train fewer steps, lower its weight, or raise the limit"
            )
        elif use.max_epochs is None and use.epochs > MANY_EPOCHS:
            warnings.append(
                f"data.sources.{use.uid}: {text}; more than {MANY_EPOCHS} give little, "
                f"max_epochs={math.ceil(use.epochs)} accepts it"
            )
    if problems:
        raise UserError(*problems)
    return warnings


def check_updates(skips: Skips, steps: int) -> None:
    """Refuse a skip list that leaves no step of the run to train. Raises UserError."""
    first, last = skips.data_step(1), skips.data_step(steps)
    left_out = merged([*skips.advance, *skips.no_update])
    if any(low <= first and last < high for low, high in left_out):
        raise UserError(
            f"data.skip.no_update covers all {steps} steps: nothing would be trained; shorten it,"
            " or train more steps"
        )


def twins(corpora: Mapping[str, Corpus]) -> list[str]:
    """Warnings about sources whose corpora differ but hold the same training text.

    A shard in two corpora with equal bytes is trained on twice; that may be meant.
    """
    seen, warnings = {}, {}
    for uid, corpus in corpora.items():
        for shard in corpus.manifest["splits"]["train"]:
            key = shard["bin_xxh3"] or (uid, shard["name"]), shard["idx_xxh3"]  # None: not known
            other = seen.setdefault(key, uid)
            if other != uid and shard["tokens"]:
                warnings.setdefault((other, uid), []).append(shard["tokens"])
    return [
        f"data.sources.{uid} and data.sources.{other} share {counted(len(tokens), 'equal shard')}"
        " of"
        f" {sum(tokens):,} tokens, which count twice; keep one of them, and give it more weight"
        for (other, uid), tokens in warnings.items()
    ]


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
    problems = []
    made_with = {uid: corpus.tokenizer_fingerprint for uid, corpus in corpora.items()}
    if data.tokenizer:
        try:
            wanted = load_tokenizer(root / data.tokenizer).fingerprint()
        except UserError as error:
            return error.problems
        problems += [
            f"data.tokenizer={data.tokenizer} has the fingerprint {wanted[:16]}, "
            f"data.sources.{uid} was made with {str(found)[:16]}; name the tokenizer of the "
            "corpus, or tokenize the text again"
            for uid, found in made_with.items()
            if found != wanted
        ]
    if len(set(made_with.values())) > 1:
        made = ", ".join(f"{uid}: {str(found)[:16]}" for uid, found in made_with.items())
        problems.append(
            f"data.sources were made with different tokenizers ({made}), so equal ids mean "
            "different text; tokenize them with one"
        )
    return problems
