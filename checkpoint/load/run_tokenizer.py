"""Finds the tokenizer that a run was trained with; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from base.errors import UserError
from data.corpus.tokenizer import load_tokenizer


def find_tokenizer(state: dict[str, Any], named: Path | None = None) -> Path | None:
    """Return the tokenizer folder that is `named`, or the one that the recipe's data gives: its own
    tokenizer, or that of its first corpus.

    Raises UserError where tokenizers exist but none is the one that the run was trained with.
    """
    data = state["recipe"].get("data", {})
    folders = [Path(one["corpus"]) / "tokenizer" for one in data.get("sources", {}).values()]
    if data.get("tokenizer"):
        folders = [Path(data["tokenizer"])]
    folders = [named] if named else folders
    there = [folder for folder in folders if folder.is_dir()]
    known = state.get("data", {}).get("tokenizer")
    if not there or known is None:
        return there[0] if there else named
    for folder in there:
        if load_tokenizer(folder, needs_end=False).is_recorded_as(known):
            return folder
    raise UserError(
        f"{there[0]}: is not the tokenizer that the run was trained with (fingerprint {known}):"
        " name that one: make export TOKENIZER=..., or put it back where the corpus was built anew"
    )
