"""`make pretrain`: check everything in one short process, then become or start the run.

    compose -> layout -> DeepSpeed JSON -> run folder -> corpus
        on this machine           launch.supervise: ranks here
        HOSTFILE=, or in SLURM    launch.supervise: launch.hosts.fleet examines the hosts -> ranks

Rule: what can be refused is refused here, before any rank starts, with every problem at once. The
recipe is composed here, once: the ranks of every attempt and of every host get its text, so neither
a file nor a variable that changes later can change the run. Imports no torch. Signals to this
process go to the run, and its exit status is the run's.
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
from base.launcher_variables import of_a_step, of_launchers, unused
from base.lossy_output import make_lossy
from base.parent_death import signal_at_parent_death
from base.run_variables import PLAN
from base.units import GIB
from data.stream.schedule import schedule_of
from data.stream.sources import corpus_problems
from data.stream.stream import open_stream
from launch.budget import Budget
from launch.hosts import network
from launch.hosts.facts import gather, gpus, remove_stale_locks
from launch.hosts.fleet import Fleet
from launch.hosts.judge import Need, ailing, cards_of
from launch.hosts.own_gpus import DEVICES, idle_gpus, num_visible, ranks_of_gpus, refused
from launch.hosts.place import Place, add_place, planned_world, ranks_on_each, read_place
from launch.hosts.preflight import Inspection, wanted_port
from launch.hosts.spares import SpareWatch
from launch.hosts.variables import left_here, passed, watched
from launch.ranks import start
from launch.ranks.recipe_file import recipe_file
from launch.ranks.screen import Screen
from launch.ranks.start import StopSignals
from launch.slurm import requeued
from launch.supervise import Alert, AttemptStart, supervise
from launch.trial import Trial
from parallel.legal import split_group_problem
from plan.choose import is_auto, prediction, with_choices
from recipes.compose import compose_command
from recipes.composed_file import Composed
from recipes.schema import Recipe
from record.alerts import AlertSender
from record.attempts import Attempt, Progress
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


def main(arguments: list[str]) -> int:
    """Run `python -m commands.pretrain --nproc N -- recipe=NAME ...`; returns the exit status."""
    options = parse(arguments)
    keep_to_owner()
    allow_open_files()
    try:
        place, given = read_place(options), arguments_of(options)
        per_host = ranks_on_each(options, place)
        composed, world, choice = planned(given, planned_world(options))
        if options.check:
            check(composed.recipe, world)
            return 0
        predicted, lines = prediction(composed.recipe, world)
        if predicted:
            log(lines[0])
        plan = {"predicted": predicted} | ({} if predicted else {"why": lines})

        def record(choice: Mapping[str, Any] | None) -> None:
            os.environ[PLAN] = json.dumps({**plan, "choice": choice})  # for the ranks

        record(choice)
        chosen = [text for text in given if not is_auto(text)]
        trial = Trial(composed, choice, chosen, compose_checked, record)
        if options.with_parent or "MAKELEVEL" in os.environ:
            end_with_parent()
            hang_up_with_parent()
        report_left_over(options.slurm)
        if place is None:
            return start_here(trial, per_host, options.once)
        status = start_across(trial, place, per_host, options.once)
        return requeued(status, os.environ) if options.slurm else status
    except UserError as error:
        return refuse(error)
    except PermissionError as error:
        what = f"{error.filename}: {error.strerror}"
        advice = "have its owner change that, or start from a copy of yours"
        return refuse(UserError(f"{what}; {advice}"))
    except OSError as error:  # a file system that went away, a folder in place of a file
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except AskedEarly as early:  # a signal while it checks, or builds a corpus
        print(EARLY, end="", file=sys.stderr)
        return early.ending.status


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; a variable of make that was not given comes as an empty text."""
    parser = Parser(prog="python -m commands.pretrain", description=__doc__)
    add_place(parser)
    parser.add_argument("--check", action="store_true", help="refuse what would be, start nothing")
    parser.add_argument("--once", action="store_true", help="never start again after a failure")
    parser.add_argument("--with-parent", action="store_true", help="end when who started it ends")
    add_overrides(parser, "*", "recipe=NAME and overrides")
    return parser.parse_args(arguments)


def start_here(trial: Trial, ranks: int | None, once: bool) -> int:
    """Check the recipe and start ranks of this machine; returns the exit status.

    Without a number of `ranks` all GPUs get one, as far as the recipe can use them.
    """
    recipe = trial.composed.recipe
    is_given, ranks = ranks is not None, ranks or ranks_of_gpus(recipe) or 1
    port = wanted_port(os.environ) if ranks > 1 else None
    if port is not None and not network.is_free(port):
        raise UserError(f"MASTER_PORT={port} is busy; unset it to have a free one chosen")
    # One rank, too, has a gloo group, and NCCL looks for its interface.
    has_gpus = "NCCL_SOCKET_IFNAME" in os.environ and bool(gpus().get("cards"))
    if wrong := network.missing_interfaces(os.environ, has_gpus):
        raise UserError(*(f"{line}; unset it" for line in wrong))
    check(recipe, ranks)
    for note in remove_stale_locks(os.environ):
        print(note, file=sys.stderr)
    supervisor_log = SupervisorLog(ROOT / "runs" / recipe.run)
    forget(supervisor_log.folder)  # requests to an attempt that is over
    run = RunHere(recipe, trial, ranks, port, is_given)
    facts = functools.partial(host_facts, os.environ)
    with start.catch_signals() as stop_signals, alerts_of(recipe, supervisor_log) as alert:
        return keep_alive(run, recipe, supervisor_log, once, stop_signals, alert, facts)


@dataclass(frozen=True)
class RunHere:
    """A run whose ranks are all on this machine."""

    recipe: Recipe
    trial: Trial  # the recipe as text, for the ranks of every attempt
    ranks: int
    port: int | None
    is_given: bool  # the number of ranks

    def prepare(self, attempt: Attempt | None) -> AttemptStart:
        """Examine the GPUs, as the doctor does on other hosts. Raises UserError."""
        if self.recipe.cluster.device != "cpu":
            found = gpus()
            if "problem" in found:
                print(f"warning: GPUs: {found['problem']}", file=sys.stderr)
            cards = found.get("cards", [])
            if problems := ailing(cards, self.ranks, os.environ):
                raise UserError(*problems)
            if attempt is None:
                self.report_idle(num_visible(cards, os.environ.get(DEVICES)))
        return AttemptStart(self.ranks, self.live)

    def report_idle(self, gpus: int) -> None:
        """Print how many of the GPUs stay idle, and why."""
        why = None if self.is_given else refused(self.recipe, gpus)
        for line in idle_gpus(gpus, self.ranks, why=why):
            log(line)

    def live(
        self, screen: Screen, stop_signals: StopSignals, variables: dict[str, str], has_begun: bool
    ) -> Attempt:
        """One attempt of all ranks."""
        with recipe_file(self.trial.text) as composed:
            arguments = [str(ROOT / "pretrain.py"), resume_of(self.recipe, has_begun), composed]
            return start.live_here(
                arguments, self.ranks, ROOT, ROOT / "runs" / self.recipe.run, self.port,
                screen, stop_signals, variables, self.recipe.watch,
            )  # fmt: skip


def start_across(trial: Trial, place: Place, per_host: int, once: bool) -> int:
    """Check the recipe, then the hosts, and start ranks on them; returns the exit status."""
    recipe = trial.composed.recipe
    checkpoint_gib = check(recipe, per_host * len(place.cluster.hosts))
    if problem := split_group_problem(recipe, per_host, "NPROC"):
        raise UserError(problem)
    environment = passed(os.environ, place.named)
    report_variables(place, environment)
    inspection = Inspection(
        need=Need(per_host, recipe.cluster.device, checkpoint_gib),
        environment=environment,
        folders=[source.corpus for source in recipe.data.sources.values()],
        port=wanted_port(os.environ),
    )
    job = os.environ.get("SLURM_JOB_ID", "") if place.cluster.via == "srun" else ""
    supervisor_log = SupervisorLog(ROOT / "runs" / recipe.run, job)
    forget(supervisor_log.folder)
    with start.catch_signals() as stop_signals, alerts_of(recipe, supervisor_log) as alert:
        fleet = Fleet(
            place, inspection, replace(recipe.restart, attempts=0) if once else recipe.restart,
            supervisor_log, lambda hosts: check(recipe, per_host * hosts, is_running=True),
            alert=alert,
        )  # fmt: skip
        run = RunAcross(recipe, trial, per_host, fleet)
        # Ranks of a host that was cut off end by themselves before it counts as lost; their claim
        # on the run may take a little longer.
        busy_s = 2 * recipe.cluster.lost_s
        facts = lambda: fleet.facts  # noqa: E731
        with SpareWatch(fleet):
            return keep_alive(run, recipe, supervisor_log, once, stop_signals, alert, facts, busy_s)


@dataclass(frozen=True)
class RunAcross:
    """A run with `per_host` ranks on each host of a fleet."""

    recipe: Recipe
    trial: Trial  # the recipe as text, for the ranks of every attempt
    per_host: int
    fleet: Fleet

    def prepare(self, attempt: Attempt | None) -> AttemptStart:
        """Find hosts that are fit. Raises UserError."""
        ends = attempt.ends if attempt else ()
        self.fleet.prepare(attempt, {end.host for end in ends if end.is_lost})
        if attempt is None and self.recipe.cluster.device != "cpu":
            for host, facts in self.fleet.facts.items():
                gpus = len(cards_of(facts))
                for line in idle_gpus(gpus, self.per_host, f"{host}: "):
                    log(line)
        return AttemptStart(self.per_host * len(self.fleet.cluster.hosts), self.live)

    def live(
        self, screen: Screen, stop_signals: StopSignals, variables: dict[str, str], has_begun: bool
    ) -> Attempt:
        """One attempt of all ranks."""
        recipe, fleet = self.recipe, self.fleet
        order = start.order_of(
            fleet.plan,
            ["pretrain.py", resume_of(recipe, has_begun)],
            self.per_host,
            {**fleet.inspection.environment, PLAN: os.environ[PLAN], **variables},
            f"runs/{recipe.run}",
            recipe.cluster.lost_s,
            recipe.watch,
            self.trial.text,
        )
        return start.live_across(fleet.cluster, order, screen, stop_signals)


def keep_alive(
    run: RunHere | RunAcross,
    recipe: Recipe,
    supervisor_log: SupervisorLog,
    once: bool,
    stop_signals: StopSignals,
    alert: Alert,
    facts: Callable[[], Mapping[str, Any]],
    busy_s: float = 0.0,
) -> int:
    """Start attempts of `run` until it ends; with `once` only one. `facts()` are those of hosts."""
    is_anew = recipe.resume == "fresh" and not supervisor_log.has_begun()
    before = Progress() if is_anew else supervisor_log.progress()
    return supervise(
        run.prepare,
        supervisor_log,
        Budget(0 if once else recipe.restart.attempts, before, busy_s, run.trial.shrink),
        stop_signals,
        lambda why: keep_bundle(supervisor_log, why, facts(), os.environ),
        0.0 if once else recipe.restart.wait_s,
        alert,
    )


def resume_of(recipe: Recipe, has_begun: bool) -> str:
    """The argument that says where an attempt goes on.

    `resume=fresh` sets a run aside and is an instruction of one start: later attempts go on.
    """
    return f"resume={'auto' if has_begun else recipe.resume}"


def host_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """The doctor's facts of this machine, by its name."""
    return {socket.gethostname(): gather(ROOT, 0, {}, environ)}


def report_variables(place: Place, environment: Mapping[str, str]) -> None:
    """Print which variables the ranks on other hosts get, and warn of those they do not get."""
    names = " ".join(sorted(environment)) or "none"
    log(f"variables that go along: {names} (PASS= adds others)")
    if place.cluster.via != "srun":  # which takes all variables along
        for line in left_here(os.environ, place.named):
            log(f"warning: {line}")


@contextlib.contextmanager
def alerts_of(recipe: Recipe, supervisor_log: SupervisorLog) -> Iterator[Alert]:
    """Alerts of the launcher: ranks that are gone can send none."""
    alerts = AlertSender(recipe.run, recipe.alerts, supervisor_log.event, log)
    try:
        yield lambda kind, text: alerts.pass_on(kind, f"{recipe.run}: {text}")
    finally:
        alerts.close()


def keep_bundle(
    supervisor_log: SupervisorLog, why: str, hosts: Mapping[str, Any], environ: Mapping[str, str]
) -> Path | None:
    """Write a bundle of a run that is given up, and put the end on record.

    `hosts` are facts by host; variables are chosen by the allow-list of launch.hosts.variables.
    None where the run has no folder, or the disk is full.
    """
    variables = watched(environ).items()
    known = {
        "WHY.txt": supervisor_log.explanation(why),
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


def report_left_over(is_slurm: bool) -> None:
    """Warn of variables of another launcher: this one was asked for by name, and decides."""
    names = of_launchers(os.environ) + ([] if is_slurm else of_a_step(os.environ))
    if names:
        log(f"warning: {unused(names)}")


def log(line: str) -> None:
    """Print a line of the launcher."""
    print(line, flush=True)


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


def compose_checked(arguments: list[str]) -> Composed:
    """The composed recipe of a command line. Raises UserError with every problem."""
    return compose_command(arguments, ds_problems, lambda data: corpus_problems(data, ROOT), [])


def planned(arguments: list[str], world: int | None) -> tuple[Composed, int, dict[str, Any] | None]:
    """(recipe whose `auto` knobs the plan has chosen, ranks of the run, the choice).

    Without a number of ranks all GPUs of this machine count. The choice is reported. Raises
    UserError.
    """
    composed = compose_checked([text for text in arguments if not is_auto(text)])
    ranks = world or ranks_of_gpus(composed.recipe) or 1
    chosen, lines, choice = with_choices(arguments, ranks, ROOT / "runs")
    for line in lines:
        log(line)
    return compose_checked(chosen) if lines else composed, ranks, choice


def check(recipe: Recipe, ranks: int, is_running: bool = False) -> float:
    """Raise UserError unless the run can start; builds the embedded corpora that it names.

    Returns the GiB of two of its checkpoints.
    """
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
    return 2 * recipe.optim.checkpoint_bytes * resolved.num_parameters / GIB


if __name__ == "__main__":
    make_lossy()
    REQUESTS.listen()
    sys.exit(main(sys.argv[1:]))
