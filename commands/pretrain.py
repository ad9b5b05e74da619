"""`make pretrain`: check everything in one short process, then become or start the run.

    compose -> layout -> DeepSpeed JSON -> run folder -> corpus
        on this machine           launch.supervise: ranks here
        HOSTFILE=, or in SLURM    launch.supervise: launch.hosts.fleet looks at the hosts -> ranks
        there

The one rule: what can be refused is refused here, before any rank starts, with every problem at
once. Imports no torch. Signals to this process are signals to the run, and its exit status is the
run's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from base.paths import ROOT

if __name__ == "__main__":  # what follows takes a second to import
    from record import requests

    requests.REQUESTS.listen(is_importing=True)

from base.command_line import Parser, add_overrides, arguments_of, refuse
from base.cores import allow_open_files
from base.errors import UserError
from base.exits import FAILED
from base.lossy_output import make_lossy
from base.parent_death import signal_at_parent_death
from base.units import GIB
from base.values import read_ranks
from data.stream.schedule import schedule_of
from data.stream.sources import corpus_problems
from data.stream.stream import open_stream
from launch.budget import Attempt, Budget
from launch.hosts import network
from launch.hosts.facts import gather, gpus, remove_stale_locks
from launch.hosts.fleet import Fleet
from launch.hosts.hostfile import MOST_SLOTS, ranks_per_host
from launch.hosts.judge import Need, ailing
from launch.hosts.place import Place, add_place, read_place
from launch.hosts.preflight import Inspection, wanted_port
from launch.hosts.spares import SpareWatch
from launch.hosts.variables import left_here, passed, watched
from launch.ranks import start
from launch.ranks.screen import Screen
from launch.ranks.start import Asked, Lived
from launch.slurm import requeued
from launch.supervise import Start, supervise
from recipes.compose import compose_command
from recipes.schema import Recipe
from record.alerts import AlertSender
from record.bundle import write_bundle
from record.requests import EARLY, REQUESTS, AskedEarly, forget
from record.resuming import data_of, standing
from record.run_folder import refuse_busy
from record.supervisor_log import SupervisorLog
from record.trust import keep_to_owner
from runtime.ds_config.confirm import confirm
from runtime.ds_config.merge import ds_problems
from runtime.log.wandb_mirror import require_wandb
from runtime.resolve import resolve

CHECKPOINT_BYTES = 12  # per parameter: fp32 weight and two moments


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.pretrain --nproc N -- recipe=NAME ...`; returns the exit
    status.
    """
    options = parse(arguments)
    keep_to_owner()
    allow_open_files()
    try:
        ranks = read_ranks("NPROC", options.nproc) if options.nproc else None
        place = read_place(options)
        arguments = arguments_of(options)
        if options.check:
            check(arguments, ranks or 1)
            return 0
        if options.with_parent or "MAKELEVEL" in os.environ:
            end_with_parent()
            hang_up_with_parent()
        if place is None:
            return start_here(arguments, ranks or 1, options.once)
        status = start_across(arguments, place, ranks, options.once)
        return requeued(status, os.environ) if options.slurm else status
    except UserError as error:
        return refuse(error)
    except PermissionError as error:
        what = f"{error.filename}: {error.strerror}"
        return refuse(
            UserError(f"{what}; have its owner change that, or start from a copy of yours")
        )
    except OSError as error:  # a file system that went away, a folder in place of a file
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except AskedEarly as early:  # a signal while it checks, or builds a corpus
        print(EARLY, end="", file=sys.stderr)
        return early.ending.status


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; a variable of make that was not given comes as an empty text."""
    parser = Parser(prog="python -m commands.pretrain", description=__doc__)
    parser.add_argument("--nproc", default="", help="ranks on this machine, or on each host")
    add_place(parser)
    parser.add_argument("--check", action="store_true", help="refuse what would be, start nothing")
    parser.add_argument("--once", action="store_true", help="never start again after a failure")
    parser.add_argument("--with-parent", action="store_true", help="end when who started it ends")
    add_overrides(parser, "*", "recipe=NAME and overrides")
    return parser.parse_args(arguments)


def start_here(arguments: list[str], ranks: int, once: bool) -> int:
    """Ranks of this machine."""
    port = wanted_port(os.environ) if ranks > 1 else None
    if port is not None and not network.is_free(port):
        raise UserError(f"MASTER_PORT={port} is busy; unset it to have a free one chosen")
    if ranks > 1 and (wrong := network.missing_interfaces(os.environ, False)):
        raise UserError(*(f"{line}; unset it" for line in wrong))
    recipe = check(arguments, ranks).recipe
    for note in remove_stale_locks(os.environ):
        print(note, file=sys.stderr)
    folder = ROOT / "runs" / recipe.run
    supervisor_log = SupervisorLog(folder)

    def live(screen: Screen, asked: Asked, variables: dict[str, str], has_begun: bool) -> Lived:
        command = command_of(goes_on(arguments) if has_begun else arguments)
        return start.live_here(
            command[1:], ranks, ROOT, folder, port, screen, asked, variables, recipe.watch
        )

    def mend(attempt: Attempt | None, lived: Lived | None) -> Start:
        if recipe.cluster.device != "cpu":  # as the doctor does on other hosts, before each attempt
            found = gpus()
            if "problem" in found:
                print(f"warning: GPUs: {found['problem']}", file=sys.stderr)
            if problems := ailing(found.get("cards", []), ranks, os.environ):
                raise UserError(*problems)
        return Start(ranks, live)

    forget(folder)  # what an attempt that is over was asked
    facts = functools.partial(host_facts, os.environ)
    with start.signals() as asked, alerts_of(recipe, supervisor_log) as tell:
        return supervise(
            mend,
            supervisor_log,
            Budget(0 if once else recipe.restart.attempts, before(recipe, supervisor_log)),
            asked,
            lambda why: keep(supervisor_log, why, facts(), os.environ),
            0.0 if once else recipe.restart.wait_s,
            tell,
        )


def command_of(arguments: list[str]) -> list[str]:
    """The process that trains."""
    return [sys.executable, str(ROOT / "pretrain.py"), *arguments]


def goes_on(arguments: list[str]) -> list[str]:
    """The arguments of a later attempt, without `resume=fresh`: it counts for one start."""
    return [text for text in arguments if not text.startswith("resume=")] + ["resume=auto"]


def before(recipe: Recipe, supervisor_log: SupervisorLog) -> tuple[int, int, int]:
    """How far the run has come before the first attempt of this launch."""
    is_anew = recipe.resume == "fresh" and not supervisor_log.has_begun()
    return (0, 0, 0) if is_anew else supervisor_log.place()


def host_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the doctor knows of this machine, by its name."""
    return {socket.gethostname(): gather(ROOT, 0, {}, environ)}


def start_across(arguments: list[str], place: Place, nproc: int | None, once: bool) -> int:
    """Ranks on many hosts: check the recipe, then the hosts, then start."""
    hosts = place.cluster.hosts
    if nproc is None and hosts[0].slots == MOST_SLOTS:
        raise UserError("this SLURM job has no GPUs to count; give the ranks per host: NPROC=")
    per_host = ranks_per_host([*hosts, *place.spares], nproc)
    checked = check(arguments, per_host * len(hosts))
    recipe = checked.recipe
    refuse_split_groups(recipe, per_host)
    environment = passed(os.environ, place.named)
    names = " ".join(sorted(environment)) or "none"
    log(f"variables that go along: {names} (PASS= adds others)")
    if place.cluster.via != "srun":  # which takes all variables along
        for line in left_here(os.environ, place.named):
            log(f"warning: {line}")
    inspection = Inspection(
        need=Need(per_host, recipe.cluster.device, checked.checkpoint_gib),
        environment=environment,
        folders=[source.corpus for source in recipe.data.sources.values()],
        port=wanted_port(os.environ),
    )
    job = os.environ.get("SLURM_JOB_ID", "") if place.cluster.via == "srun" else ""
    supervisor_log = SupervisorLog(ROOT / "runs" / recipe.run, job)
    forget(supervisor_log.folder)
    rules = replace(recipe.restart, attempts=0) if once else recipe.restart
    with start.signals() as asked, alerts_of(recipe, supervisor_log) as tell:
        fleet = Fleet(
            place.cluster,
            list(place.spares),
            inspection,
            rules,
            place.included,
            supervisor_log.failures,
            supervisor_log.note,
            lambda hosts: check(arguments, per_host * hosts, is_running=True),
            log,
            tell=tell,
        )

        def mend(attempt: Attempt | None, lived: Lived | None) -> Start:
            fleet.mend(attempt, {end.host for end in lived.ends if end.is_lost} if lived else set())
            return Start(per_host * len(fleet.cluster.hosts), live)

        def live(screen: Screen, asked: Asked, variables: dict[str, str], has_begun: bool) -> Lived:
            order = start.order_of(
                fleet.plan,
                ["pretrain.py", *(goes_on(arguments) if has_begun else arguments)],
                per_host,
                environment | variables,
                f"runs/{recipe.run}",
                recipe.cluster.lost_s,
                recipe.watch,
            )
            return start.live_across(fleet.cluster, order, screen, asked)

        # Ranks of a host that was cut off end by themselves before it counts as lost; their claim
        # on the run may take a little longer.
        budget = Budget(
            rules.attempts, before(recipe, supervisor_log), busy_s=2 * recipe.cluster.lost_s
        )
        watch = SpareWatch(
            lambda: fleet.cluster, lambda: fleet.spares, inspection, lambda: fleet.facts, log,
            supervisor_log.note,
        )  # fmt: skip
        with watch:
            return supervise(
                mend, supervisor_log, budget, asked,
                lambda why: keep(supervisor_log, why, fleet.facts, os.environ),
                0.0 if once else rules.wait_s, tell,
            )  # fmt: skip


@contextlib.contextmanager
def alerts_of(
    recipe: Recipe, supervisor_log: SupervisorLog
) -> Iterator[Callable[[str, str], None]]:
    """How the launcher tells people of what ranks that are gone cannot."""
    alerts = AlertSender(recipe.run, recipe.alerts, supervisor_log.event, log)
    try:
        yield lambda kind, text: alerts.pass_on(kind, f"{recipe.run}: {text}")
    finally:
        alerts.close()


def keep(
    supervisor_log: SupervisorLog, why: str, hosts: Mapping[str, Any], environ: Mapping[str, str]
) -> Path | None:
    """A bundle of a run that is given up; None where it has no folder, or the disk is full. Puts
    the end on record.

    `hosts` are facts by host; variables go in by the allow-list of launch.hosts.variables.
    """
    variables = watched(environ).items()
    known = {
        "WHY.txt": f"{why}\n",
        "hosts.json": json.dumps(hosts, indent=2, default=str) + "\n",
        "environment.txt": "".join(f"{name}={value}\n" for name, value in variables),
    }
    try:
        made = write_bundle(supervisor_log.folder, supervisor_log.name(), known)
    except OSError:
        made = None
    shown = str(made.relative_to(supervisor_log.folder)) if made else None
    supervisor_log.event("gave_up", reason=why, bundle=shown)
    return made


def log(line: str) -> None:
    """A line of the launcher's own."""
    print(line, flush=True)


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
    signal_at_parent_death(signal.SIGTERM)


def hang_up_with_parent() -> None:
    """Get SIGHUP when the terminal goes, also where make leads its session (`ssh -t HOST make ...`,
    `tmux new make ...`): a shell would pass it on, make only waits."""
    if os.getsid(0) != os.getppid():
        return
    with contextlib.suppress(OSError):  # no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)

        def wait() -> None:
            hang_up = select.poll()
            hang_up.register(terminal, 0)
            hang_up.poll()
            os.kill(os.getpid(), signal.SIGHUP)

        threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True)
class Checked:
    """A recipe that can start. `checkpoint_gib` = free space that two of its checkpoints take."""

    recipe: Recipe
    checkpoint_gib: float


def check(arguments: list[str], ranks: int, is_running: bool = False) -> Checked:
    """Raise UserError unless the run can start; builds the embedded corpora it names."""
    recipe = compose_command(
        arguments, ds_problems, lambda data: corpus_problems(data, ROOT)
    ).recipe
    try:
        schedule = schedule_of(recipe)
        resolved = resolve(recipe, ranks, schedule)
    except UserError as error:
        raise UserError(*error.problems, *corpus_problems(recipe.data, ROOT)) from None
    confirm(resolved.config)
    if recipe.log.wandb is not None:
        require_wandb(recipe.log.wandb)
    folder = ROOT / "runs" / recipe.run
    if not is_running:  # the supervisor's own last attempt may be ending
        refuse_busy(folder)
    data, vocabulary = data_of(recipe, folder), recipe.model.vocab_size
    stream = open_stream(data, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)
    standing(folder, recipe, stream.state(), stream.past, resolved.last_step)
    stream.check(resolved.last_step, recipe.eval_tokens)
    return Checked(recipe, 2 * CHECKPOINT_BYTES * resolved.num_parameters / GIB)


if __name__ == "__main__":
    make_lossy()
    REQUESTS.listen()
    sys.exit(main(sys.argv[1:]))
