"""`make corpus IN= OUT= TOKENIZER= WORKERS=`: build a corpus from text."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from base.command_line import Parser, refuse
from base.cores import usable
from base.errors import UserError
from base.values import split_arguments
from data.corpus.build_report import report_lines
from data.corpus.tokenizer import open_tokenizer
from data.text.ingest import build_corpus
from data.text.settings import Settings, knob_lines, read_settings


def main(arguments: list[str] | None = None) -> int:
    """Entry of `make corpus`; returns the exit status."""
    parser = Parser(
        prog="make corpus",
        description="Build a corpus from text.",
        epilog=f"knobs:\n{knob_lines(Settings)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--in", dest="source", required=True, help="file, folder or glob")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json, or bytes")
    parser.add_argument("--workers", type=int, default=usable())
    parser.add_argument("--overrides", default="", help="settings as one text")
    parser.add_argument("settings", nargs="*", help="knob=value")
    options = parser.parse_args(arguments)
    start = time.monotonic()

    def log(text: str) -> None:
        print(f"corpus {options.out}: {text}", file=sys.stderr, flush=True)

    try:
        problems = []
        if not (options.source and options.out and options.tokenizer):
            problems.append("IN=, OUT= and TOKENIZER= must be given (see docs/own-data.md)")
        elif Path(options.out).name in ("", ".."):
            problems.append(f"OUT={options.out}: is not the name of a new folder")
        if options.workers < 1:
            problems.append(f"WORKERS={options.workers}: is not 1 or more")
        if problems:
            raise UserError(*problems)
        arguments = [*options.settings, *split_arguments("OVERRIDES", options.overrides)]
        settings = read_settings(arguments)
        tokenizer = open_tokenizer(options.tokenizer, settings.eod)
        out = Path(options.out)
        manifest = build_corpus(options.source, out, tokenizer, settings, options.workers, log)
    except UserError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    for line in report_lines(out, manifest):
        print(line)
    # Flushed here: in one of many runs the flush at the interpreter's end lost it through a pipe.
    print(f"built in {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
