"""history.jsonl: the decisions of a run, append-only: its segments and what was changed.

    {"kind": "segment", "segment": 0, "parent": null, "first_step": 1, "data_step": 0}
    {"kind": "override", "segment": 0, "first_step": 101, "key": "optim.lr", "stored": 3e-4, ...}

The one rule: a line is never changed or removed; a later one speaks of later steps. What happened
by itself (lives, alarms, saves) stands in events.jsonl. Units: steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoint.resume import Change

FILE = "history.jsonl"


def begin(folder: Path, init_from: str | None) -> None:
    """The first segment of a new run; `init_from` says where its weights came from."""
    if (folder / FILE).exists():
        return
    line = {"kind": "segment", "segment": 0, "parent": None, "first_step": 1, "data_step": 0}
    _append(folder, line | ({"init_from": init_from} if init_from else {}))


def overrides(folder: Path, changes: Iterable[Change], after_step: int) -> None:
    """Deliberate changes that are in force from the step after `after_step`."""
    for change in changes:
        _append(
            folder,
            {
                "kind": "override",
                "segment": 0,
                "first_step": after_step + 1,
                "key": change.key,
                "stored": change.stored,
                "now": change.now,
            },
        )


def read(folder: Path) -> list[dict[str, Any]]:
    """All whole lines, in order; a torn one, left by a kill, is passed over."""
    path = folder / FILE
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


def _append(folder: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line, allow_nan=False) + "\n"
    with open(folder / FILE, "ab") as file:
        if file.tell() and not (folder / FILE).read_bytes().endswith(b"\n"):
            file.write(b"\n")  # ends a torn line, which readers pass over
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
