"""Digest of a folder, for tests that compare corpora byte for byte."""

from __future__ import annotations

import hashlib


def digest(folder):
    """Hash of the names and bytes of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [
        f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
    ]
    return "\n".join(parts)
