"""`make tokenizer IN= VOCAB= OUT=`: train a byte-level BPE tokenizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.values import split_arguments
from data.corpus.build import writing
from data.text.settings import read_settings
from data.text.train_tokenizer import train


def main(arguments: list[str] | None = None) -> int:
    """Entry of `make tokenizer`; returns the exit status."""
    parser = Parser(prog="make tokenizer", description="Train a tokenizer on text.")
    parser.add_argument("--in", dest="source", required=True, help="file, folder or glob")
    parser.add_argument("--vocab", type=int, required=True, help="number of tokens")
    parser.add_argument("--out", type=Path, help="folder, default corpora/tokenizer-VOCAB")
    parser.add_argument("--overrides", default="", help="settings as one text")
    parser.add_argument("settings", nargs="*", help="knob=value")
    options = parser.parse_args(arguments)
    out = options.out or Path("corpora") / f"tokenizer-{options.vocab}"

    def log(text: str) -> None:
        print(f"tokenizer {out}: {text}", file=sys.stderr, flush=True)

    try:
        if os.path.lexists(out):
            raise UserError(f"OUT={out}: is there already; remove it, or name another folder")
        arguments = [*options.settings, *split_arguments("OVERRIDES", options.overrides)]
        settings = read_settings(arguments)
        with writing(out):
            tokenizer = train(options.source, options.vocab, settings, log)
            tokenizer.save(out)
    except UserError as error:
        return refuse(error)
    print(f"{out}  {tokenizer.vocab_size} tokens  {tokenizer.fingerprint()[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
