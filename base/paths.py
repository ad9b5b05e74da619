"""Folders of this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the checkout
CACHE = ROOT / ".cache"  # what can be computed again; ignored by git
