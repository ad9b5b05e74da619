"""`make pretrain`: check everything in one short process, then become the run.

    compose -> layout -> DeepSpeed JSON -> run folder -> corpus -> exec: pretrain.py, or torchrun

The one rule: what can be refused is refused here, before any rank starts, with every problem at
once. Imports no torch; the process that trains replaces this one, so its signals and its exit
status are the caller's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from data.schedule import read_schedule
from data.stream import open_stream
from recipes.compose import compose_command
from recipes.schema import UserError, read_ranks
from runtime.engine_check import confirm
from runtime.mirror import require_wandb
from runtime.resuming import standing
from runtime.run_folder import refuse_busy
from runtime.settle import settle

ROOT = Path(__file__).resolve().parent.parent
REFUSED = 93
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h; outlives the exec


def main(arguments: list[str]) -> int:
    """Entry of `python -m launch.local --nproc N -- recipe=NAME ...`; returns only to refuse."""
    parser = argparse.ArgumentParser(prog="python -m launch.local", description=__doc__)
    parser.add_argument("--nproc", default="1", help="ranks on this machine")
    parser.add_argument("words", nargs="*", help="recipe=NAME and overrides")
    options = parser.parse_args(arguments)
    try:
        ranks = read_ranks("NPROC", options.nproc)
        check(options.words, ranks)
    except UserError as error:
        for problem in error.problems:
            print(f"refused: {problem}", file=sys.stderr)
        return REFUSED
    if ranks == 1:
        for name in LAUNCHER_VARIABLES:  # left over in the shell, they would name ranks to wait for
            os.environ.pop(name, None)
    end_with_make()
    # Waiting OpenMP threads sleep instead of spinning. On a busy machine spinning threads take the
    # cores from those that work: 350 against 1,900 tokens/s of `tiny`, two threads, load 4.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ranks share the cores; torchrun would say so in five lines and give each rank one thread.
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    command = command_of(ranks, options.words)
    os.execv(command[0], command)


def end_with_make() -> None:
    """Ask Linux for a SIGTERM when the make that started this is killed, where one did."""
    if "MAKELEVEL" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def check(words: list[str], ranks: int) -> None:
    """Raise UserError unless the run can start; builds the embedded corpora it names."""
    recipe = compose_command(words).recipe
    schedule = read_schedule(recipe.batch_tokens, recipe.seq_len)
    settled = settle(recipe, ranks, schedule)
    confirm(settled.config)
    if recipe.log.wandb is not None:
        require_wandb(recipe.log.wandb)
    folder = ROOT / "runs" / recipe.run
    refuse_busy(folder)
    stream = open_stream(
        recipe.data, recipe.seed, recipe.seq_len, schedule, ROOT, recipe.model.vocab_size
    )
    standing(folder, recipe, stream.state(), schedule.tokens_after)
    stream.check(settled.last_step, recipe.eval_tokens)


def command_of(ranks: int, words: list[str]) -> list[str]:
    """The process that trains: the entry itself for one rank, torchrun for several."""
    script = str(ROOT / "pretrain.py")
    if ranks == 1:
        return [sys.executable, script, *words]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, script, *words]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
