"""`make export RUN= STEP= DTYPE= OUT= TOKENIZER=`: writes a checkpoint as a Hugging Face folder.

Rule: what can be refused without torch is refused before torch is imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from checkpoint.format.manifest import run_with_checkpoints
from checkpoint.load.choosing import find_checkpoint
from checkpoint.load.run_tokenizer import find_tokenizer

DTYPES = ("bf16", "fp32")


def main(arguments: list[str]) -> int:
    """Export, and print what was written; returns the exit status."""
    parser = Parser(prog="make export", description="Hugging Face folder")
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--out", type=Path, help="default: <run>/export/step-<step>-<dtype>")
    parser.add_argument("--dtype", default="bf16", help="bf16 or fp32")
    parser.add_argument("--tokenizer", type=Path, help="default: that of the run's corpus")
    parser.add_argument("--no-check", action="store_true", help="do not load it and compare logits")
    try:
        return export_run(parser.parse_args(arguments))
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a full disk, a folder that cannot be made
        print(f"failed: {error}", file=sys.stderr)
        return FAILED


def export_run(options: argparse.Namespace) -> int:
    """Export as the options ask. Raises UserError, OSError."""
    if options.dtype not in DTYPES:
        raise UserError(f"DTYPE={options.dtype}: one of {', '.join(DTYPES)}")
    run = run_with_checkpoints(options.run)
    found = find_checkpoint(run, options.step)
    out = options.out or run / "export" / f"step-{found.step:08d}-{options.dtype}"
    if out.exists():
        raise UserError(f"{out} exists and is never overwritten; choose another one: OUT=")
    tokenizer = find_tokenizer(found.manifest.state, options.tokenizer)

    from checkpoint.export import export

    facts = export(
        run,
        out,
        step=found.step,
        dtype=options.dtype,
        tokenizer=tokenizer,
        check=not options.no_check,
    )
    if tokenizer is None:
        print("no tokenizer was found or exported; give TOKENIZER=", file=sys.stderr)
    shown = {key: value for key, value in facts.items() if value is not None}
    print(f"{out}: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    return FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
