"""Starts the runs of a comparison one after the other, through the entry of `make pretrain`.

    check all variants -> for each run: commands.pretrain in a process, its output in a log file
      -> one line in outcomes.jsonl

Rule: nothing starts before all variants have been checked. After that no variant ends the sweep: a
variant that fails is recorded with its reason and left out of the later rounds. A run that has
finished is never started again.

Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from base.errors import UserError
from base.paths import ROOT
from base.units import duration
from compare.folder import RUNS, record_outcome
from compare.variants import ComparisonPlan, Turn, problem_lines
from launch.hosts.place import start_options
from record.records import METRICS, read_events, read_metrics
from runtime.log.console import number
from runtime.log.metrics import summary

CHECKS_AT_ONCE = 4  # each check is a short process
POLL_S = 0.5
END_TIMEOUT_S = 40  # torchrun gives its ranks 30 s to end
LOG_TAIL_BYTES = 200_000
LONGEST_REASON = 300


def check(plan: ComparisonPlan) -> None:
    """Raise UserError with every problem that `make pretrain` would refuse in any variant."""
    first_round = plan.turns()[: len(plan.variants)]
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        found = list(pool.map(lambda turn: refused(plan, turn), first_round))
    problems = [
        (turn.variant.label, line)
        for turn, lines in zip(first_round, found, strict=True)
        for line in lines
    ]
    if problems:
        raise UserError(*problem_lines(problems, len(first_round)))


def refused(plan: ComparisonPlan, turn: Turn) -> list[str]:
    """Problems for which the launcher refuses a run."""
    if is_finished(RUNS / turn.run, plan.steps):
        return []
    command = [*entry(plan, "--check"), *plan.arguments(turn)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    lines = re.findall(r"^refused: (.*)", done.stderr, re.MULTILINE)
    return lines or [f"the check ended with status {done.returncode}: {done.stderr[-500:].strip()}"]


def entry(plan: ComparisonPlan, *options: str) -> list[str]:
    """Command of `make pretrain` without the overrides of the run."""
    place = start_options(plan.place, plan.ranks)
    return [sys.executable, "-m", "commands.pretrain", *options, *place, "--"]


def is_finished(folder: Path, steps: int) -> bool:
    """True where the last attempt of a run reached the last step of the comparison."""
    if not (folder / METRICS).is_file():
        return False
    events = [event["kind"] for event in read_events(folder) if event["kind"] != "attempt"]
    lines = read_metrics(folder)
    return bool(events) and events[-1] == "finished" and bool(lines) and lines[-1]["step"] == steps


def run_all(plan: ComparisonPlan, folder: Path) -> None:
    """Start all runs that have not finished yet, in order.

    KeyboardInterrupt (Ctrl-C or SIGTERM) ends the run in progress and is raised again.
    """
    turns = plan.turns()
    failed: set[str] = set()
    with interrupted_by_sigterm(), progress(plan) as bar:
        for count, turn in enumerate(turns, start=1):
            title = f"{count}/{len(turns)} {turn.variant.label}"
            title += f" (round {turn.round})" if plan.repeats > 1 else ""
            bar.set_description(title)
            # Leave out variants that failed, and runs that have finished.
            if turn.variant.slug in failed:
                bar.total -= plan.steps
                continue
            if is_finished(RUNS / turn.run, plan.steps):
                bar.update(plan.steps)
                log(bar, f"{title}: finished before")
                continue
            # Train.
            begin, done, load = time.monotonic(), bar.n, os.getloadavg()[0]
            status = run_one(plan, turn, folder, lambda steps, done=done: move(bar, done + steps))
            seconds = time.monotonic() - begin
            # Record how it ended.
            is_good = status == 0 and is_finished(RUNS / turn.run, plan.steps)
            reason = None if is_good else why(RUNS / turn.run, log_of(folder, turn), status)
            kind = "finished" if is_good else "failed"
            record_outcome(folder, turn.run, kind, reason=reason, seconds=seconds, load=load)
            if is_good:
                move(bar, done + plan.steps)
                speed = number(summary(RUNS / turn.run)["tokens_per_s"], ",.0f")
                log(bar, f"{title}: {speed} tokens/s ({duration(seconds)} with its start)")
            else:
                failed.add(turn.variant.slug)
                bar.total -= plan.steps
                move(bar, done)
                log(bar, f"{title}: FAILED: {reason}")


def progress(plan: ComparisonPlan) -> tqdm:
    """Progress bar over the steps of all runs; silent where the output is no terminal."""
    total = len(plan.turns()) * plan.steps
    return tqdm(total=total, unit="step", disable=None, dynamic_ncols=True, smoothing=0)


def log(bar: tqdm, text: str) -> None:
    """Print a line above the progress bar."""
    if bar.disable:
        print(text, flush=True)
    else:
        bar.write(text)


def move(bar: tqdm, steps: int) -> None:
    """Set the progress bar to `steps` steps."""
    bar.n = steps
    bar.refresh()


def log_of(folder: Path, turn: Turn) -> Path:
    """Log file that takes the output of a run."""
    return folder / "logs" / f"{turn.run}.log"


def run_one(plan: ComparisonPlan, turn: Turn, folder: Path, moved: Callable[[int], None]) -> int:
    """Start a run, wait for its end and return its exit status.

    `moved(steps)` is called with the number of recorded steps while the run trains.
    """
    command = [*entry(plan, "--with-parent", "--once"), *plan.arguments(turn)]
    with open(log_of(folder, turn), "ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        # In a new session, so that Ctrl-C reaches this process alone, which then ends the run.
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        size = 0
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                metrics = RUNS / turn.run / METRICS
                if metrics.is_file() and metrics.stat().st_size != size:
                    size = metrics.stat().st_size
                    moved(metrics.read_bytes().count(b"\n"))
        finally:
            end(process)
    return process.returncode


def end(process: subprocess.Popen) -> None:
    """End a run that still works: SIGTERM first, SIGKILL after END_TIMEOUT_S."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that the run in progress ends with this process."""

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def why(folder: Path, log: Path, status: int) -> str:
    """Reason of a failed run in one line.

    In this order: a refusal in its log, the reason in its last event, an exception in its log, the
    signal that ended a rank, the exit status.
    """
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    text = text[text.rfind("\n$ ") + 1 :]  # the log of an earlier attempt stands above it
    refusals = re.findall(r"^refused: (.*)", text, re.MULTILINE)
    errors = re.findall(
        r"^(?:\[?rank ?\d+\]?: ?)?((?:[\w.]*\.)?\w*(?:Error|Exception|Interrupt)\b.*)",
        text,
        re.MULTILINE,
    )
    own = [line for line in errors if "ChildFailedError" not in line]
    signals = re.findall(r"[Ss]ignal (\d+)", text) + ([str(-status)] if status < 0 else [])
    events = read_events(folder) if folder.is_dir() else []
    events = [event for event in events if event["kind"] != "attempt"]
    recorded = [event["reason"] for event in events[-1:] if event.get("reason")]
    if refusals or recorded or own:
        line = (refusals or recorded or own)[-1]
    elif signals:
        name = signal.Signals(int(signals[-1])).name
        line = f"a rank was ended by signal {signals[-1]} ({name})"
        line += ", often out of memory" if name == "SIGKILL" else ""
    else:
        line = f"exit status {status}"
    line = " ".join(line.split())[:LONGEST_REASON]
    return f"{line}; see {log.relative_to(ROOT)}"
