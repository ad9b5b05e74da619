"""The tokenizer of an exported folder, made to agree with what training showed the model.

    corpus: begin id, end id --checkpoint's data state--> tokenizer_config.json, config.json

Rule: the exported tokenizer adds the begin token of the training documents, or nothing. A template
that adds another token, or an end token behind the text, is taken out, because a model never saw
text so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from base.errors import UserError
from data.corpus.tokenizer import CONFIG_FILE, PROBE, TOKENIZER_FILE

FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json")


def copy_tokenizer(source: Path, folder: Path, data: Mapping[str, Any]) -> None:
    """Copy a tokenizer's files into `folder`, and make them agree with the training.

    data: the data state of the checkpoint; its begin and end ids become those of the tokenizer.
    Raises UserError where the tokenizer cannot be made to agree.
    """
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if data.get("end_id") is not None:  # absent in checkpoints of older versions
        _agree(folder, data.get("begin_id"), data["end_id"])


def _agree(folder: Path, begin_id: int | None, end_id: int) -> None:
    from tokenizers import Tokenizer

    # The tokens that begin and end a document.
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    changes: dict[str, Any] = {"eos_token": _token(tokenizer, end_id, folder)}
    if begin_id is not None:
        changes["bos_token"] = _token(tokenizer, begin_id, folder)
    # A template that adds anything else.
    before, after = added_ids(
        tokenizer.encode(PROBE, add_special_tokens=True).ids,
        tokenizer.encode(PROBE, add_special_tokens=False).ids,
    )
    if after or (before and before != [begin_id]):
        definition = json.loads((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        definition["post_processor"] = None
        text = json.dumps(definition, ensure_ascii=False)
        (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
        changes |= {"add_bos_token": False, "add_eos_token": False}
    text = json.dumps(config | changes, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    if (folder / FILES[2]).is_file():  # it would win over the configuration
        (folder / FILES[2]).unlink()
    _check(folder, begin_id)


def added_ids(whole: list[int], plain: list[int]) -> tuple[list[int], list[int]]:
    """The ids that a template puts before and behind the ids of a text."""
    extra = len(whole) - len(plain)
    for before in range(extra + 1):
        if whole[before : before + len(plain)] == plain:
            return whole[:before], whole[before + len(plain) :]
    return whole, []


def _check(folder: Path, begin_id: int | None) -> None:
    """Raises UserError where transformers' own class adds what training never showed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = tokenizer(PROBE).input_ids
    before, after = added_ids(whole, tokenizer(PROBE, add_special_tokens=False).input_ids)
    if after or (before and before != [begin_id]):
        raise UserError(
            f"the tokenizer ({type(tokenizer).__name__}) adds the ids {before or after} to a text,"
            f" but the documents of the training began with {begin_id}; name a tokenizer folder"
            " without that: TOKENIZER="
        )


def _token(tokenizer: Any, token_id: int, folder: Path) -> str:
    found = tokenizer.id_to_token(token_id)
    if found is None:
        raise UserError(
            f"{folder}: has no token {token_id}, which the training used; it is not its tokenizer"
        )
    return found
