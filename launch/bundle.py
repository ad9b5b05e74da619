"""What a person needs to find out why a run was given up, in one folder that can be sent around.

    runs/<run>/bundles/<life>/   WHY.txt, the run's own description, events.jsonl, hosts.json,
                                 environment.txt, logs/rank-00000.log (their ends)

The one rule: no secrets. Variables go in by the allow-list of launch.environment; the values of
those that look like secrets are blanked wherever they stand, as in all that is written down.
Units: bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.environment import watched
from recipes.redaction import redact, secret_values

FOLDER = "bundles"
DESCRIPTION = ("recipe.yaml", "layout.json", "ds_config.json", "environment.json")
RECORDS = ("events.jsonl", "history.jsonl", "metrics.jsonl")
TAIL_BYTES = 200_000


def pack(
    run_folder: Path, name: str, why: str, hosts: Mapping[str, Any], environ: Mapping[str, str]
) -> Path | None:
    """Fill `runs/<run>/bundles/<name>/`; None where the run has no folder, or it cannot be written.

    `hosts` are facts by host.
    """
    if not run_folder.is_dir():
        return None
    folder = run_folder / FOLDER / name
    contents = {"WHY.txt": why + "\n"}
    for part in DESCRIPTION:
        contents[part] = tail(run_folder / part)
    for part in RECORDS:
        contents[part] = tail(run_folder / part)
    for path in sorted((run_folder / "logs").glob("rank-*.log")):
        contents[f"logs/{path.name}"] = tail(path)
    contents["hosts.json"] = json.dumps(hosts, indent=2, default=str) + "\n"
    variables = watched(environ)
    contents["environment.txt"] = "".join(f"{n}={v}\n" for n, v in variables.items())
    try:
        for part, text in contents.items():
            if text is not None:
                (folder / part).parent.mkdir(parents=True, exist_ok=True)
                (folder / part).write_text(redact(text, secret_values(environ)))
    except OSError:
        return None  # a full disk, perhaps the very reason
    return folder


def tail(path: Path) -> str | None:
    """The end of a file, from the beginning of a line; None where there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read()
    except OSError:
        return None
    if size > TAIL_BYTES:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")
