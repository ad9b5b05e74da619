"""Reads weights by rows, from a Hugging Face folder or from a checkpoint of another run.

    weights_from("path/to/folder" | "runs/tiny@100" | "runs/tiny") -> Weights
    weights.shapes            {canonical name: full shape}
    weights.read_rows(...)    some rows of one weight, fp32

Rule: only the rows that are asked for are read, so that a rank of any layout fills just the rows it
owns and no host holds a whole model. Nothing is unpickled: a folder with only .bin files is
refused. Units: rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from base.errors import UserError
from checkpoint.comm import Alone
from checkpoint.format.blocks import Damaged
from checkpoint.format.index import WEIGHT, Fragment
from checkpoint.format.rectangles import Box
from checkpoint.load.choosing import at_step, newest
from checkpoint.load.restoring import open_checkpoint
from data.corpus.tokenizer import load_tokenizer
from model.config import DecoderConfig
from model.decoder import Decoder

# Hugging Face families that the decoder can represent, with the fields that tell them apart.
FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
# Fields of recipes.schema.Model. initializer_range is left out: existing weights do not depend on
# it.
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings",
    "qkv_bias", "qk_norm",
)  # fmt: skip
# Dtypes that convert to fp32 directly; integers and fp8 are quantized and need their scales.
DTYPES = ("F64", "F32", "F16", "BF16")
COMPUTED = "rotary_emb.inv_freq"  # end of a name in old folders; computed from rope_theta here
SAMPLED_ROWS = 64  # rows that are compared of a weight that is stored twice
MOST_NAMES = 20  # weights that do not fit are listed up to this number
FILE_PATTERN = re.compile(r"[A-Za-z0-9_.-]+\.safetensors", re.ASCII)


class Weights(Protocol):
    """Weights that can be read in part."""

    label: str  # names the weights in records
    folder: Path  # folder that is read
    model: dict[str, Any]  # fields of recipes.schema.Model
    tokenizer: Path | None  # folder of the tokenizer of their training, where known
    shapes: dict[str, tuple[int, ...]]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the first dim of a weight, fp32 on the CPU."""


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
        more = len(names) - MOST_NAMES
        raise UserError(
            *(
                f"{name}: {weights.shapes.get(name, 'nothing')} in {weights.label},"
                f" {expected.get(name, 'nothing')} in the decoder"
                for name in names[:MOST_NAMES]
            ),
            *([f"... and {more} more weights that do not fit"] if more > 0 else []),
        )


def normal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return FIELDS of a model, with head_dim computed where it is None."""
    values = {name: fields.get(name) for name in FIELDS}
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return values


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
        if load_tokenizer(folder).fingerprint().startswith(known):
            return folder
    raise UserError(
        f"{there[0]}: is not the tokenizer that the run was trained with (fingerprint {known}):"
        " name that one: make export TOKENIZER=..., or put it back where the corpus was built anew"
    )


class RunWeights:
    """Weights of a checkpoint of this project, without its optimizer states."""

    def __init__(self, run: Path, step: int | None):
        alone = Alone()
        found = newest(run, alone).found if step is None else at_step(run, step, alone)
        if found is None:
            raise UserError(f"init_from={run}: this run has no checkpoint yet")
        try:
            self.reader = open_checkpoint(found)
            self.model = normal(found.manifest.state["recipe"]["model"])
        except (Damaged, KeyError, TypeError) as error:
            raise UserError(f"init_from={run}@{found.step}: {error}") from None
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


class FolderWeights:
    """A Hugging Face folder of safetensors."""

    def __init__(self, folder: Path):
        self.label, self.folder = str(folder), folder
        self.tokenizer = folder if (folder / "tokenizer.json").is_file() else None
        config = {k: v for k, v in _json(folder / "config.json").items() if v is not None}
        try:
            problems = _unfit(config)
            self.model = {} if problems else _fields(config)
        except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            problems = [f"config.json: {type(error).__name__} {error}"]
        if problems:
            raise UserError(*(f"init_from={folder}: {problem}" for problem in problems))
        self.files = self._find(folder)
        self.opened: dict[Path, Any] = {}
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in self.files}
        kinds = {name: self._slice(name).get_dtype() for name in self.files}
        if problems := [
            f"init_from={folder}: {name} is stored as {kind}; what is read: {', '.join(DTYPES)}"
            for name, kind in kinds.items()
            if kind not in DTYPES
        ]:
            raise UserError(*problems)
        if self.model["tie_word_embeddings"] and "lm_head.weight" in self.shapes:
            self._check_copy("lm_head.weight", "model.embed_tokens.weight")
            del self.shapes["lm_head.weight"]

    def _find(self, folder: Path) -> dict[str, Path]:
        """Return {name of a weight: file}."""
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            names = _json(index).get("weight_map")
            if not isinstance(names, dict):
                raise UserError(f"init_from={folder}: {index.name} has no weight_map")
            bad = [file for file in names.values() if not FILE_PATTERN.fullmatch(str(file))]
            if bad:
                raise UserError(f"init_from={folder}: {index.name} names the file {bad[0]!r}")
            files = {name: folder / file for name, file in names.items()}
        elif single.is_file():
            files = dict.fromkeys(_opened(single).keys(), single)
        else:
            raise UserError(
                f"init_from={folder}: no model.safetensors; pickled weights (.bin, .pt) are never"
                " opened, convert them with save_pretrained"
            )
        return {name: path for name, path in files.items() if not name.endswith(COMPUTED)}

    def _check_copy(self, name: str, of: str) -> None:
        """Raise UserError where rows of two weights that config.json declares as one differ."""
        rows = self.shapes[name][0]
        step = max(1, rows // SAMPLED_ROWS)
        if self.shapes[name] != self.shapes.get(of) or any(
            not torch.equal(self.read_rows(name, row, row + 1), self.read_rows(of, row, row + 1))
            for row in range(0, rows, step)
        ):
            raise UserError(
                f"init_from={self.label}: {name} differs from {of}, but its config.json says"
                " tie_word_embeddings=true; set it to false there, and"
                " model.tie_word_embeddings=false"
            )

    def _slice(self, name: str) -> Any:
        path = self.files[name]
        if path not in self.opened:
            self.opened[path] = _opened(path)
        try:
            return self.opened[path].get_slice(name)
        except SafetensorError as error:
            raise UserError(f"init_from: {path}: {error}") from None

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Weights. Rows are converted to fp32 from the dtype of the file."""
        return self._slice(name)[start:stop].float()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"init_from: {path}: {error}") from None


def _json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"init_from: {path}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"init_from: {path}: is not a JSON object")
    return values


def _unfit(config: dict) -> list[str]:
    """Why a Hugging Face configuration is not our decoder."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return [f"model_type {family!r}; this decoder reads {', '.join(FAMILIES)}"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    length = config.get("max_position_embeddings", 0)
    found = {
        "rotary scaling": kind if kind != "default" else None,
        "partial rotary": rope.get("partial_rotary_factor", 1) != 1,
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": family in ("llama", "qwen3") and config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "quantization": config.get("quantization_config"),
        "a sliding window shorter than its sequences": window
        if (window or length) < length
        else None,
    }
    return [
        f"has {what} ({value}), which this decoder has not"
        for what, value in found.items()
        if value
    ]


def _fields(config: dict) -> dict[str, Any]:
    """A Hugging Face configuration in the words of recipes.schema.Model."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    defaults = {
        "num_key_value_heads": heads,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return normal(defaults | config | FAMILIES[config["model_type"]])
