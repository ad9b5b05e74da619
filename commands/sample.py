"""`make sample RUN= PROMPT= TOKENS= TEMPERATURE= TOP_P= SEED= STEP=`: text from a run or a folder.

RUN is a run (its newest checkpoint, or that of STEP), or a Hugging Face folder. Rule: text of a run
comes from the same Transformers model that `make export` writes, built in memory, so users of the
export get the same text. What can be refused without torch is refused before torch is imported.
Units: tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from checkpoint.format.manifest import run_with_checkpoints
from checkpoint.load.choosing import find_checkpoint
from checkpoint.load.run_tokenizer import find_tokenizer


def main(arguments: list[str]) -> int:
    """Print a sample; returns the exit status."""
    parser = Parser(prog="make sample", description="text from a run")
    parser.add_argument("run", help="run folder, its name under runs/, or a Hugging Face folder")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--step", type=int, help="checkpoint of a run; default: the newest")
    parser.add_argument("--tokens", default="100", help="tokens to add at most")
    parser.add_argument("--temperature", default="0.8", help="0 = always the most likely token")
    parser.add_argument("--top-p", default="0.95", help="share of probability to draw from")
    parser.add_argument("--seed", default="0")
    options = parser.parse_args(arguments)
    try:
        settings = checked(options)
        model, tokenizer = opened(options)
        text, note = sample(model, tokenizer, options.prompt, **settings)
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a disk or a file system that does not answer
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    print(text)
    if note:
        print(note, file=sys.stderr)
    return FINISHED


def checked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of generation. Raises UserError with every one that is out of range."""
    rules = {
        "tokens": ("TOKENS", int, lambda n: n >= 1, "give 1 or more"),
        "temperature": ("TEMPERATURE", float, lambda t: 0 <= t <= 100, "give 0 to 100"),
        "top_p": ("TOP_P", float, lambda p: 0 < p <= 1, "give a share above 0, at most 1"),
        "seed": ("SEED", int, lambda s: 0 <= s < 2**63, "give 0 to 2**63 - 1"),
    }
    settings, problems = {}, []
    for name, (variable, kind, is_legal, rule) in rules.items():
        text = getattr(options, name)
        try:
            settings[name] = kind(text)
        except ValueError:
            settings[name] = None
        if settings[name] is None or not is_legal(settings[name]):
            problems.append(f"{variable}={text}: {rule}")
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        problems.append("PROMPT is not valid UTF-8")
    if problems:
        raise UserError(*problems)
    return settings


def opened(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return (Transformers model, tokenizer) of a run's checkpoint or of a Hugging Face folder.

    Raises UserError where there is none, or where it has no tokenizer.
    """
    folder = Path(options.run)
    if (folder / "config.json").is_file():
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"{folder} has no tokenizer.json, so text cannot be turned into tokens")
        return model_of_folder(folder), tokenizer_of(folder)
    run = run_with_checkpoints(options.run, "nor a Hugging Face folder (config.json)")
    found = find_checkpoint(run, options.step)
    tokenizer = find_tokenizer(found.manifest.state)
    if tokenizer is None:
        raise UserError(f"{run}: its corpus has no tokenizer, so text cannot be turned into tokens")

    from checkpoint.export import transformers_model
    from checkpoint.load.weight_rows import RunWeights

    return transformers_model(RunWeights(run, found=found), tokenizer), tokenizer_of(tokenizer)


def model_of_folder(folder: Path) -> Any:
    """Load the model of a Hugging Face folder. Raises UserError."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: transformers cannot load it: {error}") from None


def tokenizer_of(folder: Path) -> Any:
    """Load the tokenizer of a folder. Raises UserError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = AutoTokenizer if (folder / "config.json").is_file() else PreTrainedTokenizerFast
    try:
        return kind.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: transformers cannot load it: {error}") from None


def sample(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> tuple[str, str]:
    """Return (the prompt and its continuation, a note where it ends at the model's context).

    Temperature 0 takes the most likely token each time. Raises UserError where the prompt cannot be
    continued by this model.
    """
    import torch

    # The prompt begins a document: after the token that began documents in the training.
    begin_id = getattr(model.config, "document_begin_id", None)
    is_known = begin_id is not None  # a model of this project; else its tokenizer's template holds
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not is_known).input_ids.long()
    if ids.shape[1] == 0:
        begin_id = tokenizer.eos_token_id if begin_id is None else begin_id
        if begin_id is None:
            raise UserError("the tokenizer has no end token to begin with; give a PROMPT")
        ids = torch.tensor([[begin_id]])
    elif is_known and ids.shape[1] + 1 < model.config.max_position_embeddings:
        ids = torch.cat([torch.tensor([[begin_id]]), ids], dim=1)
    rows = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= rows:
        raise UserError(
            f"the tokenizer gives the id {int(ids.max())}, the model has {rows} rows: they do not"
            " belong together"
        )
    context, used = model.config.max_position_embeddings, ids.shape[1]
    if used >= context:
        raise UserError(
            f"PROMPT has {used} tokens, and the model was trained on sequences of {context}:"
            " nothing can be added; give a shorter one"
        )
    torch.manual_seed(seed)
    choice: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        choice = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(tokens, context - used),
        pad_token_id=tokenizer.eos_token_id,
        **choice,
    )
    note = ""
    if made.shape[1] == context and tokens > context - used:
        note = f"stopped at the model's context of {context} tokens"
    return tokenizer.decode(made[0], skip_special_tokens=True), note


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
