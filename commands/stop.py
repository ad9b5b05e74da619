"""`make stop`: asks a run to save and end, and waits until it has ended.

Rule: it kills nothing. The run ends itself after a step, on all ranks alike, and its launcher does
not start it again. Imports no torch.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from pathlib import Path

from base.command_line import Parser, carry_out
from base.exits import FAILED, FINISHED
from checkpoint.lineage import run_folder
from record.attempts import FAILURES, is_end, unix_s
from record.event_lines import line_of
from record.presence import is_living, launcher, shown
from record.records import read_events
from record.requests import BETWEEN_ATTEMPTS, ask, read_request

LOOK_S = 0.5
REPORT_S = 30.0
# The longest time that a launcher waits before it starts a run again, with a margin.
BETWEEN_S = 900.0


def main(arguments: list[str]) -> int:
    """Entry of `make stop`; returns the exit status."""
    parser = Parser(prog="make stop", description=__doc__)
    parser.add_argument("run", help="name of a run under runs/, or its folder")
    parser.add_argument("--now", action="store_true", help="without a save")
    options = parser.parse_args(arguments)
    return carry_out(lambda: stop(run_folder(options.run, Path()), options.now))


def stop(folder: Path, now: bool) -> int:
    """Ask the run to stop, wait, and report its end; returns the exit status."""
    if not is_living(folder) and launcher(folder) is None:
        return not_running(folder, now)
    began = time.time()
    ask(folder, now=now, who=who())
    kind = "end without a save" if now else "save and end"
    print(f"asked {folder.name} to {kind} after its step; waiting (Ctrl-C: no longer)", flush=True)
    try:
        await_end(folder, began)
    except KeyboardInterrupt:
        print("the request stays; the run ends after its step")
        return FINISHED
    return outcome(folder, began)


def await_end(folder: Path, began: float) -> None:
    """Wait until no rank is alive and no launcher would start the run again."""
    report_at, was_attended = began + REPORT_S, False
    while True:
        is_attended = launcher(folder) is not None
        was_attended |= is_attended
        if not is_attended and not is_living(folder):
            is_over = was_attended or read_request(folder) is None
            if is_over or time.time() - began > BETWEEN_S:
                return
        if time.time() > report_at:
            report_at += REPORT_S
            seen = shown(folder)
            where = f"phase {seen.get('phase', '?')}, step {seen.get('step', '?')}"
            print(f"still in {where}", flush=True)
        time.sleep(LOOK_S)


def outcome(folder: Path, began: float) -> int:
    """Print how the run ended; returns 0 where it stopped as asked, or had finished."""
    recent = [event for event in read_events(folder) if unix_s(event) >= began - 1]
    for event in reversed(recent):
        if event["kind"] in ("stopped", "finished"):
            if event.get("reason") == BETWEEN_ATTEMPTS:
                print("stopped between two attempts")
                return FINISHED
            saved = event.get("is_saved")
            how = {True: ", saved", False: ", not saved", None: ""}[saved]
            print(f"{event['kind']} after step {event.get('step', '?')}{how}")
            failed = [e for e in recent if e["kind"] == "save_failed"]
            return FAILED if failed and not saved else FINISHED
    last = line_of(recent[-1]) if recent else "it left no event"
    print(f"ended otherwise: {last}", file=sys.stderr)
    return FAILED


def not_running(folder: Path, now: bool) -> int:
    """Report a run without ranks; a launcher that waits to start it is asked not to."""
    ends = [event for event in read_events(folder) if is_end(event)]
    if not ends:
        print(f"{folder.name} does not run")
        return FINISHED
    print(f"{folder.name} does not run: {line_of(ends[-1])}")
    if ends[-1]["cause"] in FAILURES and time.time() - ends[-1]["ended_unix_s"] < BETWEEN_S:
        ask(folder, now=now, who=who())
        print("if a launcher waits to start it again, it will not")
    return FINISHED


def who() -> str:
    """The user who asks, for the record: name@host."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
