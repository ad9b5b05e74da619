"""`make replay`: trains a suspicious step again, twice, and compares the results by bits.

    python -m commands.replay RUN --step N [--nproc N | --world N] [--hostfile FILE]

    whole checkpoint before STEP (linked), or the start of the run where none was saved before it
    -> runs/RUN.replay-STEP.1, .2: the steps up to STEP, trained again with the recorded recipe and
    ranks -> losses and norms compared with metrics.jsonl

Rule: RUN itself is only read; one event is added to its record. If both replays equal the record to
the bit, state and batch explain the step, and neither chance nor hardware does. If the replays
differ from each other, or agree with each other but not with a record made under the same
conditions, the hardware is suspect.

Exit status: 0 reproducible, or no more different than another layout may be; 1 suspect.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.command_line import Parser, count_of, refuse
from base.errors import UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED
from base.paths import ROOT
from base.table import table
from base.values import counted
from checkpoint.format.manifest import committed
from checkpoint.lineage import lineage, read, segments
from checkpoint.load.choosing import verify
from data.stream.ledger import read_ledger
from launch.hosts.place import add_place, place_variables, planned_world, start_options
from recipes.check import to_recipe
from recipes.compose import recipe_yaml
from record import environment, history
from record.records import METRICS, read_events, read_metrics, record_event

RUNS = ROOT / "runs"
TRIES = (1, 2)
# Relative difference that another order of the same sums can make in fp32: losses 1e-6, norms 1e-5.
ROUNDING = 1e-5
# A replay changes nothing outside its folder and sends no alerts. The health policy skips steps as
# it did, but neither rewinds the run nor stops it before STEP.
QUIET = {
    "eval_every": 0, "eval_tokens": 0, "stop_after": None, "resume": "auto", "allow": [],
    "init_from": None,
}  # fmt: skip
QUIET_GROUPS = {
    "checkpoint": {"interval": 0, "at_end": False},
    "log": {"tensorboard": False, "wandb": None, "profile": None, "communication": False},
    "health": {"rewind": 0},
    "alerts": {"command": []},
    "restart": {"attempts": 0},
}
# Fields of environment.json on which the last bits of a result may depend.
PLACE = ("python", "torch", "cuda", "packages", "machine", "processor", "cpu", "threads", "gpu")


@dataclass(frozen=True)
class ComparedStep:
    """The compared values of one step; a number that is not finite is None."""

    step: int
    loss: float | None
    grad_norm: float | None
    skipped: bool
    batch: str | None  # hash of the global batch


@dataclass(frozen=True)
class Conclusion:
    """`kind` is reproducible, hardware-suspect, differs-by-layout or another-batch."""

    kind: str
    text: str


def main(arguments: list[str]) -> int:
    """Entry of the command above; returns the exit status."""
    parser = Parser(prog="make replay", description=__doc__)
    parser.add_argument("run", help="a run under runs/")
    parser.add_argument("--step", default="", help="the step to be repeated")
    parser.add_argument("--segment", default="", help="default: the current one")
    add_place(parser)
    options = parser.parse_args(arguments)
    try:
        request = ReplayRequest(options)
        tries = [replayed(request, number) for number in TRIES]
    except UserError as error:
        return refuse(error)
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    seen, places = [steps for steps, _ in tries], [place for _, place in tries]
    found = conclude(request.recorded, *seen, request.is_same_layout and places[0] == request.place)
    print(shown(request, seen))
    print(f"{found.kind}: {found.text}")
    attempts = [event["attempt"] for event in read_events(request.folder)]
    record_event(
        request.folder, "replayed", attempt=max(attempts, default=1), step=request.step,
        conclusion=found.kind, text=found.text,
    )  # fmt: skip
    for number in TRIES:
        shutil.rmtree(request.folder_of(number))
    return FINISHED if found.kind in ("reproducible", "differs-by-layout") else FAILED


class ReplayRequest:
    """The step to repeat, and all that the record knows of it. Raises UserError."""

    def __init__(self, options: argparse.Namespace):
        self.folder = RUNS / options.run
        if not (self.folder / METRICS).is_file():
            raise UserError(f"RUN={options.run}: there is no run in {self.folder}")
        self.step = count_of("STEP", options.step)
        self.lines = read(self.folder)
        opened = len(segments(self.lines))
        self.segment = (
            count_of("SEGMENT", options.segment) if options.segment else max(opened - 1, 0)
        )
        if self.segment >= max(opened, 1):
            raise UserError(f"SEGMENT={self.segment}: the run has the segments 0 to {opened - 1}")
        self.lineage = lineage(self.lines, self.segment if opened else None)
        trained = self.lineage.own(read_metrics(self.folder))
        if all(line["step"] != self.step for line in trained):
            raise UserError(f"STEP={self.step}: {self.folder.name} has no record of this step")
        spans = self.lineage.spans
        self.holder = next(s.segment for s in spans if s.holds(s.segment, self.step))
        self.before, self.checkpoint = self.checkpoint_before()
        metrics = [line for line in trained if self.before < line["step"] <= self.step]
        if len(metrics) != self.step - self.before:
            raise UserError(
                f"STEP={self.step}: {self.folder.name} has no record of all steps since step"
                f" {self.before}"
            )
        self.recorded = compared(metrics, self.lineage.own(read_ledger(self.folder / "ledger")))
        began, is_one = self.start_of_step()
        self.recipe, self.place = began["recipe"], place(began)
        self.world = planned_world(options) or world_of(began)
        self.start = start_options(place_variables(options), self.world)
        self.is_same_layout = is_one and self.world == world_of(began)
        taken = [self.folder_of(n) for n in TRIES if os.path.lexists(self.folder_of(n))]
        if taken:
            raise UserError(f"{taken[0]} is left from another replay; remove it")

    def checkpoint_before(self) -> tuple[int, Path | None]:
        """The newest whole checkpoint from before the step; (0, None) = the start of the run.

        The start is chosen only where nothing was saved before the step. Raises UserError.
        """
        found = committed(self.folder / "checkpoints", self.lineage)
        damaged = []
        for step, path in reversed([one for one in found if one[0] < self.step]):
            problems = verify(path, "full")
            if not problems:
                return step, path
            damaged.append(f"{path.name} is damaged: {problems[0]}")
            print(f"warning: {damaged[-1]}; an older one is looked for", file=sys.stderr)
        saved = self.lineage.own(read_events(self.folder, "saved"))
        if not any(event["step"] < self.step for event in saved):
            return 0, None
        there = ", ".join(str(step) for step, _ in found) or "none"
        raise UserError(
            f"STEP={self.step}: {self.folder.name} has no whole checkpoint from before it (it has:"
            f" {there}); keep more of them (checkpoint.interval, keep, keep_every)",
            *damaged,
        )

    def start_of_step(self) -> tuple[dict[str, Any], bool]:
        """The recorded conditions of the start that trained the step.

        Also returns whether this start trained all the steps since the checkpoint. Raises UserError
        where the steps cannot be repeated in one go.
        """
        began = [
            entry
            for entry in environment.read(self.folder)
            if entry["segment"] == self.holder and entry["after_step"] < self.step
        ]
        if not began:
            raise UserError(f"{self.folder}/{environment.FILE} does not say how this step was made")
        late = [
            f"{line['key']} changed at step {line['first_step']}"
            for line in self.lines
            if line.get("kind") == "override" and line["segment"] == self.holder
            and self.before + 1 < line["first_step"] <= self.step
        ]  # fmt: skip
        if late:
            raise UserError(
                f"STEP={self.step}: {', '.join(late)}, after the checkpoint of step {self.before}:"
                " it cannot be repeated in one go"
            )
        return began[-1], all(entry["after_step"] <= self.before for entry in began)

    def folder_of(self, number: int) -> Path:
        """The folder of one try."""
        return RUNS / f"{self.folder.name}.replay-{self.step}.{number}"


def replayed(request: ReplayRequest, number: int) -> tuple[list[ComparedStep], dict[str, Any]]:
    """Train the steps again; returns their results, and machine and software of the replay.

    Raises UserError where the replay did not reach the step.
    """
    folder = request.folder_of(number)
    prepare(request, folder)
    steps = f"steps {request.before + 1} to {request.step}"
    print(f"try {number}: {steps} on {counted(request.world, 'rank')}", flush=True)
    command = [
        sys.executable, "-m", "commands.pretrain", "--with-parent",
        *request.start, "--",
        f"recipe=runs/{folder.name}/recipe.yaml", f"run={folder.name}",
        f"stop_after={request.step}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    metrics = read_metrics(folder)
    # The policy may stop it, but only after the last of the steps.
    if done.returncode not in (FINISHED, DO_NOT_RETRY) or metrics[-1:] == []:
        raise UserError(
            f"the replay in {folder} ended with status {done.returncode}:"
            f" {' '.join(done.stdout.splitlines()[-3:])}"
        )
    steps = compared(metrics, read_ledger(folder / "ledger"))
    if [one.step for one in steps] != [one.step for one in request.recorded]:
        raise UserError(
            f"the replay in {folder} did not reach step {request.step}: {done.stdout[-500:]}"
        )
    return steps, place(environment.read(folder)[-1])


def prepare(request: ReplayRequest, folder: Path) -> None:
    """Make a run that stands at the checkpoint, in the segment of the step; files are linked."""
    recipe = request.recipe | QUIET | {"run": folder.name}
    recipe |= {group: recipe[group] | values for group, values in QUIET_GROUPS.items()}
    folder.mkdir(parents=True)
    if request.checkpoint is None:
        recipe["init_from"] = request.recipe["init_from"]
    else:
        checkpoint = folder / "checkpoints" / request.checkpoint.name
        checkpoint.mkdir(parents=True)
        for path in request.checkpoint.iterdir():
            os.link(path, checkpoint / path.name)
        history.append(folder, {"kind": "linked", "run": request.recipe["run"]})
    (folder / "recipe.yaml").write_text(recipe_yaml(to_recipe(recipe, {}, [])[0]), "utf-8")
    for line in request.lines:
        if line.get("kind") == "segment" and line["segment"] > request.holder:
            break
        history.append(folder, line)


def compared(
    metrics: Sequence[dict[str, Any]], ledger: Iterable[dict[str, Any]]
) -> list[ComparedStep]:
    """The compared values of each step, from lines of metrics.jsonl and of the ledger."""
    batches = {line["step"]: line["batch_hash"] for line in ledger}
    return [
        ComparedStep(
            line["step"], line["loss"], line["grad_norm"], line["skipped"],
            batches.get(line["step"]),
        )
        for line in metrics
    ]  # fmt: skip


def place(began: dict[str, Any]) -> dict[str, Any]:
    """Machine and software of a start, as far as results may depend on them."""
    return {name: began.get(name) for name in PLACE}


def world_of(began: dict[str, Any]) -> int:
    """The number of ranks of a start."""
    return began["layout"]["world"]


def conclude(
    recorded: Sequence[ComparedStep],
    first: Sequence[ComparedStep],
    second: Sequence[ComparedStep],
    is_same_place: bool,
) -> Conclusion:
    """The conclusion from two replays and the record. Pure.

    `is_same_place` = the record was made with the same layout, machine and software.
    """
    parted = first_difference(first, second)
    if parted is not None:
        return Conclusion(
            "hardware-suspect",
            f"two replays on this machine differ from step {parted} on: a rank computes wrongly, or"
            " a kernel is not deterministic; try other nodes",
        )
    wrong = [a.step for a, b in zip(recorded, first, strict=True) if a.batch not in (None, b.batch)]
    if wrong:
        return Conclusion(
            "another-batch",
            f"the batch of step {wrong[0]} is not the recorded one: the corpus or the recipe's data"
            " changed (make audit)",
        )
    parted = first_difference(recorded, first)
    if parted is None:
        return Conclusion(
            "reproducible",
            "state and batch give the recorded bits twice: they are the cause, not the hardware",
        )
    if is_same_place:
        return Conclusion(
            "hardware-suspect",
            f"two replays agree with each other, but not with the record at step {parted}, which"
            " was made with the same layout and software: the hardware that made the record is"
            " suspect",
        )
    worst = max(distance(a, b) for a, b in zip(recorded, first, strict=True))
    within = "within what" if worst <= ROUNDING else "more than"
    return Conclusion(
        "differs-by-layout",
        f"two replays agree with each other; the record was made with another layout or machine and"
        f" differs from step {parted} on by up to {worst:.1e}, {within} another order of sums can"
        f" change in fp32 ({ROUNDING:g})",
    )


def first_difference(one: Sequence[ComparedStep], other: Sequence[ComparedStep]) -> int | None:
    """The first step with other bits in loss or norm, or another skip; None where all are equal."""
    for a, b in zip(one, other, strict=True):
        if (a.loss, a.grad_norm, a.skipped) != (b.loss, b.grad_norm, b.skipped):
            return a.step
    return None


def distance(one: ComparedStep, other: ComparedStep) -> float:
    """The larger relative difference of loss and norm; infinite where one is not finite."""
    pairs = [(one.loss, other.loss), (one.grad_norm, other.grad_norm)]
    found = [0.0]
    for a, b in pairs:
        if a is None or b is None:
            found.append(0.0 if a is b else math.inf)
        elif a != b:
            found.append(abs(a - b) / max(abs(a), abs(b)))
    return max(found)


def shown(request: ReplayRequest, tries: Sequence[Sequence[ComparedStep]]) -> str:
    """A table of the step: the record and both replays."""
    rows = [["", "loss", "grad norm", "batch"]]
    for name, steps in zip(("recorded", "try 1", "try 2"), (request.recorded, *tries), strict=True):
        last = steps[-1]
        numbers = ["not finite" if n is None else repr(n) for n in (last.loss, last.grad_norm)]
        rows.append([name, *numbers, last.batch or "not recorded"])
    return table(rows, indent="")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
