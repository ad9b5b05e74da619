"""Checkpoints whose manifests were changed, for tests of what is found before a load."""

from __future__ import annotations

import json

from checkpoint.format import manifest as manifests

WORLD = 2


def folder(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def rewritten(run, change):
    """Change the manifest of the newest checkpoint and correct its checksum."""
    path = folder(run, 1000) / "MANIFEST.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    blank = (json.dumps({"checksum": "0" * 32} | body, separators=(",", ":")) + "\n").encode()
    digest = manifests.digest(blank).hex().encode()
    path.write_bytes(blank.replace(b"0" * 32, digest, 1))
