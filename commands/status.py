"""`make status`: what a run is doing now, or how it ended and which command goes on with it.

Rule: nothing is guessed. The run's lock says whether it is alive, the heartbeat of rank 0 says what
it does, and all numbers come from its record. Imports no torch. Units: seconds.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.command_line import Parser, carry_out
from base.exits import FINISHED
from base.units import duration
from base.values import counted
from checkpoint.format.manifest import NAME, committed
from checkpoint.lineage import run_folder
from record.attempts import ENDINGS, FAILURES, is_end, unix_s
from record.event_lines import line_of
from record.presence import is_living, launcher, shown
from record.records import METRICS, METRICS_HAVE, last_lines, notes, read_events
from record.requests import read_request
from runtime.log.console import number

RECENT = 20  # newest steps from which the speed is computed
ROUTINE = (
    "began", "attempt", "first_step", "resumed", "saved", "finished", "stopped", "preempted",
    "interrupted", "interval", "gave_up",
)  # fmt: skip
SHOWN_ALARMS = 3


def main(arguments: list[str]) -> int:
    """Entry of `make status`; returns the exit status."""
    parser = Parser(prog="make status", description=__doc__)
    parser.add_argument("run", help="name of a run under runs/, or its folder")
    options = parser.parse_args(arguments)
    return carry_out(lambda: show(run_folder(options.run, Path())))


def show(folder: Path) -> int:
    """Print the status of a run; returns the exit status."""
    print("\n".join([*describe(state_of(folder)), *notes(folder)]))
    return FINISHED


@dataclass(frozen=True)
class State:
    """A run as its folder shows it at `now_s`."""

    folder: Path
    is_running: bool
    seen: Mapping[str, Any]  # the last heartbeat of rank 0
    events: Sequence[Mapping[str, Any]]
    lines: Sequence[Mapping[str, Any]]
    line_s: float | None  # time of the newest line
    saved: tuple[int, float] | None  # newest checkpoint: step, time
    now_s: float
    launcher: str | None = None  # the process that starts it again


def state_of(folder: Path) -> State:
    """Read the state of a run from its folder."""
    metrics = folder / METRICS
    saved = committed(folder / "checkpoints")
    newest = (saved[-1][0], (saved[-1][1] / NAME).stat().st_mtime) if saved else None
    return State(
        folder,
        is_living(folder),
        shown(folder),
        read_events(folder),
        last_lines(metrics, RECENT, METRICS_HAVE),
        metrics.stat().st_mtime if metrics.exists() else None,
        newest,
        time.time(),
        launcher(folder),
    )


def describe(state: State) -> list[str]:
    """The status as lines of text."""
    return [*(living(state) if state.is_running else ended(state)), *record(state), *alarms(state)]


def living(state: State) -> list[str]:
    """Lines about a run that is alive."""
    seen, attempts = state.seen, number_of_attempts(state)
    doing = "ranks are starting"
    if seen:
        ago = duration(max(0.0, state.now_s - seen["unix_s"]))
        doing = f"phase {seen['phase']}"
        doing += f", step {seen['step']}{of_steps(state)}" if seen["step"] else ""
        doing += f" ({ago} ago; process {seen['pid']} on {seen['host']})"
    lines = [f"{state.folder.name} runs, attempt {attempts}: {doing}"]
    request = read_request(state.folder)
    if request is not None:
        kind = "without a save" if request.get("now") else "with a save"
        lines.append(f"asked to stop after its step, {kind} (by {request.get('who', '?')})")
    return lines


def ended(state: State) -> list[str]:
    """Lines about a run that is not alive: how it ended, and the next command."""
    name, ends = state.folder.name, [event for event in state.events if is_end(event)]
    if not state.events:
        return [f"{name} does not run and has no record of an attempt", *next_command(state)]
    last = ends[-1] if ends else state.events[-1]
    how = line_of(last) if ends and not is_open(state) else None
    if state.events[-1]["kind"] in ENDINGS:
        last = state.events[-1]
        how = line_of(last)
    # Where no event records the end, the newest sign of life counts.
    signs = [unix_s(state.events[-1]), state.line_s or 0.0, state.seen.get("unix_s", 0.0)]
    ago = duration(max(0.0, state.now_s - (unix_s(last) if how else max(signs))))
    how = how or "its last attempt left no event about its end"
    lines = [f"{name} does not run; it ended {ago} ago", f"  {how}"]
    reasons = [event for event in state.events if event.get("reason") and not is_end(event)]
    if reasons and reasons[-1]["attempt"] == last["attempt"]:
        lines.append(f"  reason: {reasons[-1]['reason']}")
    return [*lines, *next_command(state)]


def is_open(state: State) -> bool:
    """Whether the newest attempt has no line of its end."""
    return state.events[-1]["attempt"] not in {e["attempt"] for e in state.events if is_end(e)}


def next_command(state: State) -> list[str]:
    """The next command for a run that is not alive."""
    name = state.folder.name
    if state.launcher:
        return [f"  next: nothing to do: its launcher ({state.launcher}) starts it"]
    kinds = [event["kind"] for event in state.events if event["kind"] in ROUTINE]
    # The last attempt may have been killed on its way out.
    total = total_steps(state.folder)
    is_saved = bool(state.saved and total and state.saved[0] >= total)
    if is_saved or "finished" in kinds[-2:]:
        return [f"  next: nothing is left to train; make sample RUN={name}, make export RUN={name}"]
    what = "the same command again"
    if "gave_up" in kinds[-2:]:
        what = f"repair what the reason names (docs/troubleshooting.md); then {what}"
    recipe = recipe_of(state.folder)
    folder = state.folder
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    words = f"make pretrain RECIPE={folder}/recipe.yaml"
    world = world_of(state.folder)
    words += f" NPROC={world}" if world and world > 1 else ""
    # The recipe alone, with resume=fresh in it, would move this folder aside.
    words += " OVERRIDES=resume=auto" if re.search(r"^resume: fresh$", recipe, re.M) else ""
    where = f"step {state.saved[0]}" if state.saved else "the start: nothing was saved"
    return [f"  next: {what} goes on from {where}; on this host: {words}"]


def record(state: State) -> list[str]:
    """The newest numbers of the record."""
    lines = []
    if state.lines:
        last = state.lines[-1]
        recent = [line for line in state.lines if not line["first_of_attempt"]]
        fields = [
            f"step {last['step']}{of_steps(state)}",
            f"loss {number(last['loss'], '.4f')}",
            f"grad norm {number(last['grad_norm'], '.3f')}",
        ]
        speeds = [line["tokens_per_s"] for line in recent if line["tokens_per_s"]]
        if speeds:
            step_s = statistics.median(line["step_s"] for line in recent)
            fields += [f"{statistics.median(speeds):,.0f} tokens/s", f"{step_s:.2f} s/step"]
            total = total_steps(state.folder)
            if state.is_running and total and total > last["step"]:
                fields.append(f"{duration((total - last['step']) * step_s)} left")
        lines.append("  " + "  ".join(fields))
        lines[0] += f"  (newest line {duration(max(0.0, state.now_s - state.line_s))} old)"
    if state.saved:
        step, at = state.saved
        behind = f", {counted(state.lines[-1]['step'] - step, 'step')} back" if state.lines else ""
        age = duration(max(0.0, state.now_s - at))
        lines.append(f"  newest checkpoint: step {step}, {age} old{behind}")
    else:
        lines.append("  no checkpoint yet")
    failures = sum(event["cause"] in FAILURES for event in state.events if is_end(event))
    lines.append(f"  attempts: {number_of_attempts(state)}, failures: {failures}")
    return lines


def alarms(state: State) -> list[str]:
    """The newest events that are no routine, without those that are only for the record."""
    odd = [e for e in state.events if e["kind"] not in ROUTINE and not e.get("is_quiet")]
    if not odd:
        return ["  alarms: none"]
    return [
        f"  alarms: {len(odd)}, the newest:",
        *(f"    {line_of(e)}" for e in odd[-SHOWN_ALARMS:]),
    ]


def number_of_attempts(state: State) -> int:
    """Number of attempts so far, with the one that goes on."""
    return max((event["attempt"] for event in state.events), default=0)


def of_steps(state: State) -> str:
    """` of 200`, where the recipe gives the number of steps."""
    total = total_steps(state.folder)
    return f" of {total}" if total else ""


def total_steps(folder: Path) -> int | None:
    """Number of steps in the run's recipe; None where the recipe counts tokens."""
    found = re.search(r"^steps: (\d+)$", recipe_of(folder), re.M)
    return int(found[1]) if found else None


def recipe_of(folder: Path) -> str:
    """The text of the run's recipe, read without a parser, because it may be damaged."""
    return (folder / "recipe.yaml").read_text(errors="replace")


def world_of(folder: Path) -> int | None:
    """Number of ranks of the newest attempt; None where it is not known."""
    try:
        return len(json.loads((folder / "layout.json").read_text())["places"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
