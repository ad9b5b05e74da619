"""Checks of a whole run against its data, before step 1: epochs, updates, targets, odd mixtures.

Rule: a run that would train on nothing, or pass a limit, is refused before its first step. The
checks read no token.

Units: tokens, windows of `window_tokens`, epochs (passes over all windows of a source).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from base.errors import UserError
from base.values import counted
from data.corpus.corpus import Corpus
from data.stream.skips import Skips, merged

if TYPE_CHECKING:
    from data.stream.stream import Stream

MANY_EPOCHS = 4  # beyond it repeated text gives little (Muennighoff et al. 2023, arXiv:2305.16264)
MOST_CHECKED = 10_000  # steps that are searched for one with a target


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


def source_uses(stream: Stream, steps: int) -> list[SourceUse]:
    """The use of each source in a run of that many steps, left-out ranges included."""
    last = stream.skips.data_step(steps)
    windows = -(-stream.sample_range(last)[1] * stream.seq_len // stream.window_tokens)
    draws = stream.mixture.draws_before(windows).tolist()
    stages = [step for step in stream.stage_steps if step <= last]
    uses = []
    for number, uid in enumerate(stream.uids):
        source, corpus = stream.data.sources[uid], stream.corpora[number]
        tokens, own = stream.split(number).num_tokens, int(stream.order.num_windows[number])
        uses.append(
            SourceUse(
                uid=uid,
                corpus=source.corpus,
                corpus_id=corpus.corpus_id,
                tokens=tokens,
                windows=own,
                dropped=tokens - (own * stream.window_tokens + 1),
                draws=draws[number],
                epochs=draws[number] / own,
                share=draws[number] / windows,
                stages=tuple((step, stream.mixture.share(uid, i)) for i, step in enumerate(stages)),
                max_epochs=source.max_epochs,
            )
        )
    return uses


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


def check_updates(skips: Skips, steps: int, after: int = 0) -> None:
    """Refuse a skip list that leaves no step of after + 1 .. steps to train. Raises UserError."""
    first, last = skips.data_step(after + 1), skips.data_step(steps)
    left_out = merged([*skips.advance, *skips.no_update])
    if any(low <= first and last < high for low, high in left_out):
        raise UserError(
            f"data.skip.no_update covers all {steps - after} steps{rest(after)}: nothing would be"
            " trained; shorten it, or train more steps"
        )


def check_targets(stream: Stream, steps: int, after: int = 0) -> None:
    """Raises UserError where the masks leave no target in any step of after + 1 .. steps."""
    if not stream.skips.masks:
        return
    last = min(steps, after + MOST_CHECKED)
    if any(stream.has_targets(step) for step in range(after + 1, last + 1)):
        return
    count = f"any of the {steps - after}" if last == steps else f"the first {MOST_CHECKED}"
    raise UserError(
        f"data.skip.mask leaves no target in {count} steps{rest(after)}: nothing would be trained;"
        " mask fewer documents or data steps"
    )


def rest(after: int) -> str:
    """Words for the steps that a run which goes on from step `after` still has."""
    return f" after step {after}, from which the run goes on" if after else ""


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


def without_begin(corpora: Mapping[str, Corpus]) -> list[str]:
    """A warning for each corpus whose documents nothing precedes in training."""
    return [
        f"data.sources.{uid}: no token precedes the documents of {corpus.folder} in training (it is"
        " of an older version, or its documents have no end id), so with data.attend=within the"
        " model does not learn how a document begins; build the corpus again"
        for uid, corpus in corpora.items()
        if corpus.begin_id is None
    ]


def different_ends(corpora: Mapping[str, Corpus]) -> list[str]:
    """A warning where corpora end their documents with different ids."""
    ends = {uid: corpus.eod_id for uid, corpus in corpora.items()}
    if len(set(ends.values())) < 2:
        return []
    shown = ", ".join(f"{uid}: {eod_id}" for uid, eod_id in ends.items())
    return [
        f"data.sources end their documents with different ids ({shown}): the model learns each of "
        "them as an end, and an export names that of the first; build them with one end token "
        "(eod=...)"
    ]
