"""runs/<run>/bundles/: what a person needs when a run has stopped for good, in one folder.

    verdict.json   metrics.jsonl, events.jsonl, ledger.jsonl (their ends)   history.jsonl
    recipe.yaml    layout.json    ds_config.json    environment.json

The one rule: nothing in it is new and nothing in it is secret: it is cut from the run's folder and
goes through `recipes.redaction`, so it may be mailed. Units: lines.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recipes.redaction import redact, redacted, secret_values
from runtime.records import strict_line

LAST_LINES = 400  # more than the window of the statistics and a spike together
ENDS = {"metrics.jsonl": "metrics.jsonl", "events.jsonl": "events.jsonl",
        "ledger.jsonl": "ledger/steps.jsonl"}  # fmt: skip
WHOLE = ("history.jsonl", "recipe.yaml", "layout.json", "ds_config.json", "environment.json")


def write_bundle(folder: Path, step: int, verdict: dict[str, Any]) -> Path:
    """Put the bundle of a verdict after `step` into the run's `folder`; its place. Raises OSError.

    It appears whole, under a name that no earlier one has.
    """
    known = secret_values(os.environ)
    bundles = folder / "bundles"
    bundles.mkdir(exist_ok=True)
    name = f"step-{step:08d}"
    taken = sum(path.name.startswith(name) for path in bundles.iterdir())
    final = bundles / (f"{name}-{taken + 1}" if taken else name)
    new = bundles / f".{final.name}.new"
    new.mkdir(mode=0o700, exist_ok=True)
    (new / "verdict.json").write_text(strict_line(redacted(verdict, known)), encoding="utf-8")
    for target, source in ENDS.items():
        lines = text_of(folder / source).splitlines(keepends=True)[-LAST_LINES:]
        (new / target).write_text(redact("".join(lines), known), encoding="utf-8")
    for target in WHOLE:
        (new / target).write_text(redact(text_of(folder / target), known), encoding="utf-8")
    os.rename(new, final)
    return final


def text_of(path: Path) -> str:
    """A file's text; of one that is not there, none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
