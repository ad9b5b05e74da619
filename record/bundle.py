"""What a person needs when a run has stopped for good, in one folder that can be sent around.

    runs/<run>/bundles/<name>/   what the writer knows: WHY.txt, verdict.json, hosts.json, ...
                                 metrics.jsonl, events.jsonl, ledger.jsonl, logs/ (their ends)
                                 history.jsonl and the run's own description

The one rule: of the run nothing is new in it, and nothing in it is secret: all goes through
`base.redaction`. It serves an attempt that stops by its health policy and the supervisor that gives
a run up alike. Imports no torch. Units: bytes.
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
WHOLE = ("history.jsonl", "recipe.yaml", "layout.json", "ds_config.json", "environment.json")


def write_bundle(folder: Path, name: str, known: Mapping[str, str]) -> Path:
    """Put a bundle into the run's `folder`; its place. Raises OSError.

    `known` are texts by file name that the caller adds. It appears whole, under a name that no
    earlier one has: `name`, or `name-2`, ...
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
    shutil.rmtree(new, ignore_errors=True)  # of a writer that was killed
    for target, text in texts.items():
        if text is not None:
            (new / target).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (new / target).write_text(redact(text, secrets), encoding="utf-8")
    taken = sum(path.name.startswith(name) for path in bundles.iterdir())
    final = bundles / (f"{name}-{taken + 1}" if taken else name)
    os.rename(new, final)
    return final


def tail(path: Path, most: int | None = TAIL_BYTES) -> str | None:
    """The end of a file, from the beginning of a line; None where there is none."""
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
