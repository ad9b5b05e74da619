"""`python -m checkpoint.export RUN [--step N]`: a checkpoint as a Hugging Face folder.

    checkpoint -> weight by weight, some rows at a time -> model-00001-of-00002.safetensors ...
    config.json, generation_config.json, tokenizer, README.md (model card)

Loads in AutoModelForCausalLM with no code of ours. The one rule: nothing is exported that was not
read back: the folder is made beside its final name, loaded by transformers, its logits compared
with our decoder's, and only then renamed. Needs no engine and no GPU; memory is one piece of a
weight, and twice the model for the comparison. Units: bytes, rows.
"""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from base.errors import UserError
from checkpoint.load.weight_rows import RunWeights, check_names
from model.config import DecoderConfig, hf_config
from model.decoder import Decoder

DTYPES = {"bf16": (torch.bfloat16, "bfloat16", "BF16"), "fp32": (torch.float32, "float32", "F32")}
SHARD_BYTES = 5 * 10**9  # transformers' own default was this for years; files stay handy
PIECE_BYTES = 64 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


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
    """Write `out` from the checkpoint of `step` (default: the newest) of a run; what was written.

    Raises UserError when `out` exists, the checkpoint is missing or damaged, or the exported folder
    does not give our decoder's logits.
    """
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is never overwritten; choose another one: OUT=")
    weights = RunWeights(run, step)
    config = decoder_config(weights.state)
    check_names(weights, config)
    made = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    sweep(out)
    made.mkdir(parents=True)
    try:
        generation: dict[str, Any] = {}
        if tokenizer is not None:
            known = copy_tokenizer(tokenizer, made)
            special_ids(config, known)
            if known["vocab_size"] < config.vocab_size:  # rows that stand for no text
                beyond = range(known["vocab_size"], config.vocab_size)
                generation["suppress_tokens"] = list(beyond)
        write_weights(weights, made, dtype, shard_bytes)
        name = DTYPES[dtype][1]
        # `dtype` is Transformers 5's word, `torch_dtype` everybody else's.
        write_json(made / "config.json", hf_config(config) | {"dtype": name, "torch_dtype": name})
        ids = {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id")}
        generation |= {key: value for key, value in ids.items() if value is not None}
        write_json(made / "generation_config.json", generation)
        difference = compare_logits(weights, config, made, dtype) if check else None
        facts = {
            "run": run.name,
            "step": weights.state["step"],
            "tokens": weights.state.get("tokens"),
            "parameters": sum(math.prod(shape) for shape in weights.shapes.values()),
            "dtype": name,
            "recipe_hash": weights.state.get("recipe_hash"),
            "logits differ by": difference,
        }
        (made / "README.md").write_text(model_card(facts, config), encoding="utf-8")
        if os.path.lexists(out):
            raise UserError(f"{out} was made by another process meanwhile, and stays as it is")
        os.rename(made, out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return facts


def sweep(out: Path) -> None:
    """Remove what exports into `out` left that a kill ended."""
    for left in out.parent.glob(f"{glob.escape(out.name)}.tmp-*"):
        process = left.name.rpartition("-")[2]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


def decoder_config(state: dict[str, Any]) -> DecoderConfig:
    """The decoder of a checkpoint's recipe."""
    recipe = state["recipe"]
    return DecoderConfig(**recipe["model"], max_position_embeddings=recipe["seq_len"])


def write_weights(weights: RunWeights, folder: Path, dtype: str, shard_bytes: int) -> None:
    """All weights as safetensors of at most `shard_bytes` (or one weight) each, and index."""
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
    """One file: length of the header (8 bytes, little-endian), header (JSON), tensors row-major.

    The format is a few lines (github.com/huggingface/safetensors); the library wants whole tensors
    in memory, and an embedding alone can be 4 GB.
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


def pieces(weights: RunWeights, name: str) -> Iterator[torch.Tensor]:
    """A weight in order, some rows at a time, fp32."""
    shape = weights.shapes[name]
    step = max(1, PIECE_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield weights.read_rows(name, start, min(start + step, shape[0]))


def copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer's files; its bos and eos as ids where it has them."""
    if not (source / TOKENIZER_FILES[0]).is_file():
        raise UserError(f"{source / TOKENIZER_FILES[0]}: not found; give TOKENIZER=")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return ids | {"vocab_size": len(tokenizer)}


def special_ids(config: DecoderConfig, ids: dict[str, Any]) -> None:
    """Put the tokenizer's ids into the configuration; UserError when they do not fit the table."""
    if ids["vocab_size"] > config.vocab_size:
        raise UserError(
            f"the tokenizer has {ids['vocab_size']} ids, the embedding {config.vocab_size} rows:"
            " it is not the tokenizer of this run"
        )
    config.bos_token_id, config.eos_token_id = ids["bos_token_id"], ids["eos_token_id"]


@torch.no_grad()
def compare_logits(weights: RunWeights, config: DecoderConfig, folder: Path, dtype: str) -> float:
    """Largest difference of logits between transformers' model of `folder` and our decoder, both in
    fp32 over the exported values. UserError beyond rounding."""
    from transformers import AutoModelForCausalLM

    ours = Decoder(config).float().eval()
    for name, parameter in ours.named_parameters():
        at = 0
        for rows in pieces(weights, name):
            parameter[at : at + len(rows)] = rows.to(DTYPES[dtype][0])
            at += len(rows)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(config.max_position_embeddings, 256)  # late positions show rounded rotary angles
    ids = torch.randint(
        0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)
    )
    expected, got = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    difference = float((expected - got).abs().max())
    limit = 1e-4 * max(1.0, float(expected.abs().max()))
    if not difference <= limit:
        raise UserError(
            f"{folder}: the exported model's logits differ from the decoder's by {difference:.3g}"
            f" (limit {limit:.3g}); nothing was exported"
        )
    return difference


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Plain values, indented, as transformers writes them."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def model_card(facts: dict[str, Any], config: DecoderConfig) -> str:
    """README.md of the exported folder."""
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
