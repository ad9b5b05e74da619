"""The report of a corpus for a person: printed at the end of a build and by `make corpus-info`.

Rule: everything is read from the corpus and nothing is measured again, so the report is the same
for every build of the same corpus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from base.values import counted
from data.text.filters import REASONS

MOST_FILES = 20
DROPPED = ("blank_documents", *REASONS, "duplicates")
CHANGED = {
    "bad_bytes": "documents with bytes that are not UTF-8, replaced by U+FFFD",
    "lone_surrogates": "lone surrogates replaced by U+FFFD",
    "newlines": "CRLF made LF",
    "byte_order_mark": "byte order marks removed",
    "special_token_strings": "strings of special tokens, kept as ordinary text",
    "unknown_tokens": "tokens that the tokenizer does not know (text is lost there)",
    "long_documents": "documents tokenized in pieces",
}


def report_lines(folder: Path, manifest: Mapping) -> list[str]:
    """The report of a corpus as lines."""
    lines = [f"{folder}  {manifest['name']}  id {manifest['corpus_id'][:16]}"]
    for split, shards in manifest["splits"].items():
        tokens, documents = (sum(s[key] for s in shards) for key in ("tokens", "documents"))
        size = sum(s["bin_bytes"] for s in shards)
        lines.append(
            f"  {split:<6}{tokens:>16,} tokens {documents:>13,} documents {len(shards):>5} shards"
            f" {size:>16,} bytes"
        )
    lines.append(
        f"  {manifest['dtype']}, vocabulary {manifest['vocab_size']:,}, end id"
        f" {manifest['eod_id']} ({manifest['eod_policy']})"
    )
    if "begin_policy" in manifest:
        lines.append(f"  begin id {manifest['begin_id']}: {manifest['begin_policy']}")
    if manifest.get("tokenizer"):
        lines.append(f"  tokenizer {manifest['tokenizer']['fingerprint'][:16]}")
    if manifest.get("not_read"):
        lines.append(f"  {manifest['not_read']}")
    counts = manifest.get("counts", {})
    if "rows" in counts:
        lines += _balance(counts)
    lines += [f"  {counts[key]:,} {text}" for key, text in CHANGED.items() if counts.get(key)]
    longest = manifest.get("longest_document")
    if longest:
        lines.append(
            f"  longest document {longest['tokens']:,} tokens, {longest['chars']:,} characters:"
            f" {longest['file']} row {longest['row']}"
        )
    held_out = manifest.get("held_out") or {}
    if held_out.get("file_entries_not_in_the_input"):
        lines.append(
            f"  {held_out['file_entries_not_in_the_input']:,} entries of the held-out file are not"
            " in the input"
        )
    inputs = manifest.get("input_files")
    if inputs and (folder / inputs["file"]).is_file():
        lines += _files(folder / inputs["file"], inputs["files"])
    return lines


def _balance(counts: Mapping) -> list[str]:
    """Lines whose counts add up: rows = documents + dropped + put aside + blank lines."""
    kept = counts.get("documents_train", 0) + counts.get("documents_valid", 0)
    dropped = {reason: counts[reason] for reason in DROPPED if counts.get(reason)}
    aside = {key.removeprefix("aside_"): n for key, n in counts.items() if key.startswith("aside_")}
    lines = [f"  {counted(counts['rows'], 'row')}: {counted(kept, 'document')} kept"]
    for title, some in (("dropped", dropped), ("put aside", aside)):
        text = ", ".join(f"{key} {n:,}" for key, n in some.items())
        lines.append(f"    {sum(some.values()):,} {title}" + (f" ({text})" if text else ""))
    if counts.get("blank_lines"):
        lines.append(f"    {counted(counts['blank_lines'], 'blank line')}")
    return lines


def _files(path: Path, total: int) -> list[str]:
    lines = [
        f"  {counted(total, 'input file')}"
        + (f", the first {MOST_FILES}:" if total > MOST_FILES else "")
    ]
    with open(path, encoding="utf-8") as inputs:
        for _, line in zip(range(MOST_FILES), inputs, strict=False):
            one = json.loads(line)
            if "counts" not in one:
                how = "linked" if one["linked"] else "written anew"
                lines.append(f"    {one['name']}: {one['kind']} {one['dtype']}, {how}")
                continue
            counts = one["counts"]
            kept = counts.get("documents_train", 0) + counts.get("documents_valid", 0)
            tokens = counts.get("tokens_train", 0) + counts.get("tokens_valid", 0)
            rows = counts.get("rows", 0)
            found = (counted(rows, "row"), counted(kept, "document"), counted(tokens, "token"))
            lines.append(f"    {one['name']}: {', '.join(found)}")
    return lines
