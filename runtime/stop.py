"""`python -m runtime.stop RUN`: ask a run to save and end, and wait until it has.

The one rule: it asks, and kills nothing: the run ends itself after a step, all ranks alike, and its
launcher does not start it again. Imports no torch.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
import time
from pathlib import Path

from recipes.command import refuse
from recipes.exits import FAILED, FINISHED
from recipes.schema import UserError
from runtime.events import line_of
from runtime.goodput import FAILURES, is_end
from runtime.lives import unix_s
from runtime.presence import existing, is_living, shown
from runtime.records import read_events
from runtime.requests import ask, read_request

LOOK_S = 0.5
TELL_S = 30.0
# A launcher may wait so long before it starts a run again.
BETWEEN_S = 900.0


def stop(folder: Path, now: bool) -> int:
    """Ask, wait, tell; the exit status."""
    if not is_living(folder):
        return not_running(folder, now)
    began = time.time()
    ask(folder, now=now, who=who())
    kind = "end without a save" if now else "save and end"
    print(f"asked {folder.name} to {kind} after its step; waiting (Ctrl-C: no longer)", flush=True)
    tell_at = began + TELL_S
    while is_living(folder) or read_request(folder) is not None:
        if not is_living(folder) and time.time() - began > BETWEEN_S:
            break
        if time.time() > tell_at:
            tell_at += TELL_S
            seen = shown(folder)
            print(
                f"still in phase {seen.get('phase', '?')}, step {seen.get('step', '?')}", flush=True
            )
        time.sleep(LOOK_S)
    return outcome(folder, began)


def outcome(folder: Path, began: float) -> int:
    """Tell how a run that was asked has ended; 0 where it did what was asked, or had finished."""
    recent = [event for event in read_events(folder) if unix_s(event) >= began - 1]
    for event in reversed(recent):
        if event["kind"] in ("stopped", "finished"):
            if "step" not in event:
                print("stopped between two lives")
                return FINISHED
            saved = event.get("is_saved")
            how = {True: ", saved", False: ", not saved", None: ""}[saved]
            print(f"{event['kind']} after step {event.get('step', '?')}{how}")
            failed = [e for e in recent if e["kind"] == "save_failed"]
            return FAILED if failed and not saved else FINISHED
    last = line_of(recent[-1]) if recent else "it left no word"
    print(f"ended otherwise: {last}", file=sys.stderr)
    return FAILED


def not_running(folder: Path, now: bool) -> int:
    """There are no ranks; a launcher may be about to start some."""
    ends = [event for event in read_events(folder) if is_end(event)]
    if not ends:
        print(f"{folder.name} does not run")
        return FINISHED
    print(f"{folder.name} does not run: {line_of(ends[-1])}")
    if ends[-1]["cause"] in FAILURES and time.time() - ends[-1]["ended_unix_s"] < BETWEEN_S:
        ask(folder, now=now, who=who())
        print("a launcher that waits to start it again will not")
    return FINISHED


def who() -> str:
    """Who asks, for the record."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def main(arguments: list[str]) -> int:
    """Ask and wait; exit status."""
    parser = argparse.ArgumentParser(prog="runtime.stop", description="end a run politely")
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--now", action="store_true", help="without a save")
    options = parser.parse_args(arguments)
    try:
        return stop(existing(options.run), options.now)
    except UserError as error:
        return refuse(error)
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("the request stays; the run ends after its step")
        return FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
