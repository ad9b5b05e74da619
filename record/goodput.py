"""Goodput: the wall clock of a run since its first attempt, divided into useful and lost seconds.

    useful     steps whose update is in the weights    redone   steps that were trained again later,
    evaluate   evaluations                                      rewound, or skipped
    stall      training waited for a save or a batch   start    imports, joining, the first step's
    load       a checkpoint was read                            extra time
    detect     from a failure to the end of all ranks  restart  the launcher, between two attempts
    idle       no launcher ran                         other    seconds of no other part

Rule: each second belongs to exactly one part, so that the parts add up to the wall clock. They are
computed from the `attempt` lines and saves in events.jsonl and the steps in metrics.jsonl. A step
that was trained again has no line any more, so the time of a failed attempt for which no step
stands on record is `redone`. Imports no torch. Units: seconds.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from base.units import duration
from base.values import counted
from checkpoint.lineage import lineage_of
from record import forecast
from record.attempts import Attempt, is_end, unix_s
from record.presence import is_living
from record.records import read_events, read_metrics

PARTS = {
    "useful": "steps whose update is in the weights",
    "evaluate": "evaluations",
    "stall": "training waited for a save or a batch",
    "redone": "steps trained again later, rewound, or skipped",
    "start": "imports, joining, the first step's extra time",
    "load": "a checkpoint was read",
    "detect": "from a failure to the end of all ranks",
    "restart": "the launcher, between two attempts",
    "idle": "no launcher ran",
    "other": "seconds of no other part",
}


def attempts_of(
    events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], now_s: float
) -> list[Attempt]:
    """The attempts of a run from its records. `now_s`: until when one without an end has lived."""
    ended = {event["attempt"]: event for event in events if is_end(event)}
    begun = {
        event["attempt"]: event
        for event in events
        if event["kind"] in ("began", "attempt") and not is_end(event)
    }
    trained, stalls, loads = defaultdict(list), defaultdict(list), defaultdict(float)
    for line in lines:
        trained[line["attempt"]].append(line)
    for event in events:
        if event["kind"] == "saved":
            stalls[event["attempt"]].append(event["checkpoint_stall_s"])
        elif event["kind"] == "resumed":
            loads[event["attempt"]] += event["load_s"]
    found = []
    for number in sorted(begun.keys() | ended.keys()):
        end, began, own = ended.get(number), begun.get(number), trained[number]
        if end:
            start_s, stop_s, seconds = end["began_unix_s"], end["ended_unix_s"], end["seconds"]
            from_step, last_step = end.get("from_step"), end.get("last_step")
        else:
            start_s, stop_s = began.get("started_unix_s", unix_s(began)), now_s
            load_s = loads[number]
            start = max(0.0, unix_s(began) - start_s - load_s)
            seconds = {"load": load_s, "start": start}
            from_step = began.get("after_step") or 0
            last_step = from_step + len(own)
        found.append(
            Attempt(
                start_s,
                stop_s,
                cause=end["cause"] if end else None,
                number=number,
                from_step=from_step,
                last_step=last_step,
                seconds=seconds,
                lines=own,
                stalls_s=stalls[number],
            )
        )
    return found


def account(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Seconds of each part, none below 0.

    Their sum is the time from the first begin to the last end, as far as the clocks allow.
    """
    total = dict.fromkeys(PARTS, 0.0)
    usual_s = usual_step_s(attempts)
    attempts = apart(attempts)
    for attempt in attempts:
        for name, seconds in account_attempt(attempt, usual_s).items():
            total[name] += seconds
    for before, attempt in itertools.pairwise(attempts):
        gap_s = max(0.0, attempt.began_unix_s - before.ended_unix_s)
        restart_s = max(0.0, min(gap_s, attempt.seconds.get("restart", 0.0)))
        total["restart"] += restart_s
        total["idle"] += gap_s - restart_s
    return total


def apart(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts, each one ended at the latest where the next one begins.

    Two attempts can overlap because a host that was cut off ran on; the time is then the later
    one's. Where the next one seems to begin before this one did, the clock was set back, and the
    end stays as it is.
    """
    found = [
        replace(attempt, ended_unix_s=min(attempt.ended_unix_s, after.began_unix_s))
        if after.began_unix_s > attempt.began_unix_s
        else attempt
        for attempt, after in itertools.pairwise(attempts)
    ]
    return [*found, *attempts[-1:]]


def account_attempt(attempt: Attempt, usual_s: float) -> dict[str, float]:
    """Seconds of each part of one attempt. `usual_s` = a step that is not the attempt's first."""
    parts = {name: attempt.seconds.get(name, 0.0) for name in ("start", "load", "detect")}
    parts |= dict.fromkeys(("useful", "evaluate", "redone", "other"), 0.0)
    parts["stall"] = sum(attempt.stalls_s)
    for line in attempt.lines:
        step_s, waited_s = line["step_s"] or 0.0, line["data_s"] or 0.0
        warm_s = max(0.0, step_s - waited_s - usual_s) if line["first_of_attempt"] else 0.0
        parts["start"] += warm_s
        parts["stall"] += waited_s
        parts["evaluate"] += line["eval_s"] or 0.0
        is_wasted = line.get("is_abandoned") or (line["skipped"] and line["targets"])
        parts["redone" if is_wasted else "useful"] += step_s - waited_s - warm_s
    rest_s = attempt.ended_unix_s - attempt.began_unix_s - sum(parts.values())
    if rest_s < 0:
        # Stamps of several clocks overlap a little. Where the clock was set back in this attempt,
        # only the seconds that were counted inside it are known.
        parts["useful"] += rest_s if -rest_s <= parts["useful"] else 0.0
    elif attempt.is_failure or len(attempt.lines) < attempt.num_steps:
        parts["redone"] += rest_s
    else:
        parts["other"] += rest_s
    return parts


def usual_step_s(attempts: Sequence[Attempt]) -> float:
    """Median seconds of a step, without the first of each attempt where there are others."""
    every = [line for attempt in attempts for line in attempt.lines]
    steady = [line["step_s"] for line in every if not line["first_of_attempt"]]
    return statistics.median(steady or [line["step_s"] for line in every] or [0.0])


def shares(total: Mapping[str, float]) -> dict[str, float]:
    """Each part's share of the whole, 0..1."""
    whole = sum(total.values())
    return {name: seconds / whole if whole > 0 else 0.0 for name, seconds in total.items()}


def series(folder: Path) -> dict[str, float]:
    """The shares that TensorBoard shows, 0..1; empty before the first attempt is on record."""
    part = shares(account(read_attempts(folder, time.time())))
    back = sum(part[name] for name in ("detect", "restart", "start", "load"))
    found = {name: part[name] for name in ("useful", "redone", "stall")} | {"restart": back}
    return {f"goodput_{name}": share for name, share in found.items()}


def read_attempts(folder: Path, now_s: float | None = None) -> list[Attempt]:
    """The attempts of the run in `folder`.

    An attempt that goes on ends now; one without a line about its end ends at its last sign.
    """
    events = read_events(folder)
    if now_s is None:
        now_s = time.time() if is_living(folder) else last_sign_s(folder, events)
    holds = lineage_of(folder).holds
    lines = [
        {**line, "is_abandoned": not holds(line["segment"], line["step"])}
        for line in read_metrics(folder)
    ]
    return attempts_of(events, lines, now_s)


def last_sign_s(folder: Path, events: Sequence[Mapping[str, Any]]) -> float:
    """The time of the last write to the record."""
    stamps = [unix_s(event) for event in events[-1:]]
    stamps += [p.stat().st_mtime for p in [folder / "metrics.jsonl"] if p.exists()]
    return max(stamps, default=0.0)


def costs_of(attempts: Sequence[Attempt]) -> forecast.Costs:
    """Seconds that a step, a save and a failure cost this run. It must have a step on record."""
    usual_s = usual_step_s(attempts)
    after_failure = [
        attempt for before, attempt in itertools.pairwise(attempts) if before.is_failure
    ]
    detects = [attempt.seconds.get("detect", 0.0) for attempt in attempts if attempt.is_failure]
    restarts = [
        sum(attempt.seconds.get(name, 0.0) for name in ("restart", "start", "load"))
        for attempt in after_failure or attempts[:1]
    ]
    stalls = [stall for attempt in attempts for stall in attempt.stalls_s]
    return forecast.Costs(
        step_s=usual_s,
        stall_s=statistics.median(stalls) if stalls else 0.0,
        restart_s=statistics.mean(restarts) + (statistics.mean(detects) if detects else 0.0),
    )


def report(name: str, attempts: Sequence[Attempt]) -> tuple[str, list[list[str]]]:
    """The account as text: a headline, and the rows of a table."""
    total = account(attempts)
    part = shares(total)
    whole_s = sum(total.values())
    failures = sum(attempt.is_failure for attempt in attempts)
    rows = [["part", "seconds", "share", "what it is"]]
    rows += [
        [key, f"{total[key]:,.1f}", f"{part[key]:.1%}", meaning] for key, meaning in PARTS.items()
    ]
    rows.append(["total", f"{whole_s:,.1f}", f"{sum(part.values()):.1%}", ""])
    head = (
        f"{name}: {duration(whole_s)} of wall clock,"
        f" {counted(len(attempts), 'attempt')}, {counted(failures, 'failure')},"
        f" goodput {part['useful']:.1%}"
    )
    return head, rows


def advice(
    attempts: Sequence[Attempt], mtbf_s: float | None, interval: int
) -> tuple[str, list[list[str]]]:
    """The best interval between saves: a headline, and the rows of a table.

    `interval` = steps between saves now, 0 = none. `mtbf_s` = mean time between failures; None =
    the run's own.
    """
    total = account(attempts)
    failures = sum(attempt.is_failure for attempt in attempts)
    ran_s = sum(total.values()) - total["idle"]
    whence = "given"
    if mtbf_s is None:
        if not failures:
            return "no failure yet; MTBF=hours computes the best checkpoint.interval for it", []
        mtbf_s, whence = ran_s / failures, f"measured: {failures} in {duration(ran_s)}"
    if usual_step_s(attempts) <= 0:
        return "no step is on record yet: nothing to compute an interval from", []
    costs = costs_of(attempts)
    best = forecast.best_interval(costs, mtbf_s)
    rows = [["checkpoint.interval", "saves every", "goodput", "simulated", ""]]
    for steps in sorted({best, interval or best}):
        notes = ["best"] * (steps == best) + ["as it is"] * (steps == interval)
        rows.append(
            [
                f"{steps:,}",
                duration(steps * costs.step_s),
                f"{forecast.goodput(costs, mtbf_s, steps):.1%}",
                f"{forecast.simulate(costs, mtbf_s, steps):.1%}",
                " and ".join(notes),
            ]
        )
    head = (
        f"a failure every {duration(mtbf_s)} ({whence}), {costs.step_s:.3g} s a step,"
        f" {costs.stall_s:.3g} s stall a save, {costs.restart_s:.3g} s from failure to training:"
    )
    return head, rows


def interval_of(folder: Path) -> int:
    """Steps between the saves of a run, as its recipe has it; 0 = none, or no number."""
    text = (folder / "recipe.yaml").read_text(errors="replace")
    found = re.search(r"^checkpoint:\n(?: .*\n)*?  interval: (\d+)$", text, re.M)
    return int(found[1]) if found else 0
