"""`make status`: what a run is doing now, or how it ended and which command goes on with it.

Without RUN it shows the run that was active last. Imports no torch. Units: seconds.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

from base.command_line import Parser, carry_out
from base.errors import UserError
from base.exits import FINISHED
from base.table import table
from base.units import duration
from base.values import counted
from checkpoint.lineage import MARK, run_folder
from record.attempts import ENDINGS, FAILURES, is_end, unix_s
from record.event_lines import failure_text, line_of
from record.predictions import comparison, read_plan
from record.records import notes
from record.requests import read_request
from record.run_status import RunStatus, recipe_text, status_of, world_of
from runtime.log.console import number

ROUTINE = (
    "began", "attempt", "first_step", "resumed", "saved", "finished", "stopped", "preempted",
    "interrupted", "interval", "gave_up", "failed", "prediction",
)  # fmt: skip
SHOWN_ALARMS = 3


def main(arguments: list[str]) -> int:
    """Entry of `make status`; returns the exit status."""
    parser = Parser(prog="make status", description=__doc__)
    parser.add_argument("run", nargs="?", default="", help="name of a run, or its folder")
    options = parser.parse_args(arguments)
    return carry_out(lambda: show(chosen(options.run)))


def chosen(name: str) -> Path:
    """The run called `name`, or the one that was active last. Raises UserError."""
    if name:
        return run_folder(name, Path())
    runs = [path.parent for path in Path("runs").glob(f"*/{MARK}") if path.is_file()]
    if not runs:
        raise UserError("there is no run under runs/ yet; make pretrain starts one")
    newest = max(runs, key=last_change_s)
    if len(runs) > 1:
        print(f"the newest of {len(runs)} runs (make runs lists them):")
    return newest.resolve()


def last_change_s(folder: Path) -> float:
    """The time of the last change of a run's record, from its files alone."""
    files = [folder / name for name in (MARK, "metrics.jsonl", "events.jsonl", "history.jsonl")]
    return max(path.stat().st_mtime for path in files if path.exists())


def show(folder: Path) -> int:
    """Print the status of a run; returns the exit status."""
    print("\n".join([*describe(status_of(folder)), *notes(folder)]))
    return FINISHED


def describe(state: RunStatus) -> list[str]:
    """The status as lines of text."""
    doing = alive(state) if state.is_running else ended(state)
    return [*doing, *numbers(state), *predicted(state), *checkpoints(state), *attempts(state),
            *alarms(state)]  # fmt: skip


def alive(state: RunStatus) -> list[str]:
    """Lines about a run that is alive."""
    seen, newest = state.seen, max((event["attempt"] for event in state.events), default=1)
    doing = "ranks are starting"
    if seen:
        ago = duration(max(0.0, state.now_s - seen["unix_s"]))
        doing = f"phase {seen['phase']}"
        doing += f", step {seen['step']}{of_steps(state)}" if seen["step"] else ""
        doing += f" ({ago} ago; process {seen['pid']} on {seen['host']})"
    lines = [f"{state.folder.name} runs, attempt {newest}: {doing}"]
    request = read_request(state.folder)
    if request is not None:
        kind = "without a save" if request.get("now") else "with a save"
        lines.append(f"asked to stop after its step, {kind} (by {request.get('who', '?')})")
    return lines


def ended(state: RunStatus) -> list[str]:
    """Lines about a run that is not alive: how it ended, and the next command."""
    name, ends = state.folder.name, [event for event in state.events if is_end(event)]
    if not state.events:
        head = f"{name} does not run and has no record of an attempt"
        return [head, *opened(state), *next_command(state)]
    last = ends[-1] if ends else state.events[-1]
    is_open = state.events[-1]["attempt"] not in {event["attempt"] for event in ends}
    how = line_of(last) if ends and not is_open else None
    if state.events[-1]["kind"] in ENDINGS:
        last = state.events[-1]
        how = line_of(last)
    # Where no event records the end, the newest sign of life counts.
    ago = duration(max(0.0, state.now_s - (unix_s(last) if how else state.active_s)))
    how = how or "its last attempt left no event about its end"
    lines = [f"{name} does not run; it ended {ago} ago", f"  {how}"]
    reasons = [event for event in state.events if event.get("reason") and not is_end(event)]
    if reasons and reasons[-1]["attempt"] == last["attempt"] and reasons[-1] is not last:
        lines.append(f"  reason: {reasons[-1]['reason']}")
    return [*lines, *opened(state), *next_command(state)]


def opened(state: RunStatus) -> list[str]:
    """A line about a rewind or a branch after which no attempt has begun yet."""
    if not state.is_rewound:
        return []
    parent = state.opened["parent"]
    if "run" in parent:
        return [f"  it is a branch of {parent['run']} from step {parent['step']}"]
    why = f": {state.opened['why']}" if state.opened.get("why") else ""
    return [
        f"  since then it was rewound to step {parent['step']}{why}; it goes on with step"
        f" {state.opened['first_step']}, in segment {state.opened['segment']}"
    ]


def next_command(state: RunStatus) -> list[str]:
    """The next command for a run that is not alive."""
    name, total, last = state.folder.name, state.total_steps, state.last_step
    if state.launcher:
        return [f"  next: nothing to do: its launcher ({state.launcher}) starts it"]
    if state.is_complete:
        return [f"  next: nothing is left to train; make sample RUN={name}, make export RUN={name}"]
    what, overrides = "the same command again", []
    if state.ended_by == "gave_up" and not state.is_rewound:
        what = f"repair what the reason names (docs/troubleshooting.md); then {what}"
    if total and last and last < total and state.saved and state.saved[0] >= last:
        what = f"stop_after={last} is reached, {total} steps are planned; without it the run"
        overrides.append("stop_after=null")
    # The recipe alone, with resume=fresh in it, would move this folder aside.
    if re.search(r"^resume: fresh$", recipe_text(state.folder), re.M):
        overrides.append("resume=auto")
    folder = state.folder
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    command = f"make pretrain RECIPE={folder}/recipe.yaml"
    world = world_of(state.folder)
    command += f" NPROC={world}" if world and world > 1 else ""
    if len(overrides) == 1:
        command += f" OVERRIDES={overrides[0]}"
    elif overrides:
        command += f' OVERRIDES="{" ".join(overrides)}"'
    where = f"step {state.saved[0]}" if state.saved else "the start: nothing was saved"
    return [f"  next: {what} goes on from {where}; on this host: {command}"]


def numbers(state: RunStatus) -> list[str]:
    """The newest numbers of the record."""
    if not state.lines:
        return []
    last = state.lines[-1]
    fields = [
        f"step {last['step']}{of_steps(state)}",
        f"loss {number(last['loss'], '.4f')}",
    ]
    if state.evaluated:
        step, loss = state.evaluated
        at = f" (step {step})" if step != last["step"] else ""
        fields.append(f"val {number(loss, '.4f')}{at}")
    fields.append(f"grad norm {number(last['grad_norm'], '.3f')}")
    speeds = [line["tokens_per_s"] for line in state.recent if line["tokens_per_s"]]
    if speeds:
        fields.append(f"{statistics.median(speeds):,.0f} tokens/s")
        fields.append(f"{state.step_s:.2f} s/step")
        if state.is_running and state.last_step and state.last_step > last["step"]:
            left_s = (state.last_step - last["step"]) * state.step_s
            fields.append(f"{duration(max(1.0, left_s))} left")
    age = f"(newest line {duration(max(0.0, state.now_s - state.line_s))} old)"
    return ["  " + "  ".join([*fields, age])]


def predicted(state: RunStatus) -> list[str]:
    """What the plan predicted, beside what was measured as soon as that is on record."""
    plan = read_plan(state.folder).get("predicted")
    if not plan:
        return []
    known = [event for event in state.events if event["kind"] == "prediction"]
    found = known[-1]["measured"] if known else {}
    mark = "" if plan["is_calibrated"] else " (not calibrated)"
    rows = comparison(plan, found)
    shown = [["", "predicted", "measured", "difference"], *map(list, rows)]
    return [f"  predicted for {plan['gpu']}{mark}", table(shown, indent="    ")]


def checkpoints(state: RunStatus) -> list[str]:
    """The newest checkpoint, and how much training a kill would lose now."""
    is_at_risk = state.is_running or state.launcher is not None
    if state.saved is None:
        risk = f"; a kill now would lose all {counted(state.step, 'step')}"
        return ["  no checkpoint yet" + (risk if is_at_risk and state.step else "")]
    step, at = state.saved
    behind = max(0, state.step - step)
    lines = f"  newest checkpoint: step {step}, {duration(max(0.0, state.now_s - at))} old"
    if not behind:
        return [lines]
    if not is_at_risk:
        return [f"{lines}; {counted(behind, 'step')} after it will be trained again"]
    spent = f", {duration(behind * state.step_s)} of training" if state.step_s else ""
    return [f"{lines}; a kill now would lose {counted(behind, 'step')}{spent}"]


def attempts(state: RunStatus) -> list[str]:
    """Number of attempts and failures, and the reason of the newest failure."""
    failed = [event for event in state.events if is_end(event) and event["cause"] in FAILURES]
    lines = [f"  attempts: {state.num_attempts}, failures: {len(failed)}"]
    if failed and failed[-1].get("why"):
        lines.append(f"  newest failure: {failure_text(failed[-1])}")
    return lines


def alarms(state: RunStatus) -> list[str]:
    """The newest events that are no routine, without those that are only for the record."""
    odd = [e for e in state.events if e["kind"] not in ROUTINE and not e.get("is_quiet")]
    if not odd:
        return ["  alarms: none"]
    return [
        f"  alarms: {len(odd)}, the newest:",
        *(f"    {line_of(e)}" for e in odd[-SHOWN_ALARMS:]),
    ]


def of_steps(state: RunStatus) -> str:
    """` of 200`, where the number of steps is known."""
    return f" of {state.total_steps}" if state.total_steps else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
