"""`make events`: the events of a run, one line each, the newest last.

Times are UTC, as in the file. Imports no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from base.command_line import Parser, carry_out
from base.errors import UserError
from base.exits import FINISHED
from checkpoint.lineage import run_folder
from record.event_lines import line_of
from record.presence import is_living, launcher
from record.records import EVENTS, EVENTS_HAVE, OLD_NAMES, notes, read_events, read_line

LOOK_S = 1.0


def main(arguments: list[str]) -> int:
    """Entry of `make events`; returns the exit status."""
    parser = Parser(prog="make events", description=__doc__)
    parser.add_argument("run", help="name of a run under runs/, or its folder")
    parser.add_argument("--kind", default="", help="only these kinds, by commas")
    parser.add_argument("--follow", action="store_true", help="until the run ends")
    options = parser.parse_args(arguments)
    return carry_out(lambda: show(run_folder(options.run, Path()), options.kind, options.follow))


def show(folder: Path, wanted: str, is_followed: bool) -> int:
    """Print the events. Raises UserError for a kind that the run does not have."""
    path = folder / EVENTS
    seen = path.stat().st_size if path.exists() else 0
    events = read_events(folder)
    kinds = {OLD_NAMES.get(kind, kind) for kind in wanted.replace(",", " ").split()}
    known = sorted({event["kind"] for event in events})
    strange = ", ".join(sorted(kinds - set(known)))
    if strange and not is_followed:
        raise UserError(
            f"KIND={strange}: {folder.name} has no such event; it has: {', '.join(known) or 'none'}"
        )
    print("\n".join(chosen(events, kinds)) or f"no event of {folder.name} yet", flush=True)
    print(*(f"{line}\n" for line in notes(folder)), sep="", end="", flush=True)
    if is_followed and events:
        follow(folder, kinds, seen)
    return FINISHED


def chosen(events: Iterable[Mapping[str, Any]], kinds: set[str]) -> list[str]:
    """Lines of the events of these kinds, or of all events where `kinds` is empty."""
    return [line_of(event) for event in events if not kinds or event["kind"] in kinds]


def follow(folder: Path, kinds: set[str], seen: int) -> None:
    """Print what is added after `seen` bytes, while the run is alive or has a launcher."""
    path = folder / EVENTS
    while True:
        may_go_on = is_living(folder) or launcher(folder) is not None
        with open(path, "rb") as file:
            file.seek(seen)
            *whole, _torn = file.read().split(b"\n")
        added = [read_line(line, EVENTS_HAVE) for line in whole]
        for text in chosen((event for event in added if isinstance(event, dict)), kinds):
            print(text, flush=True)
        seen += sum(len(line) + 1 for line in whole)
        if not may_go_on and not whole:
            return
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
