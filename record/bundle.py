"""The bundle: one folder with everything a person needs when a run has stopped for good.

    runs/<run>/bundles/<name>/   what the caller knows: WHY.txt, verdict.json, hosts.json, ...
                                 the ends of metrics.jsonl, events.jsonl, ledger.jsonl and logs/
                                 history.jsonl, recipe.yaml and the other files of the run

It is written by an attempt that its health policy stops, and by the supervisor when it gives a run
up. Rule: every text in it goes through `base.redaction`, so that it can be sent to others. Imports
no torch. Units: bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from base.redaction import redact, secret_values

FOLDER = "bundles"
TAIL_BYTES = 1 << 18  # more lines than the statistics' usual window and a spike together
ENDS = {"metrics.jsonl": "metrics.jsonl", "events.jsonl": "events.jsonl",
        "ledger.jsonl": "ledger/steps.jsonl"}  # fmt: skip
WHOLE = ("history.jsonl", "recipe.yaml", "layout.json", "ds_config.json", "plan.json",
         "environment.json")  # fmt: skip


def write_bundle(folder: Path, name: str, known: Mapping[str, str]) -> Path:
    """Write a bundle into the run's `folder`; returns its path. Raises OSError.

    `known` are texts by file name that the caller adds. The bundle appears whole, under a name that
    no earlier one has: `name`, or `name-2`, ...
    """
    texts = dict(known)
    for target, source in ENDS.items():
        texts[target] = tail(folder / source)
    for target in WHOLE:
        texts[target] = tail(folder / target, None)
    for path in sorted((folder / "logs").glob("rank-*.log")):
        texts[f"logs/{path.name}"] = tail(path)
    secrets = secret_values(os.environ)
    bundles = folder / FOLDER
    bundles.mkdir(exist_ok=True)
    new = bundles / f".{name}.new"
    shutil.rmtree(new, ignore_errors=True)  # what a writer that was killed has left
    for target, text in texts.items():
        if text is not None:
            (new / target).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (new / target).write_text(redact(text, secrets), encoding="utf-8")
    taken = sum(path.name.startswith(name) for path in bundles.iterdir())
    final = bundles / (f"{name}-{taken + 1}" if taken else name)
    os.rename(new, final)
    return final


def tail(path: Path, most: int | None = TAIL_BYTES) -> str | None:
    """The end of a file, from the beginning of a line; None where the file cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most) if most else 0
            file.seek(start)
            content = file.read()
    except OSError:
        return None
    if start:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")
