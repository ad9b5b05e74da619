"""A corpus: a folder with manifest.json, shards, and the tokenizer that made them. Opening,
checking, identity.

    corpora/prose/  manifest.json  train-00000.bin .idx .xxh ...  valid-00000.bin ...  tokenizer/

Rule: the manifest is the corpus. A shard that it does not list does not exist; the order of the
shards is the order of its list; its id (SHA-256 of its content, without fields that may differ
between equal builds) is the identity that a run records. Sizes, hashes and the structure of every
index are checked before step 1, token blocks when they are first touched (`shards.py`).

Units: tokens, bytes. Hashes are xxh3-128 in hex for files, SHA-256 for identities.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base.durable import sync_folder
from base.errors import UserError
from base.values import first_of
from data.corpus.block_hashes import side_file_bytes
from data.corpus.indexed import Shard, check_shard
from data.corpus.shard_writer import PublishedFile, file_hash
from data.corpus.shards import Split
from data.corpus.tokenizer import TextTokenizer

FORMAT = "corpus-1"
MANIFEST = "manifest.json"
VOLATILE = ("corpus_id", "made_with")  # fields that are not part of the identity
# Fields that are read from a manifest, with their types. Others may stand beside them.
FIELDS = {
    "vocab_size": int,
    "dtype": str,
    "eod_id": int,
    "eod_policy": str,
    "tokenizer": (dict, type(None)),
    "splits": dict,
}
TOKENIZER_FIELDS = {"folder": str, "fingerprint": str}
SHARD_FIELDS = dict.fromkeys(
    ("tokens", "sequences", "documents", "bin_bytes", "idx_bytes"), int
) | dict.fromkeys(("name", "idx_xxh3"), str)
# None: not known, because no process has read the tokens.
SHARD_FIELDS |= dict.fromkeys(("eod_count", "max_id"), (int, type(None)))
SHARD_FIELDS |= dict.fromkeys(("bin_xxh3", "xxh_xxh3"), (str, type(None)))
# Token that precedes a document in training (`begin_policy`; absent in older corpora: none does).
BEGIN_SHARED = "the end id of the document before"
BEGIN_STORED = "the first id of each document"
ORDER_RULE = "the shards of a split follow each other in the order of this list"
MAX_PROBLEMS = 20  # shown at once; a cut disk damages hundreds of files


@dataclass(frozen=True)
class Corpus:
    """An opened, checked corpus. `splits` holds "train" and, where documents were held out,
    "valid".
    """

    folder: Path
    manifest: Mapping
    splits: Mapping[str, Split]

    @property
    def corpus_id(self) -> str:
        return self.manifest["corpus_id"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def eod_id(self) -> int:
        return self.manifest["eod_id"]

    @property
    def begin_id(self) -> int | None:
        """The id that precedes each document in training; None where none does."""
        if "begin_policy" in self.manifest:
            return self.manifest["begin_id"]
        is_stored = self.manifest.get("bos_policy") == "prepend"  # an older corpus with bos=true
        return self.manifest["bos_id"] if is_stored else None

    @property
    def is_begin_shared(self) -> bool:
        """True where the end id before a document is also its begin id, and its first input."""
        return self.manifest.get("begin_policy") == BEGIN_SHARED

    @property
    def tokenizer_folder(self) -> Path | None:
        """Folder of the tokenizer; None for a corpus that was made from ids."""
        tokenizer = self.manifest["tokenizer"]
        return self.folder / tokenizer["folder"] if tokenizer else None

    @property
    def tokenizer_fingerprint(self) -> str | None:
        tokenizer = self.manifest["tokenizer"]
        return tokenizer["fingerprint"] if tokenizer else None

    def is_made_with(self, tokenizer: TextTokenizer) -> bool:
        """True where a tokenizer made the corpus, whichever end token was chosen for it."""
        recorded = self.tokenizer_fingerprint
        return recorded is not None and tokenizer.is_recorded_as(recorded)

    @property
    def notes(self) -> list[str]:
        """Oddities of its files that were tolerated."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        unread = (
            []
            if all(shard.is_hashed for shard in shards)
            else [self.manifest.get("not_read", "has no hashes")]
        )
        notes = [f"{self.folder}: {text}" for text in unread]
        return notes + [note for shard in shards for note in shard.notes]


def open_corpus(folder: Path, vocab_size: int | None = None) -> Corpus:
    """Open a corpus after checking everything but the tokens themselves.

    vocab_size: rows of the model's embedding; a corpus whose largest id is not below it is refused.
    Raises UserError with every problem found: file, expected, found.
    """
    manifest = read_manifest(folder)
    problems = _id_problems(folder, manifest, vocab_size)
    splits, seen = {}, {}
    for name, entries in manifest["splits"].items():
        shards = []
        for entry in entries:
            try:
                _refuse_twice(folder, entry, seen)
                shards.append(_checked_shard(folder, entry, manifest))
            except UserError as error:
                problems += error.problems
        splits[name] = Split(shards)
    if problems:
        raise UserError(*first_of(problems, MAX_PROBLEMS, "problems"))
    return Corpus(folder, manifest, splits)


def read_manifest(folder: Path) -> dict:
    """The manifest of a corpus folder, its id checked.

    Raises UserError where there is none, or where it was edited.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{path}: not found, so {folder} is no corpus (or one whose build did not finish); "
            "build it, or correct data.sources.*.corpus"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
        found_format = manifest["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is not a manifest: {error!r}; restore it or build the corpus again"
        ) from None
    if found_format != FORMAT:
        raise UserError(f"{path}: expected format {FORMAT}, found {found_format!r}")
    expected = corpus_id(manifest)
    if manifest.get("corpus_id") != expected:
        raise UserError(
            f"{path}: expected corpus_id {expected} from its content, found "
            f"{manifest.get('corpus_id')}: the manifest was edited or damaged; restore it or build "
            "the corpus again"
        )
    lacking = _lacking(manifest, FIELDS, "")
    if lacking:
        raise UserError(*(f"{path}: {line}; build the corpus again" for line in lacking))
    return manifest


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _lacking(found: Mapping, fields: Mapping, place: str) -> list[str]:
    """Fields that are absent or of another type, in a manifest and in each shard's entry."""
    problems = []
    for name, kinds in fields.items():
        if name not in found:
            problems.append(f"the field {place}{name} is missing")
        elif not isinstance(found[name], kinds) or isinstance(found[name], bool):
            problems.append(f"the field {place}{name} is {found[name]!r}")
    if fields is not FIELDS or problems:
        return problems
    if "train" not in found["splits"]:
        problems.append("the field splits.train is missing")
    for split, entries in found["splits"].items():
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            where = f"splits.{split}[{number}]"
            if isinstance(entry, dict):
                problems += _lacking(entry, SHARD_FIELDS, f"{where}.")
            else:
                problems.append(f"the field {where} is {entry!r}")
    if found["tokenizer"]:
        problems += _lacking(found["tokenizer"], TOKENIZER_FIELDS, "tokenizer.")
    return problems


def write_manifest(folder: Path, fields: Mapping) -> dict:
    """Complete and publish the manifest, the last file of a corpus; returns it.

    Shards are put in numeric order of their names.
    """
    splits = {name: sorted(shards, key=_numeric) for name, shards in fields["splits"].items()}
    manifest = dict(fields, format=FORMAT, order_rule=ORDER_RULE, splits=splits)
    manifest["corpus_id"] = corpus_id(manifest)
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    file = PublishedFile(folder / MANIFEST)
    file.write((text + "\n").encode())
    file.publish()
    sync_folder(folder)
    return manifest


def corpus_id(manifest: Mapping) -> str:
    """SHA-256 of the canonical JSON of a manifest without its volatile fields."""
    stable = {key: value for key, value in manifest.items() if key not in VOLATILE}
    text = json.dumps(
        stable, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _numeric(entry: Mapping) -> list:
    """Sort key: train-2 before train-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", entry["name"])]


def _id_problems(folder: Path, manifest: Mapping, vocab_size: int | None) -> list[str]:
    own, problems = manifest["vocab_size"], []
    largest = max(
        (e["max_id"] or 0 for shards in manifest["splits"].values() for e in shards), default=0
    )
    if largest >= own:
        problems.append(
            f"{folder / MANIFEST}: expected ids below its vocab_size {own}, found {largest}"
        )
    if vocab_size is not None and largest >= vocab_size:
        problems.append(
            f"model.vocab_size={vocab_size} is too small for {folder}: its largest token id is "
            f"{largest}; set model.vocab_size to {own} or more, or use a corpus made with a "
            "smaller tokenizer"
        )
    return problems


def _refuse_twice(folder: Path, entry: Mapping, seen: dict) -> None:
    """Raises UserError for one shard under two names (spelling, link or copy): it would be trained
    on twice in silence.
    """
    name = entry["name"]
    if not name or Path(name).name != name or name.startswith("."):
        raise UserError(f"{folder / MANIFEST}: expected plain file names of shards, found {name!r}")
    path = folder / f"{name}.bin"
    keys = [("name", name)]
    if entry["bin_xxh3"]:
        keys.append(("content", entry["bin_xxh3"], entry["idx_xxh3"]))
    if path.exists():
        keys.append(("file", *os.stat(path)[1:3]))  # inode and device
    for key in keys:
        if key in seen:
            raise UserError(
                f"{path}: is the same shard as {seen[key]} (equal {key[0]}); list it once, and "
                "give the source more weight where its text should be repeated"
            )
    seen.update(dict.fromkeys(keys, name))


def _checked_shard(folder: Path, entry: Mapping, manifest: Mapping) -> Shard:
    prefix = folder / entry["name"]
    sizes = {".bin": entry["bin_bytes"], ".idx": entry["idx_bytes"]}
    hashed = {".idx": entry["idx_xxh3"]}
    if entry["xxh_xxh3"]:
        sizes[".xxh"] = side_file_bytes(entry["bin_bytes"])
        hashed[".xxh"] = entry["xxh_xxh3"]
    for suffix, expected in sizes.items():
        path = prefix.with_suffix(suffix)
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            state = "no such file" if found is None else f"{found} bytes"
            if path.is_symlink():
                state += f" (it is a link to {os.readlink(path)})"
            raise UserError(
                f"{path}: expected {expected} bytes, found {state}; restore it from a copy or "
                "build the corpus again"
            )
    for suffix, expected in hashed.items():
        path = prefix.with_suffix(suffix)
        found = file_hash(path)
        if found != expected:
            raise UserError(
                f"{path}: expected xxh3 {expected}, found {found}: the file is damaged; "
                "restore it from a copy or build the corpus again"
            )
    shard = dataclasses.replace(check_shard(prefix), is_hashed=".xxh" in hashed)
    _compare(shard, entry, manifest)
    return shard


def _compare(shard: Shard, entry: Mapping, manifest: Mapping) -> None:
    found = dict(
        tokens=shard.num_tokens,
        sequences=shard.num_sequences,
        documents=shard.num_documents,
        dtype=shard.dtype.name,
    )
    expected = {key: entry[key] for key in ("tokens", "sequences", "documents")}
    expected["dtype"] = np.dtype(manifest["dtype"]).name
    if found != expected:
        raise UserError(
            f"{shard.idx_path}: expected {expected}, found {found}; build the corpus again"
        )
    if manifest["eod_policy"] == "append" and (entry["eod_count"] or 0) < shard.num_documents:
        raise UserError(
            f"{shard.bin_path}: expected an end id {manifest['eod_id']} for each of "
            f"{shard.num_documents} documents, found {entry['eod_count']}; build the corpus again"
        )
