"""`python -m commands.sample RUN --prompt TEXT`: text from a checkpoint or an exported folder.

    RUN = a run (its newest checkpoint, or --step N), or a Hugging Face folder

The one rule: it speaks through the export, so what is heard here is what users of the exported
folder get; generation is Transformers' own. Units: tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from checkpoint.export import export
from checkpoint.format.manifest import folder_with_checkpoints
from checkpoint.load.weight_rows import RunWeights, find_tokenizer


def sample(
    folder: Path, prompt: str, *, num_tokens: int, temperature: float, top_p: float, seed: int
) -> str:
    """The prompt and its continuation by the model of a Hugging Face folder.

    Temperature 0 takes the most likely token each time. Raises UserError where the folder has no
    tokenizer, or cannot be read.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json, so text cannot be turned into tokens")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: transformers cannot load it: {error}") from None
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0 and tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: its tokenizer has no end token to begin with; give a PROMPT")
    if ids.shape[1] == 0:
        ids = torch.tensor([[tokenizer.eos_token_id]])  # what precedes a document in training
    rows = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= rows:
        raise UserError(
            f"{folder}: its tokenizer gives the id {int(ids.max())}, its model has {rows} rows:"
            " they do not belong together"
        )
    torch.manual_seed(seed)
    choice = {"do_sample": False}
    if temperature > 0:
        choice = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        pad_token_id=tokenizer.eos_token_id,
        **choice,
    )
    return tokenizer.decode(made[0], skip_special_tokens=True)


def check(options: argparse.Namespace) -> None:
    """Raise UserError with every option that is out of range."""
    legal = {
        f"--tokens={options.tokens}: give 1 or more": options.tokens >= 1,
        f"--temperature={options.temperature}: give 0 to 100": 0 <= options.temperature <= 100,
        f"--top-p={options.top_p}: give a share above 0, at most 1": 0 < options.top_p <= 1,
        f"--seed={options.seed}: give 0 to 2**63 - 1": 0 <= options.seed < 2**63,
    }
    problems = [problem for problem, is_legal in legal.items() if not is_legal]
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        problems.append("the prompt is not valid UTF-8")
    if problems:
        raise UserError(*problems)


def main(arguments: list[str]) -> int:
    """Print a sample; exit status."""
    parser = Parser(prog="commands.sample", description="text from a run")
    parser.add_argument("run", help="run folder, its name under runs/, or a Hugging Face folder")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--step", type=int, help="checkpoint of a run; default: the newest")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = the most likely token")
    parser.add_argument("--top-p", type=float, default=0.95, help="share of probability to draw of")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    settings = dict(
        num_tokens=options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    try:
        check(options)
        folder = Path(options.run)
        if (folder / "config.json").is_file():
            print(sample(folder, options.prompt, **settings))
            return 0
        run = folder_with_checkpoints(options.run)
        if run is None:
            raise UserError(
                f"{options.run}: neither a run with checkpoints here or under runs/, nor a Hugging"
                " Face folder (config.json)"
            )
        tokenizer = find_tokenizer(RunWeights(run, options.step).state)
        if tokenizer is None:
            raise UserError(f"{run}: its corpus has no tokenizer, so text is not turned into ids")
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            export(run, folder, step=options.step, dtype="fp32", tokenizer=tokenizer, check=False)
            print(sample(folder, options.prompt, **settings))
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a full disk under the temporary folder
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
