"""The record of a run as its supervisor uses it, between two lives.

The one rule: what cannot be read or written costs a line of the record, never the run. Imports no
torch. Units: steps, seconds.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from pathlib import Path
from typing import Any

from recipes.schema import UserError
from runtime import lives
from runtime.records import EVENTS, read_events, record_event
from runtime.requests import BETWEEN_LIVES, forget, read_request


class Book:
    """The record of a run, for the supervisor: what is read and written between its lives."""

    def __init__(self, folder: Path, job: str = ""):
        self.folder, self._job = folder, job

    def new_launch(self) -> str:
        """A name for a start of all ranks; those of one SLURM job begin alike."""
        return f"{self._job}.{secrets.token_hex(8)}"

    def has_begun(self) -> bool:
        """Whether an earlier start of the same SLURM job began a life here: it was requeued."""
        events = read_events(self.folder, "began") if self._job and self.folder.is_dir() else []
        return any(event.get("launch", "").startswith(f"{self._job}.") for event in events)

    def place(self) -> tuple[int, int, int]:
        """(segment, newest step, newest saved step)."""
        mark = lives.mark(self.folder)
        return mark.segment, mark.step, mark.saved_step

    def close(self, launch: str, is_ours: bool, **how: Any) -> dict[str, Any] | None:
        """Write the line of a life. A record that cannot be written costs the line, not the run."""
        try:
            return lives.close(self.folder, launch, lives.Ended(**how), is_ours)
        except (OSError, UserError) as error:
            print(f"warning: {self.folder / EVENTS}: {error}", file=sys.stderr)
            return None

    def stop_is_asked(self) -> bool:
        """Whether `make stop` asked for the end; takes the request away."""
        if read_request(self.folder) is None:
            return False
        with contextlib.suppress(OSError, UserError):
            life = max(1, lives.next_number(self.folder) - 1)
            record_event(self.folder, "stopped", life=life, reason=BETWEEN_LIVES)
        forget(self.folder)
        return True

    def name(self) -> str:
        """A name for what belongs to the newest life."""
        return f"life-{lives.next_number(self.folder) - 1}"

    def note(self, host: str, state: str, **facts: Any) -> None:
        """Put on record what became of a host, where there is a record already."""
        if (self.folder / EVENTS).is_file():
            with contextlib.suppress(OSError, UserError):
                life = max(1, lives.next_number(self.folder) - 1)
                record_event(self.folder, "host", life=life, host=host, state=state, **facts)

    def failures(self) -> list[tuple[str, str, float]]:
        """(host, cause, when) of all lives, and of hosts that were found unfit."""
        events = read_events(self.folder) if self.folder.is_dir() else []
        return [
            (event["host"], event["cause"], lives.unix_s(event))
            for event in events
            if event.get("host") and event.get("cause")
        ]
