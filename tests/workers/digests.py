"""Helpers of several test files, at first of test_corpus_writer.py."""

from __future__ import annotations

import hashlib


def digest(folder):
    """Names and bytes of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [
        f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
    ]
    return "\n".join(parts)
