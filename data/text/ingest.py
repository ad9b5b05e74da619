"""Building a corpus from text: `make corpus IN= OUT= TOKENIZER= WORKERS=`.

    inputs --plan--> units --workers--> .OUT.work/units/ --> duplicates, held-out
           --plan--> shards --workers--> .OUT.work/corpus/ --manifest last, rename--> OUT

Rule: the corpus is a function of the input, the tokenizer and the settings, never of the number of
workers or of the kills that the build survived. Work that was finished before a kill is used again.

Costs: the tokens lie on disk twice until the end; memory is bounded by workers times one batch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import xxhash

from base.durable import sync_folder
from base.errors import UserError
from base.values import counted
from data.corpus.build_lock import locked
from data.corpus.corpus import MANIFEST, read_manifest
from data.corpus.corpus_writer import hash_limit
from data.corpus.indexed import token_dtype
from data.corpus.shard_writer import file_hash
from data.corpus.tokenizer import TextTokenizer
from data.stream.evaluation import few_documents
from data.text.assemble import (
    Done,
    Selection,
    ShardTask,
    in_order,
    plan_shards,
    select_first,
    write_shard,
)
from data.text.encoding import EngineDiffers, choose_engine
from data.text.held_out import held_digests
from data.text.inputs import InputFile, check_unchanged, find_inputs, parts_of
from data.text.publish import Made, summaries, write_fields
from data.text.reading import check_columns, read_unit
from data.text.settings import Settings
from data.text.shuffle import plan_shuffled, shuffled
from data.text.unit import UnitTask, build_unit, count_lines, read_summary, unit_key
from data.text.unit_plan import Unit, plan_units
from data.text.workers import run_tasks

# With less than this, one process ends before workers have started: bytes of text, of tokens.
FEW_TEXT_BYTES, FEW_BYTES = 1 << 20, 64 << 20
SAMPLE_DOCUMENTS, SAMPLE_CHARS = 64, 1 << 20  # compared before a fast engine is used


def build_corpus(
    source: str,
    out: Path,
    tokenizer: TextTokenizer,
    settings: Settings,
    workers: int = 1,
    log: Callable[[str], None] = lambda text: None,
) -> dict:
    """Build a corpus from the inputs behind `source` and return its manifest.

    A build that was stopped is continued. Where OUT is already the same corpus, nothing is done.
    Raises UserError with every problem of the input, by file and line.
    """
    _refuse_inside(source, out)
    files = find_inputs(source, settings.kind)
    _check_before(files, tokenizer, settings)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out.parent / f".{out.name}.lock", log):
            made = _Build(files, out, tokenizer, settings, workers, log)
            try:
                return made.run()
            except BaseException as error:
                made.sweep()
                if made.work.is_dir() and isinstance(error, UserError):
                    log(
                        f"finished work is kept in {made.work}, and the corrected command continues"
                        " from it; remove that folder where there will be none"
                    )
                raise
    except OSError as error:
        if error.errno == errno.ENOSPC or "No space left" in str(error):
            raise UserError(
                f"{out}: no space left on the disk; free some and give the same command again: it "
                "goes on where it stopped"
            ) from None
        raise UserError(f"{out}: {error.filename or ''}: {error.strerror or error}") from None


class _Build:
    """One call of `make corpus`."""

    def __init__(self, files: list[InputFile], out, tokenizer, settings, workers, log):
        self.files, self.out, self.tokenizer = files, out, tokenizer
        self.settings, self.workers, self.log = settings, workers, log
        self.work = out.parent / f".{out.name}.work"
        self.folder = self.work / "corpus"
        # The begin and end ids are in every document, and no part of the tokenizer's fingerprint.
        begin_id = tokenizer.begin_id if settings.is_begin_stored(tokenizer) else None
        self.fingerprint = f"{tokenizer.fingerprint()}-{begin_id}-{tokenizer.eod_id}"
        self.units = plan_units(files, settings.document)
        self.engine = "tokenizers"

    def run(self) -> dict:
        # Finished already?
        key = self._key()
        if os.path.lexists(self.out):
            return self._already(key)
        for name in ("units", "shards", "corpus"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        # Choose the engine, and tokenize.
        differed = self.work / "gigatoken-differed"  # for a build that continues
        if not differed.exists():
            wanted = self.settings.engine
            self.engine, note = choose_engine(self.tokenizer, wanted, self._sample())
            if note:
                self.log(note)
        try:
            tasks = self._run_units()
        except EngineDiffers as difference:
            self.log(f"gigatoken gives other ids for {str(difference)!r}; using tokenizers")
            differed.touch()
            self.engine = "tokenizers"
            tasks = self._run_units()
        # Check that the input did not change, and choose the documents.
        done = _done(tasks)
        hashes = self._hash_inputs()
        check_unchanged(self.files)
        held, not_found = held_digests(self.settings, done)
        first = None
        if self.settings.duplicates == "drop":
            self.log("looking for duplicates")
            first = select_first(done, self.work / "first.bool")
        limit = hash_limit(self.settings.valid_fraction)
        # Write the shards, and the manifest last.
        shards, by_file = self._plan(done, Selection(first, limit, held))
        for warning in _check_splits(by_file, done, self.settings):
            self.log(f"warning: {warning}")
        self._run_shards(shards)
        made = Made(self.files, done, shards, [self._entry(shard) for shard in shards], by_file)
        manifest = write_fields(
            self.folder,
            made,
            self.tokenizer,
            settings=self.settings,
            hashes=hashes,
            not_found=not_found,
            volatile={"engine": self.engine, "build": key},
        )
        os.replace(self.folder, self.out)
        sync_folder(self.out.parent)
        shutil.rmtree(self.work, ignore_errors=True)
        return manifest

    def sweep(self) -> None:
        """Remove the work folder of a build that ended before it finished a unit."""
        if not any(path.suffix != ".tmp" for path in self.work.glob("units/*")):
            shutil.rmtree(self.work, ignore_errors=True)

    def _already(self, key: str) -> dict:
        if (self.out / MANIFEST).is_file():
            manifest = read_manifest(self.out)
            if manifest["made_with"].get("build") == key:
                self.log(f"{self.out} is this corpus already; nothing to do")
                shutil.rmtree(self.work, ignore_errors=True)
                return manifest
            raise UserError(
                f"OUT={self.out}: is a corpus already, of another input, tokenizer or knobs; name "
                "another folder, or remove it"
            )
        raise UserError(f"OUT={self.out}: is there and is no corpus; name another folder")

    def _key(self) -> str:
        """Identity of input, tokenizer and settings, without reading the input."""
        held = self.settings.held_out
        settings = asdict(replace(self.settings, engine="auto", held_out=None))
        if self.settings.shuffle is None:
            del settings["shuffle"]  # builds from before this knob keep their key
        what = [
            Unit(tuple(self.files)).identity(),
            settings,
            file_hash(Path(held)) if held else None,
            self.fingerprint,
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())

    def _sample(self) -> list[str]:
        """The first texts of the input, for the check of a fast engine."""
        if self.settings.engine == "tokenizers":
            return []
        texts, chars = [], 0
        for unit in self.units:
            for record in read_unit(unit, self.settings, lambda count: None):
                if record.data is not None:
                    data = record.data
                    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
                    texts.append(text.encode("utf-8", "replace").decode())
                    chars += len(text)
                if len(texts) >= SAMPLE_DOCUMENTS or chars >= SAMPLE_CHARS:
                    return texts
        return texts

    def _run_units(self) -> list[UnitTask]:
        """Work on all unfinished units; remove folders that belong to no unit of this build."""
        root, settings = self.work / "units", self.settings
        tasks = [
            UnitTask(unit, root / unit_key(unit, settings, self.fingerprint, self.engine), settings)
            for unit in self.units
        ]
        names = {task.folder.name for task in tasks}
        for folder in root.iterdir():
            if folder.name not in names:
                shutil.rmtree(folder)
        todo = [task for task in tasks if not task.folder.is_dir()]
        if len(todo) < len(tasks):
            self.log(f"continuing: {len(tasks) - len(todo)} of {len(tasks)} units are finished")
        bad = sum(_bad(read_summary(t.folder)) for t in tasks if t.folder.is_dir())
        self._check_bad(bad)

        def on_done(number: int, _: None) -> None:
            nonlocal bad
            bad += _bad(read_summary(todo[number].folder))
            self._check_bad(bad)

        total = sum(task.unit.bytes for task in tasks)
        left = sum(task.unit.bytes for task in todo)
        run_tasks(
            build_unit,
            todo,
            self.workers if left > FEW_TEXT_BYTES else 1,
            title="tokenizing",
            total_bytes=total,
            done_bytes=total - left,
            tokenizer=self.tokenizer,
            engine=self.engine,
            on_done=on_done,
        )
        return tasks

    def _check_bad(self, bad: int) -> None:
        if 0 < self.settings.max_bad < bad:
            reasons: Counter = Counter()
            last = ""
            for folder in sorted((self.work / "units").glob("*/bad.jsonl")):
                for line in folder.read_text().splitlines():
                    one = json.loads(line)
                    reasons[one["reason"]] += 1
                    last = last or f"{one['file']}: {one['detail']}"
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            raise UserError(
                f"max_bad={self.settings.max_bad}: more bad lines than that ({counts}); for "
                f"instance {last}; correct the input, or raise the limit (-1: any number)"
            )

    def _plan(self, done: list[Done], selection: Selection):
        dtype = token_dtype(self.tokenizer.vocab_size)
        max_tokens = (self.settings.shard_mib << 20) // dtype.itemsize

        def make(**fields) -> ShardTask:
            task = ShardTask(self.folder, dtype=dtype.name, eod_id=self.tokenizer.eod_id, **fields)
            units = [[unit.folder.name, unit.row_base] for unit in task.units]
            what = [units, task.first, task.stop, task.number, task.documents, task.tokens]
            chosen = [self.settings.duplicates, selection.hash_limit, task.eod_id]
            chosen += [] if task.rows is None else [self.settings.shuffle]
            text = json.dumps([*what, *chosen])
            digest = xxhash.xxh3_128(text.encode())
            digest.update(selection.held_digests.tobytes())
            digest.update(json.dumps([u.folder.name for u in done]).encode())
            return replace(task, key=digest.hexdigest())

        if self.settings.shuffle is None:
            return plan_shards(done, selection, max_tokens, make)
        seed, rows = self.settings.shuffle, self.work / "rows"
        return plan_shuffled(done, selection, max_tokens, make, seed, rows)

    def _run_shards(self, shards: list[ShardTask]) -> None:
        todo = [shard for shard in shards if self._entry(shard) is None]
        wanted = {f"{shard.name}.json" for shard in shards}
        for path in (self.work / "shards").iterdir():
            if path.name not in wanted:
                path.unlink()
        whole = {shard.name for shard in shards} - {shard.name for shard in todo}
        for path in self.folder.iterdir():
            if path.name.split(".")[0] not in whole:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        size = token_dtype(self.tokenizer.vocab_size).itemsize
        total = sum(shard.tokens for shard in shards) * size
        run_tasks(
            _shard_work,
            todo,
            self.workers if total > FEW_BYTES else 1,
            title="writing shards",
            total_bytes=total,
            done_bytes=sum(s.tokens for s in shards if s not in todo) * size if todo else 0,
        )

    def _entry(self, shard: ShardTask) -> dict | None:
        path = self.work / "shards" / f"{shard.name}.json"
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        return found if found["key"] == shard.key else None

    def _hash_inputs(self) -> dict[str, str]:
        """xxh3-128 of every input file, by name; kept on disk for a build that continues."""
        path = self.work / "hashes.jsonl"
        known = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    name, size, mtime_ns, digest = json.loads(line)
                except ValueError:
                    continue  # a line that was torn by a kill
                known[name, size, mtime_ns] = digest
        hashes = {}
        with open(path, "a") as file:
            file.write("\n")
            for one in self.files:
                key = (one.name, one.bytes, one.mtime_ns)
                hashes[one.name] = known.get(key) or file_hash(one.path)
                if key not in known:
                    file.write(json.dumps([*key, hashes[one.name]]) + "\n")
                    file.flush()
        return hashes


def _refuse_inside(source: str, out: Path) -> None:
    for part in parts_of(source):
        if Path(part).is_dir() and out.resolve().is_relative_to(Path(part).resolve()):
            raise UserError(
                f"OUT={out}: lies in IN={part}, where the next build would read it; name a folder "
                "elsewhere, or what is to be read by a glob"
            )


def _check_before(files, tokenizer: TextTokenizer, settings: Settings) -> None:
    """Raises UserError with everything that is known to be wrong before any text is read."""
    problems = []
    for file in files:
        try:
            check_columns(file, settings)
        except UserError as error:
            problems += error.problems
    if settings.bos and tokenizer.begin_id == tokenizer.eod_id:
        problems.append(
            "bos=true: the tokenizer has no begin token (bos_token) besides its end token, which"
            " precedes each document in any case; leave it out"
        )
    if len({file.name for file in files}) < len(files):
        problems.append("IN: two inputs have the same name below their common folder")
    if problems:
        raise UserError(*problems)


def _done(tasks: list[UnitTask]) -> list[Done]:
    """Finished units with the number of documents and rows before them."""
    done, first, rows, previous = [], 0, 0, None
    for task in tasks:
        summary, file = read_summary(task.folder), task.unit.files[0]
        documents = sum(counts.get("documents_read", 0) for counts in summary["counts"])
        if file != previous or not task.unit.is_range:
            rows = 0
        elif task.unit.start:
            rows = rows or count_lines(file, task.unit.start)
        done.append(Done(task.folder, tuple(summary["files"]), first, rows, documents))
        first, previous = first + documents, file
        rows += summary["rows"]
    return done


def _check_splits(by_file, done: list[Done], settings: Settings) -> list[str]:
    """Warnings about the sizes of the splits. Raises UserError where one is empty."""
    total: Counter = Counter()
    for counts in by_file.values():
        total.update(counts)
    train, valid = total["documents_train"], total["documents_valid"]
    found = (
        f"{train} for training and {valid} for validation, of {counted(train + valid, 'document')}"
    )
    if not train:
        dropped = Counter()
        for summary in summaries(done):
            for counts in summary["counts"]:
                dropped.update(counts)
        some = {key: n for key, n in sorted(dropped.items()) if n and not key.endswith("_read")}
        text = ", ".join(f"{n} {key}" for key, n in some.items()) or "no rows"
        raise UserError(
            f"{found}; nothing to train on ({text}): add text, loosen the filters, or hold out less"
        )
    if not valid and (settings.valid_fraction or settings.held_out):
        raise UserError(
            f"{found}; hold out more (OVERRIDES=valid=0.1), or build without validation: "
            "OVERRIDES=valid=0"
        )
    return few_documents(valid) if valid else []


def _shard_work(task: ShardTask, encoder, advance) -> None:
    write_shard(task, in_order(task) if task.rows is None else shuffled(task), advance)


def _bad(summary: dict) -> int:
    return sum(counts.get("bad", 0) for counts in summary["counts"])
