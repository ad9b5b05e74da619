"""The supervisor's access to the record of a run, between two attempts.

Rule: a record that cannot be read or written costs a line of it, never the run. Imports no torch.
Units: steps, seconds, bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from base.errors import UserError
from record import attempts
from record.event_lines import failure_text
from record.presence import LAUNCHER, attend
from record.records import EVENTS, read_events, record_event
from record.requests import BETWEEN_ATTEMPTS, forget, read_request

ROOM_BYTES = 1 << 20  # more than the lines of an attempt take
SHOWN_FAILURES = 5


class SupervisorLog:
    """Reads and writes the record of one run between its attempts, for the supervisor."""

    def __init__(self, folder: Path, job: str = ""):
        self.folder, self._job = folder, job
        self._progress = attempts.Progress()
        self._attempt: int | None = None  # that ended last
        self._attended: TextIO | None = None

    def attend(self) -> None:
        """Hold the launcher's lock, as soon as the run has a folder, so that people can see it."""
        with contextlib.suppress(OSError):
            if self._attended is None or not os.path.samestat(
                os.fstat(self._attended.fileno()), os.stat(self.folder / LAUNCHER)
            ):
                self._attended = attend(self.folder)

    def new_launch(self) -> str:
        """A new name for a start of all ranks; names of one SLURM job have the same prefix."""
        return f"{self._job}.{secrets.token_hex(8)}"

    def has_begun(self) -> bool:
        """Whether an earlier start of the same SLURM job began an attempt (it was requeued)."""
        events = read_events(self.folder, "began") if self._job and self.folder.is_dir() else []
        return any(event.get("launch", "").startswith(f"{self._job}.") for event in events)

    def progress(self) -> attempts.Progress:
        """How far the run has come; as far as was known before where nothing can be read."""
        with contextlib.suppress(OSError, UserError):
            self._progress = attempts.progress_of(self.folder)
        return self._progress

    def trouble(self) -> str | None:
        """The reason why nothing can be recorded now; None where it can, or nothing was yet."""
        if self._progress == attempts.Progress():
            return None
        probe = self.folder / f".room-{secrets.token_hex(8)}"
        try:
            probe.write_bytes(bytes(ROOM_BYTES))
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        return None

    def close(self, launch: str, is_ours: bool, attempt: attempts.Attempt) -> attempts.Attempt:
        """Write the line of an attempt; returns it with what the record knows of it.

        A record that cannot be written costs the line, not the run: `number` is then None, as it
        is where nothing had begun.
        """
        try:
            closed = attempts.close(self.folder, launch, attempt, is_ours)
        except (OSError, UserError) as error:
            print(f"warning: {self.folder / EVENTS}: {error}", file=sys.stderr)
            closed = attempt
        self._attempt = closed.number or self._attempt
        return replace(closed, progress=self.progress())

    def stop_is_asked(self) -> bool:
        """Whether `make stop` asked for the end; records that and removes the request."""
        if read_request(self.folder) is None:
            return False
        with contextlib.suppress(OSError, UserError):
            attempt = max(1, attempts.next_number(self.folder) - 1)
            record_event(self.folder, "stopped", attempt=attempt, reason=BETWEEN_ATTEMPTS)
            forget(self.folder)
        return True

    def has_told(self) -> bool:
        """Whether the newest attempt itself recorded why it is the last one, and left a bundle."""
        with contextlib.suppress(OSError, UserError):
            return any(
                event["attempt"] == self._attempt for event in read_events(self.folder, "stop")
            )
        return False

    def event(self, kind: str, **facts: Any) -> None:
        """Record an event of the attempt that ended last.

        Does nothing where another start has begun an attempt since: it owns the record now.
        """
        with contextlib.suppress(OSError, UserError):
            if self._attempt is not None and self._attempt == attempts.next_number(self.folder) - 1:
                record_event(self.folder, kind, attempt=self._attempt, **facts)

    def name(self) -> str:
        """A file name for what belongs to the newest attempt: `attempt-3`."""
        with contextlib.suppress(OSError, UserError):
            return f"attempt-{attempts.next_number(self.folder) - 1}"
        return "attempt-unknown"

    def explanation(self, why: str) -> str:
        """The text of WHY.txt: why the run is given up, and the reasons of its newest failures."""
        lines = [why]
        with contextlib.suppress(OSError, UserError):
            failed = [e for e in read_events(self.folder, "attempt") if e.get("why")]
            lines += [
                f"{e['cause']}: {failure_text(e)}" for e in failed[: -SHOWN_FAILURES - 1 : -1]
            ]
        return "".join(f"{line}\n" for line in lines)

    def note(self, host: str, state: str, **facts: Any) -> None:
        """Record what became of a host, where the run has a record already."""
        if (self.folder / EVENTS).is_file():
            with contextlib.suppress(OSError, UserError):
                attempt = max(1, attempts.next_number(self.folder) - 1)
                record_event(self.folder, "host", attempt=attempt, host=host, state=state, **facts)

    def failures(self) -> list[tuple[str, str, float]]:
        """(host, cause, unix_s) of all failed attempts, and of hosts that were found unfit."""
        with contextlib.suppress(OSError, UserError):
            return [
                (event["host"], event["cause"], attempts.unix_s(event))
                for event in read_events(self.folder)
                if event.get("host") and event.get("cause")
            ]
        return []
