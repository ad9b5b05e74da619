"""A corpus from tokenized data of other tools: `make corpus-import IN= OUT= TOKENIZER=`.

    files --one pass: hashes, smallest and largest id, ends of documents--> OUT/ shards, manifest
    Megatron files of our types are linked, everything else is written anew
    QUICK=1: no pass; what can be linked is taken on its sizes and its index, the rest refused

Its one rule: the tokens are those of the files, in the order of their names; what does not fit is
refused. Where documents are not ended by the end id, that is said and stands in the manifest.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from base.durable import sync_folder
from base.errors import UserError
from data.corpus.build import locked, writing
from data.corpus.corpus import write_manifest
from data.corpus.corpus_writer import hash_limit
from data.corpus.indexed import CODES, token_dtype
from data.corpus.shard_writer import file_hash
from data.corpus.tokenizer import TextTokenizer
from data.foreign.linking import Facts, link, link_unread, why_not
from data.foreign.rewriting import Places, rewrite
from data.foreign.token_files import TYPES, Foreign, find_foreign
from data.text.publish import INPUTS, write_lines
from data.text.workers import progress_bar

MOST_IDS = 2**31 - 1  # what int32 holds
NOT_READ = (
    "no token was read (QUICK=1): sizes and indices are trusted, damage in a .bin is not noticed, "
    "ids are checked as they are used"
)


@dataclass(frozen=True)
class ImportSettings:
    """The knobs of `make corpus-import`."""

    vocab_size: int | None = field(
        default=None, metadata={"meaning": "ids are below it; without TOKENIZER"}
    )
    eod_id: int | None = field(default=None, metadata={"meaning": "end id; without TOKENIZER"})
    eod: str | None = field(default=None, metadata={"meaning": "end token, if not the eos_token"})
    dtype: str | None = field(default=None, metadata={"meaning": f"of flat arrays: {TYPES}"})
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
    def cuts(self) -> bool:
        """Whether the documents of one file go to several splits."""
        return bool(self.valid or self.split)


def import_corpus(
    source: str,
    out: Path,
    tokenizer: TextTokenizer | None,
    settings: ImportSettings,
    log=lambda text: None,
    is_quick: bool = False,
) -> dict:
    """Make a corpus of tokenized files and return its manifest. Raises UserError.

    is_quick: read no token; sizes and indices are trusted.
    """
    vocab_size, eod_id = _ids_of(tokenizer, settings)
    found = {"train": find_foreign(source, eod_id, settings.dtype)}
    if settings.valid_in:
        found["valid"] = find_foreign(settings.valid_in, eod_id, settings.dtype, "valid_in")
    _check_loss([one for some in found.values() for one in some], settings, log)
    for one in (one for some in found.values() for one in some):
        for note in one.shard.notes if one.shard else ():
            log(note)
    if os.path.lexists(out):
        raise UserError(f"OUT={out}: is there already; name another folder")
    with writing(out), locked(out.parent / f".{out.name}.lock", log):
        work = out.parent / f".{out.name}.work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            ids = _Ids(vocab_size, eod_id, tokenizer)
            manifest = _fill(work, found, ids, settings, log, is_quick)
            os.replace(work, out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        sync_folder(out.parent)
    return manifest


@dataclass(frozen=True)
class _Ids:
    """What the ids mean."""

    vocab_size: int
    eod_id: int
    tokenizer: TextTokenizer | None


def _fill(work, found, ids: _Ids, settings: ImportSettings, log, is_quick: bool) -> dict:
    every = [one for some in found.values() for one in some]
    types = {one.dtype for one in every}
    is_ours = len(types) == 1 and types <= set(CODES) and not settings.cuts
    dtype = types.pop() if is_ours else token_dtype(ids.vocab_size)
    if is_quick:
        _refuse_to_read(every, dtype, settings)
    shards: dict[str, list[dict]] = {"train": []}
    facts, inputs, anew = Facts(), [], 0
    names_of = {"train": iter(_names("train")), "valid": iter(_names("valid"))}
    total = sum(one.path.stat().st_size for one in every)
    with progress_bar("importing", total) as bar:
        for split, some in found.items():
            for one in some:
                as_is = not (settings.copy or settings.cuts or why_not(one, dtype))
                if as_is:
                    prefix, take = work / next(names_of[split]), link_unread if is_quick else link
                    shards.setdefault(split, []).append(take(one, prefix, facts, bar.update))
                else:
                    anew += 1
                    places = Places(work, dtype, ids.eod_id, names_of, shards)
                    cut = settings.split or settings.valid
                    rewrite(one, split, places, cut, ids.vocab_size, facts, bar.update)
                inputs.append(
                    {
                        "name": one.path.name,
                        "kind": one.kind,
                        "dtype": one.dtype.name,
                        "split": split,
                        "bytes": one.path.stat().st_size,
                        "xxh3": None if is_quick else file_hash(one.path),
                        "linked": as_is,
                    }
                )
    hashes = [
        (one.path, line["split"], line["xxh3"]) for one, line in zip(every, inputs, strict=True)
    ]
    _check(facts, shards, hashes, ids.vocab_size, settings, is_quick)
    if settings.valid_in and not is_quick:
        _check_overlap(found)
    if is_quick:
        log(NOT_READ)
    if anew:
        log(f"{anew} of {len(every)} files were written anew as {dtype.name}, the others linked")
    if facts.not_ended:
        log(
            f"{facts.not_ended:,} of {facts.documents:,} documents do not end with the end id "
            f"{ids.eod_id}; where they end is known from the index"
        )
    kept = sum(shard["documents"] for some in shards.values() for shard in some)
    left_out = facts.documents - kept
    if left_out:
        log(f"{left_out:,} of {facts.documents:,} documents are left out: split={settings.split}")
    is_as_found = is_quick or facts.not_ended > 0
    fields = {
        "name": "imported",
        "source": f"{len(every)} files",
        "vocab_size": ids.vocab_size,
        "dtype": dtype.name,
        "eod_id": ids.eod_id,
        "eod_policy": "as found" if is_as_found else "append",
        "splits": shards,
        "held_out": {"rule": _rule(settings), "share": settings.valid},
        "counts": {"documents": facts.documents}
        | ({} if is_quick else {"documents_without_end": facts.not_ended})
        | ({"documents_left_out": left_out} if left_out else {}),
        "input_files": {
            "file": INPUTS,
            "xxh3": write_lines(work / INPUTS, (json.dumps(one) for one in inputs)),
            "files": len(inputs),
            "bytes": total,
        },
        "made_with": {"python": platform.python_version(), "side_files": {}},
    }
    if is_quick:
        fields["not_read"] = NOT_READ
    return write_manifest(work, fields | _with_tokenizer(work, ids.tokenizer))


def _with_tokenizer(work: Path, tokenizer: TextTokenizer | None) -> dict:
    """Store the tokenizer; what the manifest says of it."""
    if tokenizer is None:
        return {"bos_id": None, "tokenizer": None}
    tokenizer.save(work / "tokenizer")
    sync_folder(work / "tokenizer")
    stored = {"folder": "tokenizer", "fingerprint": tokenizer.fingerprint()}
    return {"bos_id": tokenizer.bos_id, "tokenizer": stored}


def _refuse_to_read(every: list[Foreign], dtype: np.dtype, settings: ImportSettings) -> None:
    problems = [
        f"QUICK=1: {knob} would read every token; leave one of the two out"
        for knob in ("valid", "split", "copy")
        if getattr(settings, knob)
    ]
    problems += [
        f"QUICK=1: {one.path}: {reason}; it must be written anew: leave QUICK out"
        for one in every
        if (reason := why_not(one, dtype))
    ]
    if problems:
        raise UserError(*problems)


def _names(split: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{split}-{number:05d}"
        number += 1


def _ids_of(tokenizer: TextTokenizer | None, settings: ImportSettings) -> tuple[int, int]:
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
    if problems:
        raise UserError(*problems)
    return vocab_size, eod_id


def _split_problems(split: str | None) -> list[str]:
    shares = [] if split is None else split.split(",")
    if split is None or (
        len(shares) in (2, 3) and all(map(_is_share, shares)) and float(shares[0])
    ):
        return []
    return [f"split={split}: expected shares for train, valid and neither, such as 969,30,1"]


def _is_share(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _rule(settings: ImportSettings) -> str:
    if settings.split:
        return f"of each file's documents in order, split={settings.split}; texts are not compared"
    return "xxh3-64 of the ids as int32 below the share of 2**64, or files of their own"


def _check(facts: Facts, shards, hashes, vocab_size: int, settings, is_quick: bool) -> None:
    """hashes: (path, split, hash or None where it was not read) of every file."""
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


def _check_loss(files: list[Foreign], settings: ImportSettings, log) -> None:
    """A corpus holds no loss masks, so those of datatrove may not be lost in silence."""
    without = {one.path: number for one in files if (number := one.num_without_loss())}
    if without and settings.loss != "ignore":
        raise UserError(
            *(
                f"{path}.loss: takes {number} tokens out of the loss, and a corpus cannot say that:"
                " train on them too with OVERRIDES=loss=ignore; some can be masked in a run, with"
                " data.skip.mask"
                for path, number in without.items()
            )
        )
    if without:
        log(f"{sum(without.values()):,} tokens give loss although .loss files take them out")


def _check_overlap(found: dict[str, list[Foreign]]) -> None:
    """A document of valid_in must not be in IN. Only documents of a held-out length are hashed."""
    held = {xxhash.xxh3_128_digest(one) for file in found["valid"] for one in _documents(file)}
    sizes = np.unique(
        np.concatenate([lengths for f in found["valid"] for _, lengths in f.chunks()])
    )
    both = sum(
        xxhash.xxh3_128_digest(one) in held
        for file in found["train"]
        for one in _documents(file, sizes)
    )
    if both:
        raise UserError(
            f"valid_in: {both} documents of IN are also held out; take them out, or hold out by "
            "hash: OVERRIDES=valid=0.01"
        )


def _documents(file: Foreign, sizes: np.ndarray | None = None) -> Iterator[bytes]:
    for ids, lengths in file.chunks():
        stops = np.cumsum(lengths)
        mine = lengths > 0 if sizes is None else np.isin(lengths, sizes) & (lengths > 0)
        for number in np.flatnonzero(mine):
            stop = int(stops[number])
            yield ids[stop - int(lengths[number]) : stop].astype("<i8").tobytes()
