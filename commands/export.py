"""`make export RUN= STEP= OUT= TOKENIZER=`: writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from checkpoint.export import DTYPES, export
from checkpoint.format.manifest import folder_with_checkpoints
from checkpoint.load.weight_rows import RunWeights, find_tokenizer


def main(arguments: list[str]) -> int:
    """Export and say what was written; exit status."""
    parser = Parser(prog="make export", description="Hugging Face folder")
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--out", type=Path, help="default: <run>/export/step-<step>-<dtype>")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokenizer", type=Path, help="default: that of the run's corpus")
    parser.add_argument("--no-check", action="store_true", help="do not load it and compare logits")
    options = parser.parse_args(arguments)
    run = folder_with_checkpoints(options.run)
    try:
        if run is None:
            raise UserError(f"{options.run}: no run with checkpoints here or under runs/")
        state = RunWeights(run, options.step).state
        step = state["step"]
        out = options.out or run / "export" / f"step-{step:08d}-{options.dtype}"
        tokenizer = find_tokenizer(state, options.tokenizer)
        facts = export(
            run,
            out,
            step=step,
            dtype=options.dtype,
            tokenizer=tokenizer,
            check=not options.no_check,
        )
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a full disk, a folder that cannot be made
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    if tokenizer is None:
        print("no tokenizer was found or exported; give TOKENIZER=", file=sys.stderr)
    print(f"{out}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    return FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
