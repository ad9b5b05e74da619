"""Settings and files that an import refuses, each with the reason and the way out.

Rule: everything that can be known before a token is read is refused before a file is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from base.errors import UserError
from data.corpus.corpus_writer import hash_limit
from data.corpus.tokenizer import TextTokenizer
from data.foreign.linking import Facts, why_not
from data.foreign.token_files import TYPES, Foreign

MOST_IDS = 2**31 - 1  # the largest number that int32 holds


@dataclass(frozen=True)
class ImportSettings:
    """The knobs of `make corpus-import`."""

    vocab_size: int | None = field(
        default=None, metadata={"meaning": "ids are below it; without TOKENIZER"}
    )
    eod_id: int | None = field(default=None, metadata={"meaning": "end id; without TOKENIZER"})
    begin_id: int | None = field(
        default=None, metadata={"meaning": "id that begins each document; without TOKENIZER"}
    )
    eod: str | None = field(default=None, metadata={"meaning": "end token, if not the eos_token"})
    dtype: str | None = field(
        default=None, metadata={"meaning": f"files without index are flat arrays of {TYPES}"}
    )
    unusual: str = field(
        default="refuse",
        metadata={"meaning": "accept: take flat arrays whose statistics look wrong"},
    )
    valid: float = field(default=0.0, metadata={"meaning": "share of documents held out, by hash"})
    valid_in: str | None = field(default=None, metadata={"meaning": "files that are held out"})
    loss: str = field(
        default="keep",
        metadata={"meaning": "ignore: train also on what datatrove's .loss files take out"},
    )
    split: str | None = field(
        default=None,
        metadata={"meaning": "969,30,1: of each file's documents, in order: train, valid, neither"},
    )
    copy: bool = field(default=False, metadata={"meaning": "true: copy also what could be linked"})

    @property
    def is_divided(self) -> bool:
        """True where the documents of one file go to several splits."""
        return bool(self.valid or self.split)


def resolve_ids(tokenizer: TextTokenizer | None, settings: ImportSettings) -> tuple[int, int]:
    """The vocabulary size and the end id. Raises UserError with every setting that is wrong."""
    problems = list(_split_problems(settings.split))
    if tokenizer is None and (settings.vocab_size is None or settings.eod_id is None):
        problems.append(
            "TOKENIZER= is not given: name the tokenizer that made the ids, or give both "
            'OVERRIDES="vocab_size=... eod_id=..."'
        )
    elif tokenizer and settings.eod_id not in (None, tokenizer.eod_id):
        problems.append(
            f"eod_id={settings.eod_id}: the tokenizer's end token has the id {tokenizer.eod_id}"
        )
    if settings.loss not in ("keep", "ignore"):
        problems.append(f"loss={settings.loss}: is neither keep nor ignore")
    if settings.unusual not in ("refuse", "accept"):
        problems.append(f"unusual={settings.unusual}: is neither refuse nor accept")
    if settings.dtype not in (None, *TYPES):
        problems.append(f"dtype={settings.dtype}: is not one of {', '.join(TYPES)}")
    if sum(map(bool, (settings.valid, settings.valid_in, settings.split))) > 1:
        problems.append("valid=, valid_in= and split=: give one of them")
    try:
        hash_limit(settings.valid)
    except UserError as error:
        problems += error.problems
    vocab_size, eod_id = settings.vocab_size, settings.eod_id
    if vocab_size is None and tokenizer:
        vocab_size = tokenizer.vocab_size
    if eod_id is None and tokenizer:
        eod_id = tokenizer.eod_id
    if vocab_size is not None and not 1 <= vocab_size <= MOST_IDS:
        problems.append(f"vocab_size={vocab_size}: is not from 1 to {MOST_IDS}")
    elif None not in (vocab_size, eod_id) and not 0 <= eod_id < vocab_size:
        problems.append(f"eod_id={eod_id}: is no id from 0 to {vocab_size - 1} (vocab_size - 1)")
    if None not in (vocab_size, settings.begin_id) and not 0 <= settings.begin_id < vocab_size:
        problems.append(f"begin_id={settings.begin_id}: is no id from 0 to {vocab_size - 1}")
    if problems:
        raise UserError(*problems)
    return vocab_size, eod_id


def begin_id_of(tokenizer: TextTokenizer | None, settings: ImportSettings) -> int | None:
    """The id, other than the end id, that may begin each document; None where there is none."""
    if settings.begin_id is not None or tokenizer is None:
        return settings.begin_id
    return None if tokenizer.begin_id == tokenizer.eod_id else tokenizer.begin_id


def refuse_to_read(files: Iterable[Foreign], dtype: np.dtype, settings: ImportSettings) -> None:
    """Raises UserError where QUICK=1 is given and something would need every token."""
    problems = [
        f"QUICK=1: {knob} would read every token; leave one of the two out"
        for knob in ("valid", "split", "copy")
        if getattr(settings, knob)
    ]
    problems += [
        f"QUICK=1: {one.path}: {reason}; it must be written anew: leave QUICK out"
        for one in files
        if (reason := why_not(one, dtype))
    ]
    if problems:
        raise UserError(*problems)


def check_loss(
    files: Iterable[Foreign], settings: ImportSettings, log: Callable[[str], None]
) -> None:
    """Raises UserError where a .loss file of datatrove takes tokens out of the loss.

    A corpus holds no loss masks, so those of datatrove may not be lost in silence.
    """
    without = {one.path: number for one in files if (number := one.num_without_loss())}
    if without and settings.loss != "ignore":
        raise UserError(
            *(
                f"{path}.loss: takes {number} tokens out of the loss, and a corpus cannot record"
                " that: train on them too with OVERRIDES=loss=ignore; some can be masked in a run,"
                " with data.skip.mask"
                for path, number in without.items()
            )
        )
    if without:
        log(f"{sum(without.values()):,} tokens give loss although .loss files take them out")


def check_result(
    facts: Facts,
    shards: Mapping[str, Sequence[dict]],
    hashes: Iterable[tuple[Path, str, str | None]],
    vocab_size: int,
    settings: ImportSettings,
    is_quick: bool,
) -> None:
    """Raises UserError where the files hold wrong ids, the same ids twice, or an empty split.

    hashes: (path, split, hash or None where it was not read) of every file.
    """
    problems, seen = [], {}
    for path, split, digest in hashes:
        other = seen.setdefault((split, digest), path)
        if other != path and digest and path.stat().st_size:
            problems.append(f"{path}: holds the same ids as {other}; name it once")
    if not any(shard["tokens"] for shard in shards["train"]):
        problems.append("IN: holds no tokens to train on")
    elif not is_quick and (facts.max_id >= vocab_size or facts.min_id < 0):
        problems.append(
            f"IN: holds the ids {facts.min_id} to {facts.max_id}, expected 0 to {vocab_size - 1}; "
            "name the tokenizer that made them, or their vocab_size"
        )
    wants = settings.valid or (settings.split and float(settings.split.split(",")[1]))
    if wants and not shards.get("valid"):
        knob = f"valid={settings.valid}" if settings.valid else f"split={settings.split}"
        problems.append(f"{knob}: no document is held out; hold out more")
    if problems:
        raise UserError(*problems)


def check_overlap(train: Sequence[Foreign], valid: Sequence[Foreign]) -> None:
    """Raises UserError where a document of valid_in is also in IN.

    Only documents as long as one that is held out are hashed.
    """
    held = {xxhash.xxh3_128_digest(one) for file in valid for one in _documents(file)}
    sizes = np.unique(np.concatenate([lengths for file in valid for _, lengths in file.chunks()]))
    both = sum(
        xxhash.xxh3_128_digest(one) in held for file in train for one in _documents(file, sizes)
    )
    if both:
        raise UserError(
            f"valid_in: {both} documents of IN are also held out; take them out, or hold out by "
            "hash: OVERRIDES=valid=0.01"
        )


def _documents(file: Foreign, sizes: np.ndarray | None = None) -> Iterator[bytes]:
    """Documents that are not empty as bytes of int64 ids; of these lengths alone, where given."""
    for ids, lengths in file.chunks():
        stops = np.cumsum(lengths)
        mine = lengths > 0 if sizes is None else np.isin(lengths, sizes) & (lengths > 0)
        for number in np.flatnonzero(mine):
            stop = int(stops[number])
            yield ids[stop - int(lengths[number]) : stop].astype("<i8").tobytes()


def _split_problems(split: str | None) -> list[str]:
    shares = [] if split is None else split.split(",")
    if split is None or (
        len(shares) in (2, 3) and all(map(_is_share, shares)) and float(shares[0])
    ):
        return []
    return [f"split={split}: expected shares for train, valid and neither, such as 969,30,1"]


def _is_share(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None
