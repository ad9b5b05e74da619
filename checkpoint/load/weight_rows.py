"""Weights that are read by rows: the interface, and weights of a run's checkpoint.

    weights_from(...) -> Weights    outside_weights.py, a run or a Hugging Face folder
    weights.shapes                  {canonical name: full shape}
    weights.read_rows(...)          some rows of one weight, fp32

Rule: only the rows that are asked for are read, so that a rank of any layout fills just the rows it
owns and no host holds a whole model. Units: rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from base.errors import UserError
from base.values import first_of
from checkpoint.format.blocks import Damaged
from checkpoint.format.index import WEIGHT, Fragment
from checkpoint.format.rectangles import Box
from checkpoint.load.choosing import Found, find_checkpoint
from checkpoint.load.restoring import open_checkpoint
from checkpoint.load.run_tokenizer import find_tokenizer
from model.config import DecoderConfig
from model.decoder import Decoder
from recipes.schema import Model

# Fields of recipes.schema.Model. initializer_range is left out: existing weights do not depend on
# it.
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rope_theta", "rope_type", "rope_factor",
    "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "qkv_bias", "qk_norm",
    "hidden_act",
)  # fmt: skip
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Model)}
MOST_NAMES = 20  # weights that do not fit are listed up to this number


class Weights(Protocol):
    """Weights that can be read in part."""

    label: str  # names the weights in records
    folder: Path  # folder that is read
    model: dict[str, Any]  # fields of recipes.schema.Model
    tokenizer: Path | None  # folder of the tokenizer of their training, where known
    shapes: dict[str, tuple[int, ...]]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the first dim of a weight, fp32 on the CPU."""


def check_fit(weights: Weights, model: Any) -> None:
    """Raise UserError for every field of the recipe's `model` that the weights contradict."""
    wanted = normal(vars(model))
    problems = [
        f"model.{name}={wanted[name]}, but init_from={weights.label} has {weights.model[name]}; set"
        f" model.{name}={weights.model[name]}"
        for name in FIELDS
        if wanted[name] != weights.model[name]
    ]
    if problems:
        raise UserError(*problems)


def check_names(weights: Weights, config: DecoderConfig) -> None:
    """Raise UserError unless the checkpoint has exactly the decoder's weights, in its shapes."""
    with torch.device("meta"):
        model = Decoder(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if weights.shapes != expected:
        names = sorted(
            name
            for name in expected.keys() | weights.shapes.keys()
            if expected.get(name) != weights.shapes.get(name)
        )
        problems = [
            f"{name}: {weights.shapes.get(name, 'nothing')} in {weights.label},"
            f" {expected.get(name, 'nothing')} in the decoder"
            for name in names
        ]
        raise UserError(*first_of(problems, MOST_NAMES, "weights that do not fit"))


def normal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return FIELDS of a model, with head_dim computed where it is None. A field that checkpoints
    of older versions lack has its default.
    """
    values = {name: fields.get(name, DEFAULTS.get(name)) for name in FIELDS}
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return values


class RunWeights:
    """Weights of a checkpoint of this project, without its optimizer states."""

    def __init__(self, run: Path, step: int | None = None, found: Found | None = None):
        found = found or find_checkpoint(run, step)
        try:
            self.reader = open_checkpoint(found)
            self.model = normal(found.manifest.state["recipe"]["model"])
        except (Damaged, KeyError, TypeError) as error:
            raise UserError(f"{run}@{found.step}: {error}") from None
        self.label = f"{run}@{found.step}"
        self.folder, self.state = found.folder, found.manifest.state
        index = self.reader.index
        self.shapes = {
            name: index.shapes[number]
            for name, number in index.tensors.items()
            if WEIGHT in index.kinds(name)
        }

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the run's tokenizer. Raises UserError where another one has taken its place."""
        return find_tokenizer(self.state)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Weights. Raises UserError when the checkpoint turns out to be damaged."""
        shape = self.shapes[name]
        width = math.prod(shape[1:])
        rows = torch.empty((stop - start) * width)
        try:
            self.reader.fill([Fragment(name, WEIGHT, Box(shape, shape), start * width, rows)])
        except Damaged as damage:
            if not self.folder.is_dir():
                raise UserError(
                    f"{self.folder} was removed while it was read: its run is training and keeps"
                    " only the newest; try again, or keep more (checkpoint.keep)"
                ) from None
            raise UserError(*damage.problems) from None
        return rows.view(stop - start, *shape[1:])
