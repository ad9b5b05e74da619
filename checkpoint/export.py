"""Writes a checkpoint as a Hugging Face folder, or builds the same model in memory.

    checkpoint -> weight by weight, some rows at a time -> model-00001-of-00002.safetensors ...
    config.json, generation_config.json, tokenizer, README.md (model card)

The folder loads in AutoModelForCausalLM without any code of this project. Rule: the folder is made
under a temporary name, loaded by Transformers, its logits compared with those of the decoder, and
only then renamed. Where the run started from a Hugging Face folder, both configurations are also
compared as Transformers reads them, so that a misread import cannot confirm itself. This needs no
engine and no GPU; it needs memory for one piece of a weight, and twice the model for the
comparison. Units: bytes, rows.
"""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from base.errors import UserError
from base.paths import ROOT
from checkpoint.exported_tokenizer import copy_tokenizer
from checkpoint.load.hf_check import LENGTH, fill, largest_difference, pieces
from checkpoint.load.hf_folder import read_config
from checkpoint.load.weight_rows import RunWeights, check_names
from data.corpus.tokenizer import TOKENIZER_FILE
from model.config import DecoderConfig, hf_config
from model.decoder import Decoder

DTYPES = {"bf16": (torch.bfloat16, "bfloat16", "BF16"), "fp32": (torch.float32, "float32", "F32")}
SHARD_BYTES = 5 * 10**9  # the default of Transformers for years
# Fields of a configuration that change what a model computes.
MEANING = (
    "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "num_hidden_layers",
    "hidden_act",
)  # fmt: skip


def export(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "bf16",
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    check: bool = True,
) -> dict[str, Any]:
    """Write `out` from the checkpoint of `step` (default: the newest) of a run; return facts about
    it.

    Raises UserError when `out` exists, the checkpoint is missing or damaged, or the exported folder
    does not give the decoder's logits.
    """
    refuse_existing(out)
    weights = RunWeights(run, step)
    config = decoder_config(weights.state)
    check_names(weights, config)
    # Write all files under a temporary name.
    made = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    sweep(out)
    made.mkdir(parents=True)
    try:
        data = weights.state.get("data", {})
        if tokenizer is not None:
            copy_tokenizer(tokenizer, made, data)
        generation = generation_settings(config, tokenizer, data)
        write_weights(weights, made, dtype, shard_bytes)
        name = DTYPES[dtype][1]
        # `dtype` is Transformers 5's word, `torch_dtype` everybody else's.
        fields = {"dtype": name, "torch_dtype": name} | begin_field(data)
        write_json(made / "config.json", hf_config(config) | fields)
        write_json(made / "generation_config.json", generation)
        # Compare, describe, rename.
        difference = compare_logits(weights, config, made, dtype) if check else None
        facts = {
            "run": run.name,
            "step": weights.state["step"],
            "tokens": weights.state.get("tokens"),
            "parameters": sum(math.prod(shape) for shape in weights.shapes.values()),
            "dtype": name,
            "recipe_hash": weights.state.get("recipe_hash"),
            "a document begins after the id": data.get("begin_id"),
            "logits differ by": difference,
            "differs from init_from": "; ".join(changed_since_import(weights.state, made)) or None,
        }
        (made / "README.md").write_text(model_card(facts, config), encoding="utf-8")
        if os.path.lexists(out):
            raise UserError(f"{out} was made by another process meanwhile, and stays as it is")
        os.rename(made, out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return facts


def refuse_existing(out: Path) -> None:
    """Raise UserError where `out` exists."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is never overwritten; choose another one: OUT=")


def sweep(out: Path) -> None:
    """Remove what killed exports into `out` have left."""
    for left in out.parent.glob(f"{glob.escape(out.name)}.tmp-*"):
        process = left.name.rpartition("-")[2]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


def decoder_config(state: dict[str, Any]) -> DecoderConfig:
    """Return the decoder's configuration from the recipe in a checkpoint."""
    recipe = state["recipe"]
    return DecoderConfig(**recipe["model"], max_position_embeddings=recipe["seq_len"])


def write_weights(weights: RunWeights, folder: Path, dtype: str, shard_bytes: int) -> None:
    """Write all weights as safetensors of at most `shard_bytes` (or one weight) each, and an index
    where there is more than one file.
    """
    # Distribute the weights over the files.
    item = DTYPES[dtype][0].itemsize
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, shape in weights.shapes.items():
        size = math.prod(shape) * item
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    names = [
        "model.safetensors"
        if len(shards) == 1
        else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for name, members in zip(names, shards, strict=True):
        write_safetensors(folder / name, weights, members, dtype)
    if len(shards) > 1:
        where = {member: name for name, of in zip(names, shards, strict=True) for member in of}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / "model.safetensors.index.json", index)


def write_safetensors(path: Path, weights: RunWeights, names: list[str], dtype: str) -> None:
    """Write one file: length of the header (8 bytes, little-endian), header (JSON), tensors
    row-major.

    The format is written here (github.com/huggingface/safetensors), because the library needs whole
    tensors in memory, and an embedding alone can have 4 GB.
    """
    torch_dtype, _, code = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + math.prod(weights.shapes[name]) * torch_dtype.itemsize
        shape = list(weights.shapes[name])
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for rows in pieces(weights, name):
                file.write(memoryview(rows.to(torch_dtype).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def begin_field(data: Mapping[str, Any]) -> dict[str, int]:
    """Return the field of config.json for the id that precedes a document; `make sample` reads it.

    Empty where no id did, and for checkpoints of older versions.
    """
    begin_id = data.get("begin_id")
    return {} if begin_id is None else {"document_begin_id": begin_id}


def generation_settings(
    config: DecoderConfig, tokenizer: Path | None, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of generation_config.json, and put the tokenizer's ids into `config`.

    Rows of the table beyond the tokenizer stand for no text, so they are suppressed. Raises
    UserError where the tokenizer is missing or does not fit the table.
    """
    if tokenizer is None:
        return {}
    if not (tokenizer / TOKENIZER_FILE).is_file():
        raise UserError(f"{tokenizer / TOKENIZER_FILE}: not found; give TOKENIZER=")
    from transformers import PreTrainedTokenizerFast

    known = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    if len(known) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(known)} ids, the embedding {config.vocab_size} rows:"
            " it is not the tokenizer of this run"
        )
    # The training's own ids, where the checkpoint has them; else those that the tokenizer names.
    is_known = data.get("end_id") is not None
    begin_id = data.get("begin_id") if is_known else known.bos_token_id
    end_id = data["end_id"] if is_known else known.eos_token_id
    config.bos_token_id, config.eos_token_id = begin_id, end_id
    ids = {"bos_token_id": begin_id, "eos_token_id": end_id}
    settings: dict[str, Any] = {key: value for key, value in ids.items() if value is not None}
    if len(known) < config.vocab_size:
        settings["suppress_tokens"] = list(range(len(known), config.vocab_size))
    return settings


def transformers_model(weights: RunWeights, tokenizer: Path | None) -> PreTrainedModel:
    """Build, in memory, the Transformers model that an export in fp32 would give."""
    from transformers import GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = decoder_config(weights.state)
    check_names(weights, config)
    data = weights.state.get("data", {})
    generation = generation_settings(config, tokenizer, data)
    values = hf_config(config) | begin_field(data)
    theirs = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    fill(model, weights)
    model.generation_config = GenerationConfig(**generation)
    return model


def compare_logits(weights: RunWeights, config: DecoderConfig, folder: Path, dtype: str) -> float:
    """Return the largest difference of logits between Transformers' model of `folder` and the
    decoder, both in fp32 over the exported values. Raises UserError beyond rounding.
    """
    ours = Decoder(config).float().eval()
    fill(ours, weights, DTYPES[dtype][0])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    difference, limit = largest_difference(ours, theirs, LENGTH)
    if not difference <= limit:
        raise UserError(
            f"{folder}: the exported model's logits differ from the decoder's by {difference:.3g}"
            f" (limit {limit:.3g}); nothing was exported"
        )
    return difference


def changed_since_import(state: dict[str, Any], made: Path) -> list[str]:
    """Return what differs between the exported config.json and that of the folder from which the
    run started, both as Transformers reads them; none where there is no such folder.

    A run that an older version of this project started with a misread config.json was trained as
    another model than its author meant, and the logits of its export agree all the same.
    """
    origin = state["recipe"].get("init_from")
    if not origin or not (ROOT / origin / "config.json").is_file():
        return []
    before, after = (
        read_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), folder)
        for folder in (ROOT / origin, made)
    )
    return [
        f"{name}: {getattr(before, name, None)} there, {getattr(after, name, None)} here"
        for name in MEANING
        if getattr(before, name, None) != getattr(after, name, None)
    ]


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write plain values, indented as Transformers does."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def model_card(facts: dict[str, Any], config: DecoderConfig) -> str:
    """Return the README.md of the exported folder."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value is not None)
    shape = f"{config.num_hidden_layers} layers, width {config.hidden_size}"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {facts["run"]}, step {facts["step"]}

A decoder-only language model ({hf_config(config)["model_type"]} architecture, {shape}), pretrained
from scratch and exported from a checkpoint. A base model: it continues text and follows no
instructions.

| | |
|---|---|
{rows}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```
"""
