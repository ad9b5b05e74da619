"""The composed recipe as a file of one attempt, which its ranks read instead of composing.

Rule: the launcher composes once and keeps the text. Every attempt writes it anew on each host, so a
temporary folder that is tidied up in a long run does no harm. Only its owner may read it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def recipe_file(text: str) -> Iterator[str]:
    """The argument of pretrain.py that names a file with `text`; the file is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="pretrain-recipe-"))  # mode 0700
    try:
        path = folder / "composed.json"
        path.write_text(text, encoding="utf-8")
        yield f"composed={path}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
