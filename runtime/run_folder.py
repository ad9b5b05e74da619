"""The folder a run leaves behind: `runs/<run>/`, made once, by rank 0, just before training.

    recipe.yaml  layout.json  ds_config.json  environment.json      what it was
    metrics.jsonl  events.jsonl  ledger/  tensorboard/              what happened

The one rule: it is created exclusively. A folder that exists belongs to another run and is never
written into; a refused recipe leaves no folder at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.schema import UserError

# Packages whose version can change a result or a speed.
RECORDED_PACKAGES = (
    "deepspeed",
    "transformers",
    "tokenizers",
    "numpy",
    "hydra-core",
    "tensorboard",
)


def refuse_existing(folder: Path) -> None:
    """Raise UserError when the run's name is taken, or its place cannot be written."""
    if folder.exists():
        raise UserError(
            f"run={folder.name}: {folder} exists and is never overwritten; choose another name"
            f" (run={folder.name}-2), or remove the folder"
        )
    parent = next(path for path in folder.parents if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"run={folder.name}: no permission to make {folder} in {parent}")


def claim(folder: Path, documents: dict[str, str | dict[str, Any]]) -> Path:
    """Make `folder` for this process alone and write `documents` (name -> text, or JSON) into it.

    Raises UserError when it exists, also when another process made it in this very moment.
    """
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        refuse_existing(folder)
        raise
    for name, content in documents.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def environment(root: Path, device: Any) -> dict[str, Any]:
    """Commit, versions, hardware: what a later reader needs to run this again.

    `device` is the torch.device that rank 0 trains on.
    """
    import torch  # here, because the launcher uses the rest of this file and imports no torch

    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git(root, "status", "--porcelain")),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": device_name(device),
    }


def device_name(device: Any) -> str | None:
    """The GPU as torch names it, None for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
