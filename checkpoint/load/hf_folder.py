"""Reads a Hugging Face folder of safetensors as weights for the decoder.

    config.json --the family's own Transformers class--> configuration --> fields of our model
                '--> the keys as written: contradictions between them are refused

Rule: Transformers' class decides what config.json means, with its defaults and its precedence. A
key that this decoder cannot follow is refused by name, and `hf_check.check_logits` compares logits
before a run starts from the folder. Nothing is unpickled: a folder with only .bin files is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.configuration_utils import PretrainedConfig

from base.errors import UserError
from checkpoint.load.weight_rows import normal
from model.config import ROPE_FIELDS
from model.families import ACTIVATIONS, SYNONYMS

# Hugging Face families that the decoder can represent, with the fields that tell them apart.
FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
# Dtypes that convert to fp32 directly; integers and fp8 are quantized and need their scales.
DTYPES = ("F64", "F32", "F16", "BF16")
COMPUTED = "rotary_emb.inv_freq"  # end of a name in old folders; computed from rope_theta here
SAMPLED_ROWS = 64  # rows that are compared of a weight that is stored twice
FILE_PATTERN = re.compile(r"[A-Za-z0-9_.-]+\.safetensors", re.ASCII)
# Where configurations keep the rotary base and scaling. Transformers 5 prefers the first.
ROPE_KEYS = ("rope_scaling", "rope_parameters")


class FolderWeights:
    """Weights of a Hugging Face folder. `config` is what Transformers reads in config.json."""

    def __init__(self, folder: Path):
        self.label, self.folder = str(folder), folder
        self.tokenizer = folder if (folder / "tokenizer.json").is_file() else None
        raw = _json(folder / "config.json")
        problems = _unfit(raw)
        if not problems:
            self.config = read_config(raw, folder)
            problems = [*contradictions(raw, self.config), *_unfit_values(self.config)]
        if problems:
            raise UserError(*(f"init_from={folder}: {problem}" for problem in problems))
        self.model = _fields(self.config)
        self.window = window_of(self.config)
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


def read_config(raw: dict[str, Any], folder: Path) -> PretrainedConfig:
    """Read the values of config.json with the family's own Transformers class.

    Raises UserError where that class refuses them.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = CONFIG_MAPPING[raw["model_type"]]
    try:
        return family.from_dict(dict(raw))
    except Exception as error:  # its validation raises errors of many kinds
        text = " ".join(str(error).split())
        raise UserError(
            f"init_from={folder}: config.json: Transformers' {family.__name__} refuses it:"
            f" {type(error).__name__}: {text}"
        ) from None


def _unfit(raw: dict[str, Any]) -> list[str]:
    """Return why the values as written are not those of the decoder."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return [f"model_type {family!r}; this decoder reads {', '.join(FAMILIES)}"]
    problems = []
    for key in ROPE_KEYS:
        if raw.get(key) is not None and not isinstance(raw[key], dict):
            problems.append(f"config.json: {key}={raw[key]!r} is not a JSON object")
    if problems:
        return problems
    found = {
        f"rotary scaling in {key}": _kind(raw[key])
        for key in ROPE_KEYS
        if raw.get(key) and _kind(raw[key]) not in ROPE_FIELDS
    }
    found |= {
        f"partial_rotary_factor in {key}": values["partial_rotary_factor"]
        for key, values in {"config.json": raw, **_rope_parts(raw)}.items()
        if values.get("partial_rotary_factor") not in (None, 1, 1.0)
    }
    found |= {"quantization_config": raw.get("quantization_config")}
    return [
        f"has {what} ({value}), which this decoder does not have"
        for what, value in found.items()
        if value
    ]


def _unfit_values(config: PretrainedConfig) -> list[str]:
    """Return why the configuration, as Transformers reads it, is not that of the decoder."""
    theta = config.rope_parameters.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        return [
            f"config.json: rope_theta={theta!r}, as Transformers reads it, is not a number above 0"
        ]
    kinds = set(_own(config, "layer_types") or ())
    found = {
        "hidden_act": None if _act(config) in ACTIVATIONS else config.hidden_act,
        "attention_bias": _own(config, "attention_bias"),
        "mlp_bias": _own(config, "mlp_bias"),
        "layer_types": sorted(kinds - {"full_attention", "sliding_attention"}),
        "rope_parameters": None
        if _kind(config.rope_parameters) in ROPE_FIELDS
        else config.rope_parameters,
    }
    return [
        f"has {what} ({value}), which this decoder does not have"
        for what, value in found.items()
        if value
    ]


def _act(config: PretrainedConfig) -> str:
    """Return the activation of the MLP under the decoder's name."""
    return SYNONYMS.get(config.hidden_act, config.hidden_act)


def _kind(rope: dict[str, Any]) -> str:
    """Return the kind of rotary scaling; older files call it `type`."""
    return rope.get("rope_type", rope.get("type", "default")) or "default"


def _rope_parts(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the objects of config.json with rotary settings, by their key."""
    return {key: raw[key] for key in ROPE_KEYS if raw.get(key)}


def contradictions(raw: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Return a line for each setting that config.json gives twice with different values.

    Transformers takes one of them without a word, other programs take the other one, so nobody
    knows what the weights were trained with.
    """
    given: dict[str, dict[str, Any]] = {}
    for key, values in _rope_parts(raw).items():
        given.setdefault("rope_type", {})[f"{key}.rope_type"] = _kind(values)
        if "type" in values and "rope_type" in values:
            given["rope_type"][f"{key}.type"] = values["type"]
        for name, value in values.items():
            if name not in ("rope_type", "type"):
                given.setdefault(name, {})[f"{key}.{name}"] = value
    if raw.get("rope_theta") is not None:
        given.setdefault("rope_theta", {})["rope_theta"] = raw["rope_theta"]
    problems = []
    for name, places in given.items():
        if len({repr(value) if isinstance(value, str) else float_or_text(value)
                for value in places.values()}) > 1:  # fmt: skip
            shown = ", ".join(f"{place}={value!r}" for place, value in places.items())
            used = config.rope_parameters.get(name)
            problems.append(
                f"config.json contradicts itself about rotary positions ({name}): {shown};"
                f" Transformers uses {used!r}. Remove the values that the model was not trained"
                " with"
            )
    architecture = (raw.get("architectures") or [None])[0]
    if problem := _other_architecture(config, architecture):
        problems.append(problem)
    return problems


def float_or_text(value: Any) -> Any:
    """Return a value so that 10000 and 10000.0 are equal, and lists can be compared."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else repr(value)


def _other_architecture(config: PretrainedConfig, architecture: Any) -> str | None:
    """Return a problem where `architectures` names the model class of another family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    own = NAMES[config.model_type]
    if architecture == own or architecture not in NAMES.values():
        return None
    return (
        f"config.json contradicts itself: model_type={config.model_type!r} is {own}, architectures"
        f" names {architecture}; correct the wrong one"
    )


def window_of(config: PretrainedConfig) -> int | None:
    """Return the sliding window that Transformers applies in some layer, in tokens; None: none."""
    kinds = _own(config, "layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return _own(config, "sliding_window")


def _own(config: PretrainedConfig, name: str) -> Any:
    """Return a value that the family's class knows; None for a key that its model never reads."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the configuration in the names of recipes.schema.Model."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    values = {name: getattr(config, name) for name in names}
    values["num_key_value_heads"] = config.num_key_value_heads or config.num_attention_heads
    values["head_dim"] = getattr(config, "head_dim", None)
    rope = config.rope_parameters
    values |= {"rope_theta": rope["rope_theta"], "rope_type": _kind(rope)}
    values |= {f"rope_{name}": rope[name] for name in ROPE_FIELDS[_kind(rope)] if name in rope}
    if "original_max_position_embeddings" in ROPE_FIELDS[_kind(rope)]:
        given = rope.get("original_max_position_embeddings")
        values["rope_original_max_position_embeddings"] = given or config.max_position_embeddings
    values["hidden_act"] = _act(config)
    return normal(values | FAMILIES[config.model_type])
