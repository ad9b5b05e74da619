"""`make corpus-import IN= OUT= TOKENIZER=`: make a corpus from token files of other tools."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.values import split_arguments
from data.corpus.build_report import report_lines
from data.corpus.tokenizer import open_tokenizer
from data.foreign.import_checks import ImportSettings
from data.foreign.importing import import_corpus
from data.text.settings import knob_lines, read_knobs


def main(arguments: list[str] | None = None) -> int:
    """Entry of `make corpus-import`; returns the exit status."""
    parser = Parser(
        prog="make corpus-import",
        description="Make a corpus of tokenized files.",
        epilog=f"knobs:\n{knob_lines(ImportSettings)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--in", dest="source", required=True, help="prefix, file, folder or glob")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--quick", action="store_true", help="read no token, trust sizes")
    parser.add_argument("--overrides", default="", help="settings as one text")
    parser.add_argument("settings", nargs="*", help="knob=value")
    options = parser.parse_args(arguments)

    def log(text: str) -> None:
        print(f"corpus {options.out}: {text}", file=sys.stderr, flush=True)

    try:
        if not options.source or options.out.name in ("", ".."):
            raise UserError(
                "IN= and OUT= must be given, OUT as a new folder (see docs/own-data.md)"
            )
        arguments = [*options.settings, *split_arguments("OVERRIDES", options.overrides)]
        settings = read_knobs(ImportSettings, arguments, "make corpus-import")
        name = options.tokenizer
        tokenizer = open_tokenizer(name, settings.eod) if name else None
        manifest = import_corpus(
            options.source, options.out, tokenizer, settings, log, options.quick
        )
    except UserError as error:
        return refuse(error)
    for line in report_lines(options.out, manifest):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
