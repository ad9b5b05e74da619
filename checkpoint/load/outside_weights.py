"""The weights that `init_from` names for step 0: a Hugging Face folder, or another run's
checkpoint.

Rule: every rank starts from the same weights, and the run's record names them. A run that goes on
from a checkpoint of its own does not use this file: restoring.py loads its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import Shared, UserError
from checkpoint.comm import Comm
from checkpoint.load.weight_rows import Weights, check_fit, check_names, weights_from
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

    def draw(
        self, name: str, shape: tuple[int, ...], seed: int, config: Any, rows: slice
    ) -> torch.Tensor:
        """Return some rows of one weight, with the signature of an initializer."""
        return self.weights.read_rows(name, rows.start, rows.stop)


def read_origin(recipe: Recipe, root: Path, config: DecoderConfig, stream: Stream) -> Origin:
    """Open the weights that `init_from` names, relative to `root`. Raises UserError where they do
    not fit the recipe or the corpora of `stream`.
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
    if weights.tokenizer is not None:
        check_tokenizer(root / weights.tokenizer, stream)
    return Origin(weights, weights.label.removeprefix(f"{root}/"))


def check_tokenizer(folder: Path, stream: Stream) -> None:
    """Raise UserError where a corpus was not made with the tokenizer of the weights."""
    found = load_tokenizer(folder).fingerprint()
    for uid, corpus in zip(stream.uids, stream.corpora, strict=True):
        if corpus.tokenizer_fingerprint not in (None, found):
            raise UserError(
                f"init_from: the weights were trained with the tokenizer in {folder}"
                f" ({found[:16]}), data.sources.{uid} was made with another one"
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
