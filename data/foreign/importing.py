"""A corpus from tokenized data of other tools: `make corpus-import IN= OUT= TOKENIZER=`.

    files --one pass: hashes, smallest and largest id, ends of documents--> OUT/ shards, manifest
    Megatron files of our types are linked, everything else is written anew
    QUICK=1: no pass; files that can be linked are taken on their sizes and index, others refused

Rule: the tokens are those of the files, in the order of their names; a file that does not fit is
refused. Where documents do not end with the end id, the log and the manifest state it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from base.durable import sync_folder
from base.errors import UserError
from base.values import counted
from data.corpus.build import writing
from data.corpus.build_lock import locked
from data.corpus.corpus import BEGIN_SHARED, BEGIN_STORED, write_manifest
from data.corpus.indexed import CODES, token_dtype
from data.corpus.shard_writer import file_hash
from data.corpus.tokenizer import TextTokenizer
from data.foreign.flat_arrays import FlatStatistics
from data.foreign.import_checks import (
    ImportSettings,
    begin_id_of,
    check_loss,
    check_overlap,
    check_result,
    refuse_to_read,
    resolve_ids,
)
from data.foreign.linking import Facts, link, link_unread, why_not
from data.foreign.rewriting import Places, rewrite
from data.foreign.token_files import Foreign, find_foreign
from data.text.publish import INPUTS, write_lines
from data.text.workers import progress_bar

NOT_READ = (
    "no token was read (QUICK=1) but the edges of some documents: sizes and indices are trusted, "
    "damage in a .bin is not noticed, ids are checked as they are used"
)


def import_corpus(
    source: str,
    out: Path,
    tokenizer: TextTokenizer | None,
    settings: ImportSettings,
    log: Callable[[str], None] = lambda text: None,
    is_quick: bool = False,
) -> dict:
    """Make a corpus of tokenized files and return its manifest. Raises UserError.

    is_quick: read no token; sizes and indices are trusted.
    """
    vocab_size, eod_id = resolve_ids(tokenizer, settings)
    found = {"train": find_foreign(source, eod_id, settings.dtype)}
    if settings.valid_in:
        found["valid"] = find_foreign(settings.valid_in, eod_id, settings.dtype, "valid_in")
    begin_id = begin_id_of(tokenizer, settings)
    found = {
        split: [replace(one, begin_id=begin_id) for one in some] for split, some in found.items()
    }
    files = [one for some in found.values() for one in some]
    check_loss(files, settings, log)
    for one in files:
        for note in one.shard.notes if one.shard else ():
            log(note)
    if os.path.lexists(out):
        raise UserError(f"OUT={out}: is there already; name another folder")
    with writing(out), locked(out.parent / f".{out.name}.lock", log):
        work = out.parent / f".{out.name}.work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            job = _Import(work, found, vocab_size, eod_id, tokenizer, settings, is_quick)
            manifest = _run(job, log)
            os.replace(work, out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        sync_folder(out.parent)
    return manifest


@dataclass(frozen=True)
class _Import:
    """One import: the files by split, the meaning of their ids, and where the corpus is made."""

    work: Path
    found: Mapping[str, list[Foreign]]
    vocab_size: int
    eod_id: int
    tokenizer: TextTokenizer | None
    settings: ImportSettings
    is_quick: bool

    @property
    def files(self) -> list[Foreign]:
        return [one for some in self.found.values() for one in some]

    def dtype(self) -> np.dtype:
        """Type of the shards: that of the files, where they can be linked, else the smallest."""
        types = {one.dtype for one in self.files}
        is_ours = len(types) == 1 and types <= set(CODES) and not self.settings.is_divided
        return types.pop() if is_ours else token_dtype(self.vocab_size)


@dataclass
class _Written:
    """The shards of an import while they are written, by split, and what was found on the way."""

    dtype: np.dtype
    shards: dict[str, list[dict]] = field(default_factory=lambda: {"train": []})
    facts: Facts = field(default_factory=Facts)
    inputs: list[dict] = field(default_factory=list)  # a line for each file
    notes: list[str] = field(default_factory=list)  # for the log

    @property
    def num_rewritten(self) -> int:
        return sum(not line["linked"] for line in self.inputs)

    @property
    def num_left_out(self) -> int:
        """Documents of the files that no shard holds, because `split=` leaves them out."""
        kept = sum(shard["documents"] for some in self.shards.values() for shard in some)
        return self.facts.documents - kept


def _run(job: _Import, log: Callable[[str], None]) -> dict:
    """Write the shards, check them, log the findings, publish the manifest and return it."""
    written = _Written(job.dtype())
    if job.is_quick:
        refuse_to_read(job.files, written.dtype, job.settings)
    _write_shards(job, written)
    hashes = [
        (one.path, line["split"], line["xxh3"])
        for one, line in zip(job.files, written.inputs, strict=True)
    ]
    check_result(written.facts, written.shards, hashes, job.vocab_size, job.settings, job.is_quick)
    if job.settings.valid_in and not job.is_quick:
        check_overlap(job.found["train"], job.found["valid"])
    _log_findings(job, written, log)
    return write_manifest(job.work, _manifest_fields(job, written))


def _write_shards(job: _Import, written: _Written) -> None:
    """Link each file, or write its documents into new shards, in the order of the files."""
    names = {"train": iter(_names("train")), "valid": iter(_names("valid"))}
    places = Places(job.work, written.dtype, job.eod_id, names, written.shards)
    take = link_unread if job.is_quick else link
    with progress_bar("importing", sum(one.path.stat().st_size for one in job.files)) as bar:
        for split, some in job.found.items():
            for one in some:
                is_linked = not (
                    job.settings.copy or job.settings.is_divided or why_not(one, written.dtype)
                )
                if is_linked:
                    entry = take(one, job.work / next(names[split]), written.facts, bar.update)
                    written.shards.setdefault(split, []).append(entry)
                else:
                    _rewrite(job, one, split, places, written, bar.update)
                written.inputs.append(_input_line(one, split, is_linked, job.is_quick))


def _rewrite(
    job: _Import, one: Foreign, split: str, places: Places, written: _Written, advance
) -> None:
    """Write one file anew; refuse a flat array whose statistics contradict its declaration."""
    statistics = FlatStatistics(job.vocab_size, job.eod_id) if one.kind == "flat" else None
    cut = job.settings.split or job.settings.valid
    rewrite(one, split, places, cut, job.vocab_size, written.facts, advance, statistics)
    if statistics is None:
        return
    written.notes.append(f"{one.path}: flat array of {one.dtype.name}, {statistics.summary()}")
    problems = statistics.problems(one.path, one.dtype)
    if problems and job.settings.unusual == "refuse":
        raise UserError(*problems)
    written.notes += problems


def _input_line(one: Foreign, split: str, is_linked: bool, is_quick: bool) -> dict:
    return {
        "name": one.path.name,
        "kind": one.kind,
        "dtype": one.dtype.name,
        "split": split,
        "bytes": one.path.stat().st_size,
        "xxh3": None if is_quick else file_hash(one.path),
        "linked": is_linked,
    }


def _log_findings(job: _Import, written: _Written, log: Callable[[str], None]) -> None:
    facts = written.facts
    for note in written.notes:
        log(note)
    if job.is_quick:
        log(NOT_READ)
    if written.num_rewritten:
        log(
            f"written anew as {written.dtype.name}, not linked: {written.num_rewritten} of"
            f" {counted(len(job.files), 'file')}"
        )
    if facts.not_ended and not job.is_quick:
        log(
            f"without the end id {job.eod_id} at their end: {facts.not_ended:,} of"
            f" {counted(facts.documents, 'document')}; the index shows where they end"
        )
    if 0 < facts.begun < facts.seen:
        log(
            f"{facts.begun:,} of {facts.seen:,} documents begin with the begin id"
            f" {job.files[0].begin_id}, the others do not; it is not taken for their begin"
        )
    if written.num_left_out:
        log(
            f"left out by split={job.settings.split}: {written.num_left_out:,} of"
            f" {counted(facts.documents, 'document')}"
        )


def _manifest_fields(job: _Import, written: _Written) -> dict:
    """Fields of the manifest; writes the list of inputs and the tokenizer, which it names."""
    facts, settings = written.facts, job.settings
    is_as_found = job.is_quick or facts.not_ended > 0
    counts = {"documents": facts.documents}
    if not job.is_quick:
        counts["documents_without_end"] = facts.not_ended
    if written.num_left_out:
        counts["documents_left_out"] = written.num_left_out
    fields = {
        "name": "imported",
        "source": counted(len(job.files), "file"),
        "vocab_size": job.vocab_size,
        "dtype": written.dtype.name,
        "eod_id": job.eod_id,
        "eod_policy": "as found" if is_as_found else "append",
        **_begin_fields(job, facts),
        "splits": written.shards,
        "held_out": {"rule": _rule(settings), "share": settings.valid},
        "counts": counts,
        "input_files": {
            "file": INPUTS,
            "xxh3": write_lines(job.work / INPUTS, (json.dumps(one) for one in written.inputs)),
            "files": len(job.files),
            "bytes": sum(one.path.stat().st_size for one in job.files),
        },
        "made_with": {"python": platform.python_version(), "side_files": {}},
    }
    if job.is_quick:
        fields["not_read"] = NOT_READ
    return fields | _with_tokenizer(job.work, job.tokenizer)


def _begin_fields(job: _Import, facts: Facts) -> dict:
    """Fields of the manifest for the token that precedes a document in training.

    A quick import judges by the edges of some documents; a stream checks each end before its use.
    """
    begin_id = job.files[0].begin_id
    if begin_id is not None and facts.begun == facts.seen > 0:
        return {"begin_id": begin_id, "begin_policy": BEGIN_STORED}
    if facts.not_ended:
        return {"begin_id": None, "begin_policy": "none"}
    return {"begin_id": job.eod_id, "begin_policy": BEGIN_SHARED}


def _with_tokenizer(work: Path, tokenizer: TextTokenizer | None) -> dict:
    """Store the tokenizer; returns its fields of the manifest."""
    if tokenizer is None:
        return {"bos_id": None, "tokenizer": None}
    tokenizer.save(work / "tokenizer")
    sync_folder(work / "tokenizer")
    stored = {"folder": "tokenizer", "fingerprint": tokenizer.fingerprint()}
    return {"bos_id": tokenizer.bos_id, "tokenizer": stored}


def _names(split: str) -> Iterator[str]:
    """Names of the shards of a split, in order, without end."""
    number = 0
    while True:
        yield f"{split}-{number:05d}"
        number += 1


def _rule(settings: ImportSettings) -> str:
    if settings.split:
        return f"of each file's documents in order, split={settings.split}; texts are not compared"
    return "xxh3-64 of the ids as int32 below the share of 2**64, or files of their own"
