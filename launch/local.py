"""`make pretrain`: check everything in one short process, then become or start the run.

    compose -> layout -> DeepSpeed JSON -> run folder -> corpus
        one rank                  exec: pretrain.py takes the place of this process
        several on this machine   launch.start.here
        HOSTFILE=, or in SLURM    doctor's quick part on every host -> launch.start.across

The one rule: what can be refused is refused here, before any rank starts, with every problem at
once. Imports no torch. Signals to this process are signals to the run, and its exit status is the
run's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from data.schedule import read_schedule
from data.stream import open_stream
from launch import network, start
from launch.environment import passed
from launch.facts import remove_stale_locks
from launch.hostfile import MOST_SLOTS, ranks_per_host
from launch.judge import Need
from launch.place import Place, add_place, read_place
from launch.preflight import Inspection, preflight, wanted_port
from recipes.command import add_words, refuse, words_of
from recipes.compose import compose_command
from recipes.exits import FAILED
from recipes.schema import Recipe, UserError, read_ranks
from runtime.engine_check import confirm
from runtime.mirror import require_wandb
from runtime.resuming import data_of, standing
from runtime.run_folder import refuse_busy
from runtime.settle import settle

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h; outlives the exec
CHECKPOINT_BYTES = 12  # per parameter: fp32 weight and two moments


def main(arguments: list[str]) -> int:
    """Entry of `python -m launch.local --nproc N -- recipe=NAME ...`; returns the exit status."""
    options = parse(arguments)
    try:
        ranks = read_ranks("NPROC", options.nproc) if options.nproc else None
        place = read_place(options)
        words = words_of(options)
        if options.check:
            check(words, ranks or 1)
            return 0
        if options.with_parent or "MAKELEVEL" in os.environ:
            end_with_parent()
        if place is None:
            return start_here(words, ranks or 1)
        return start_across(words, place, ranks)
    except UserError as error:
        return refuse(error)
    except OSError as error:  # a file system that went away, a folder in place of a file
        print(f"failed: {error}", file=sys.stderr)
        return FAILED


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; a variable of make that was not given comes as an empty text."""
    parser = argparse.ArgumentParser(prog="python -m launch.local", description=__doc__)
    parser.add_argument("--nproc", default="", help="ranks on this machine, or on each host")
    add_place(parser)
    parser.add_argument("--check", action="store_true", help="refuse what would be, start nothing")
    parser.add_argument("--with-parent", action="store_true", help="end when who started it ends")
    add_words(parser, "*", "recipe=NAME and overrides")
    return parser.parse_args(arguments)


def start_here(words: list[str], ranks: int) -> int:
    """Ranks of this machine."""
    port = wanted_port(os.environ) if ranks > 1 else None
    if port is not None and not network.is_free(port):
        raise UserError(f"MASTER_PORT={port} is busy; unset it to have a free one chosen")
    recipe = check(words, ranks).recipe
    for note in remove_stale_locks(os.environ):
        print(note, file=sys.stderr)
    command = command_of(words)
    if ranks > 1:
        return start.here(command[1:], ranks, ROOT, ROOT / "runs" / recipe.run, port)
    for name in LAUNCHER_VARIABLES:  # left over in the shell, they would name ranks to wait for
        os.environ.pop(name, None)
    # As for several ranks: see launch.agent.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.execv(command[0], command)


def command_of(words: list[str]) -> list[str]:
    """The process that trains."""
    return [sys.executable, str(ROOT / "pretrain.py"), *words]


def start_across(words: list[str], place: Place, nproc: int | None) -> int:
    """Ranks on many hosts: check the recipe, then the hosts, then start."""
    hosts = place.cluster.hosts
    if nproc is None and hosts[0].slots == MOST_SLOTS:
        raise UserError("this SLURM job has no GPUs to count; give the ranks per host: NPROC=")
    per_host = ranks_per_host(hosts, nproc)
    checked = check(words, per_host * len(hosts))
    recipe = checked.recipe
    refuse_split_groups(recipe, per_host)
    environment = passed(os.environ, place.named)
    names = " ".join(sorted(environment)) or "none"
    print(f"variables that go along: {names} (PASS= adds others)", flush=True)
    inspection = Inspection(
        need=Need(per_host, recipe.cluster.device, checked.checkpoint_gib),
        environment=environment,
        folders=[source.corpus for source in recipe.data.sources.values()],
        port=wanted_port(os.environ),
    )
    plan, _ = preflight(place.cluster, inspection, lambda line: print(line, flush=True))
    folder = f"runs/{recipe.run}"
    return start.across(place.cluster, plan, ["pretrain.py", *words], per_host, environment, folder)


def refuse_split_groups(recipe: Recipe, per_host: int) -> None:
    """Raise UserError where a tensor group would cross hosts."""
    tensor = recipe.parallel.tensor
    if per_host % tensor:
        raise UserError(
            f"parallel.tensor={tensor} does not divide the {per_host} ranks of each host, so a"
            " tensor group would cross hosts; choose another NPROC or parallel.tensor"
        )


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the process that started this one (make) is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True)
class Checked:
    """A recipe that can start. `checkpoint_gib` = free space that two of its checkpoints take."""

    recipe: Recipe
    checkpoint_gib: float


def check(words: list[str], ranks: int) -> Checked:
    """Raise UserError unless the run can start; builds the embedded corpora it names."""
    recipe = compose_command(words).recipe
    schedule = read_schedule(recipe.batch_tokens, recipe.seq_len)
    settled = settle(recipe, ranks, schedule)
    confirm(settled.config)
    if recipe.log.wandb is not None:
        require_wandb(recipe.log.wandb)
    folder = ROOT / "runs" / recipe.run
    refuse_busy(folder)
    data, vocabulary = data_of(recipe, folder), recipe.model.vocab_size
    stream = open_stream(data, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)
    standing(folder, recipe, stream.state(), stream.past, settled.last_step)
    stream.check(settled.last_step, recipe.eval_tokens)
    return Checked(recipe, 2 * CHECKPOINT_BYTES * settled.num_parameters / 2**30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
