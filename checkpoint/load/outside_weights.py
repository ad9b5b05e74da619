"""The weights that `init_from` names for step 0: a Hugging Face folder, or another run's
checkpoint.

Rule: every rank starts from the same weights, and the run's record names them. A run that goes on
from a checkpoint of its own does not use this file: restoring.py loads its weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import Shared, UserError
from checkpoint.comm import Comm
from checkpoint.load.hf_check import check_logits
from checkpoint.load.hf_folder import FolderWeights
from checkpoint.load.weight_rows import RunWeights, Weights, check_fit, check_names
from data.corpus.tokenizer import load_tokenizer
from recipes.schema import Recipe

if TYPE_CHECKING:
    import torch

    from data.stream.stream import Stream
    from model.config import DecoderConfig


@dataclass(frozen=True)
class Origin:
    """Weights to start from. `label` names them in the run's record."""

    weights: Weights
    label: str
    notes: tuple[str, ...] = ()  # for the start of the run

    def draw(
        self, name: str, shape: tuple[int, ...], seed: int, config: Any, rows: slice
    ) -> torch.Tensor:
        """Return some rows of one weight, with the signature of an initializer."""
        return self.weights.read_rows(name, rows.start, rows.stop)


def weights_from(path: str) -> Weights:
    """Open a Hugging Face folder, `<run folder>@<step>`, or the newest checkpoint of a run folder.

    Raises UserError with every reason why it cannot be used.
    """
    name, _, step = path.rpartition("@") if re.fullmatch(r".+@\d+", path) else (path, "", "")
    folder = Path(name)
    if (folder / "checkpoints").is_dir():
        return RunWeights(folder, int(step) if step else None)
    if (folder / "config.json").is_file():
        return FolderWeights(folder)
    raise UserError(
        f"init_from={path}: neither a run folder (checkpoints/) nor a Hugging Face folder"
        " (config.json); give runs/<run>@<step> or the path of a folder"
    )


def read_origin(
    recipe: Recipe, root: Path, config: DecoderConfig, stream: Stream, compare: bool = True
) -> Origin:
    """Open the weights that `init_from` names, relative to `root`.

    Logits are compared with those of Transformers' model unless `compare` is false (one rank is
    enough). Raises UserError where the weights do not fit the recipe or the corpora of `stream`.
    """
    weights = weights_from(str(root / recipe.init_from))
    own = (root / "runs" / recipe.run).resolve()
    if recipe.resume == "fresh" and weights.folder.resolve().is_relative_to(own):
        raise UserError(
            f"init_from={recipe.init_from} lies in the folder that resume=fresh sets aside; choose"
            f" another name (run={recipe.run}-2)"
        )
    check_fit(weights, recipe.model)
    check_names(weights, config)
    notes: tuple[str, ...] = ()
    if isinstance(weights, FolderWeights):
        check_window(weights, recipe.seq_len)
        if compare:
            notes = (check_logits(weights, recipe.seq_len),)
    if weights.tokenizer is not None:
        check_tokenizer(root / weights.tokenizer, stream)
    return Origin(weights, weights.label.removeprefix(f"{root}/"), notes)


def check_window(weights: FolderWeights, seq_len: int) -> None:
    """Raise UserError where sequences are longer than the sliding window of the folder's model."""
    if weights.window is not None and seq_len > weights.window:
        raise UserError(
            f"seq_len={seq_len}: init_from={weights.label} has a sliding window of"
            f" {weights.window} tokens (sliding_window in config.json), which this decoder does not"
            f" have; up to seq_len={weights.window} there is no difference"
        )


def check_tokenizer(folder: Path, stream: Stream) -> None:
    """Raise UserError where a corpus was not made with the tokenizer of the weights."""
    found = load_tokenizer(folder, needs_end=False)
    for uid, corpus in zip(stream.uids, stream.corpora, strict=True):
        if corpus.tokenizer_fingerprint is not None and not corpus.is_made_with(found):
            raise UserError(
                f"init_from: the weights were trained with the tokenizer in {folder}"
                f" ({found.fingerprint()[:16]}), data.sources.{uid} was made with another one"
                f" ({corpus.tokenizer_fingerprint[:16]}); tokenize the text with that tokenizer"
            )


def same_everywhere(label: str | None, data: Mapping[str, Any], recipe: Recipe, comm: Comm) -> None:
    """Raise UserError where the ranks chose different weights, or read different corpora; a
    collective. `data` is the state of the stream.
    """
    everyone = comm.exchange((label, data), "init_from and corpora")
    found, problems = sorted({str(one) for one, _ in everyone}), []
    if len(found) > 1:
        problems.append(
            f"init_from={recipe.init_from}: the ranks found {' and '.join(found)}, because that run"
            " is training; name the step"
        )
    corpora = [state["corpora"] for _, state in everyone]
    odd = next((rank for rank, ids in enumerate(corpora) if ids != corpora[0]), None)
    if odd is not None:
        problems.append(
            f"data.sources: rank {odd} reads the corpora {corpora[odd]}, rank 0 reads {corpora[0]}:"
            " their hosts hold different folders; copy the same ones to all hosts, or share them"
        )
    if problems:
        raise Shared(*problems)
