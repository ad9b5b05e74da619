"""`make corpus-info CORPUS=`: describe a corpus from its manifest; no token is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from data.corpus.build_report import report_lines
from data.corpus.corpus import read_manifest

SHOWN = ("source", "text", "filters", "duplicates", "document_order", "held_out", "made_with")


def info_lines(folder: Path) -> list[str]:
    """The report of a corpus, and the rules by which it was made.

    Raises UserError where the folder is no corpus.
    """
    manifest = read_manifest(folder)
    lines = report_lines(folder, manifest)
    for key in SHOWN:
        value = manifest.get(key)
        if isinstance(value, dict):
            lines.append(f"  {key}:")
            lines += [
                f"    {name}: {json.dumps(one, ensure_ascii=False)}"
                for name, one in value.items()
                if name != "side_files"
            ]
        elif value is not None:
            lines.append(f"  {key}: {value}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Entry of `make corpus-info`; returns the exit status."""
    parser = Parser(prog="python -m commands.corpus_info", description="Describe a corpus.")
    parser.add_argument("corpus", type=Path)
    options = parser.parse_args(arguments)
    try:
        lines = info_lines(options.corpus)
    except UserError as error:
        return refuse(error)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
