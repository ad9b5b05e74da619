"""`make status | events | stop | goodput`: the verbs of who looks after a run.

    python -m runtime.operate status tiny        runtime.status
    python -m runtime.operate events tiny        runtime.events     --kind life,saved  --follow
    python -m runtime.operate stop tiny          runtime.stop       --now
    python -m runtime.operate goodput tiny       runtime.goodput    --mtbf 2.8h

The one rule: a run is given by its name under runs/ or its path, and looking changes nothing.
Imports no torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from checkpoint.lineage import run_folder
from recipes.command import Parser, refuse
from recipes.exits import FAILED, FINISHED
from recipes.schema import UserError, as_float
from recipes.table import table
from runtime import goodput, status
from runtime.events import chosen, follow
from runtime.records import EVENTS, notes, read_events
from runtime.stop import stop


def main(arguments: list[str]) -> int:
    """One verb; exit status."""
    parser = Parser(prog="runtime.operate", description="look after a run")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("run", help="name of a run under runs/, or its folder")
    parser.add_argument("--kind", default="", help="events: only these kinds, by commas")
    parser.add_argument("--follow", action="store_true", help="events: until the run ends")
    parser.add_argument("--now", action="store_true", help="stop: without a save")
    parser.add_argument("--mtbf", default="", help="goodput: hours between two failures")
    options = parser.parse_args(arguments)
    try:
        return VERBS[options.verb](run_folder(options.run, Path()), options)
    except UserError as error:
        return refuse(error)
    except BrokenPipeError:  # `make events | head`
        sys.stderr.close()
    except OSError as error:  # a file system that went away
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        pass
    return FINISHED


def show_status(folder: Path, options: argparse.Namespace) -> int:
    """What it does."""
    print("\n".join([*status.describe(status.state_of(folder)), *notes(folder)]))
    return FINISHED


def show_events(folder: Path, options: argparse.Namespace) -> int:
    """What happened. Raises UserError for a kind that the run does not have."""
    path = folder / EVENTS
    seen = path.stat().st_size if path.exists() else 0
    events = read_events(folder)
    kinds = set(options.kind.replace(",", " ").split())
    known = sorted({event["kind"] for event in events})
    strange = ", ".join(sorted(kinds - set(known)))
    if strange and not options.follow:
        raise UserError(
            f"KIND={strange}: {folder.name} has no such event; it has: {', '.join(known) or 'none'}"
        )
    print("\n".join(chosen(events, kinds)) or f"no event of {folder.name} yet", flush=True)
    print(*(f"{line}\n" for line in notes(folder)), sep="", end="", flush=True)
    if options.follow and events:
        follow(folder, kinds, seen)
    return FINISHED


def ask_to_stop(folder: Path, options: argparse.Namespace) -> int:
    """Save and end."""
    return stop(folder, options.now)


def show_goodput(folder: Path, options: argparse.Namespace) -> int:
    """Where the time went. Raises UserError."""
    mtbf_s = hours("MTBF", options.mtbf) if options.mtbf else None
    lives = goodput.read_lives(folder)
    if not lives:
        raise UserError(f"RUN={folder.name}: no life is on record yet")
    interval = goodput.interval_of(folder)
    for head, rows in (goodput.report(folder.name, lives), goodput.advice(lives, mtbf_s, interval)):
        print(head)
        if rows:
            print(table(rows))
    print(*(f"{line}\n" for line in notes(folder, math.inf)), sep="", end="")
    return FINISHED


def hours(variable: str, text: str) -> float:
    """Hours, or a number with s, min, h or d, in seconds. Raises UserError."""
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    unit = next((unit for unit in ("min", "s", "h", "d") if text.endswith(unit)), "")
    try:
        seconds = as_float(text.removesuffix(unit).strip()) * sizes[unit or "h"]
    except ValueError as problem:
        raise UserError(f"{variable}={text} {problem}; give hours, or 90min, 2.8h, 3d") from None
    if seconds <= 0:
        raise UserError(f"{variable}={text} is not above 0; give hours between two failures")
    return seconds


VERBS = {
    "status": show_status,
    "events": show_events,
    "stop": ask_to_stop,
    "goodput": show_goodput,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
