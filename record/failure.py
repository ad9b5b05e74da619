"""The exception that ended a rank: its type, text and place, and the phase in which it came.

    rank       HEART.reporting() -> failure_of(error) -> rank-00003.failure beside its beat
    launcher   read_failure, or failure_in(error output) -> the attempt's line in events.jsonl
               -> make status, make events, WHY.txt

Rule: the first exception counts. What is raised while a rank cleans up is a consequence. Texts are
redacted. Imports no torch. Units: steps.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from base.paths import ROOT
from base.redaction import redact, secret_values

LONGEST_TEXT = 1000
# Frames of these folders inside the project are libraries, not this project.
FOREIGN = ("/site-packages/", "/dist-packages/")
# The last line of a traceback: `torch.OutOfMemoryError: CUDA out of memory`.
LAST_LINE = re.compile(r"^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*)(?:: (.*))?$")
FRAME = re.compile(r'^(?:\[rank\d+\]: )?\s+File "(.+)", line (\d+), in (.+)$')


# Texts of gloo, NCCL and sockets on a rank that lost its connection to another.
LOST_PEER = re.compile(
    r"closed by peer|reset by peer|Broken pipe|remote process exited|Connection refused"
    r"|timed out waiting|communicator was aborted|ncclRemoteError|Socket closed"
)


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    `place` is `runtime/engine/engine.py:88 in train_step`, the innermost frame of this project,
    with the library that raised where it was another. `phase` and `step` are those of the rank's
    last sign of life before the exception; None where they are not known.
    """

    type: str
    text: str
    place: str | None = None
    phase: str | None = None
    step: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it is only the loss of another rank, which has the cause."""
        return self.type != "OSError" and bool(LOST_PEER.search(self.text))

    def __str__(self) -> str:
        """`ValueError: text, at place`; texts of several lines are cut after the first."""
        first = self.text.strip().partition("\n")[0]
        if self.type.startswith("base.errors."):  # written for people: a sentence of its own
            return first
        where = f", at {self.place}" if self.place else ""
        return f"{self.type}{f': {first}' if first else ''}{where}"

    @classmethod
    def from_dict(cls, values: Any) -> Failure | None:
        """The inverse of `dataclasses.asdict`; None where `values` are none of it."""
        try:
            return cls(**values)
        except TypeError:
            return None


def failure_of(error: BaseException, phase: str | None = None, step: int | None = None) -> Failure:
    """The failure that `error` is, redacted."""
    problems = getattr(error, "problems", None)
    text = "; ".join(problems) if problems else str(error)
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return Failure(
        f"{module}{kind.__qualname__}",
        redact(text, secret_values(os.environ))[:LONGEST_TEXT],
        place_of(frames),
        phase,
        step,
    )


def failure_in(lines: Sequence[str]) -> Failure | None:
    """The failure that the last traceback in an error output shows; None where there is none."""
    starts = [n for n, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if not starts:
        return None
    frames = []
    for number, line in enumerate(lines[starts[-1] + 1 :], start=starts[-1] + 1):
        if found := FRAME.match(line):
            frames.append((found[1], int(found[2]), found[3]))
        elif found := LAST_LINE.match(line):
            more = [text for text in lines[number + 1 :] if text.strip()]
            text = "\n".join([found[2] or "", *more]).strip()
            return Failure(found[1], text[:LONGEST_TEXT], place_of(frames))
    return None


def place_of(frames: Sequence[tuple[str, int | None, str]]) -> str | None:
    """The innermost frame of this project, and the innermost of all where that is a library's."""
    if not frames:
        return None
    root = f"{ROOT}/"
    own = [f for f in frames if f[0].startswith(root) and not any(x in f[0] for x in FOREIGN)]
    last = _shown(frames[-1])
    if not own or own[-1] == frames[-1]:
        return last
    return f"{_shown(own[-1])} (raised in {last})"


def _shown(frame: tuple[str, int | None, str]) -> str:
    path = frame[0].removeprefix(f"{ROOT}/")
    for part in FOREIGN:
        path = path.rpartition(part)[2]
    return f"{path}:{frame[1]} in {frame[2]}"


def write_failure(path: Path, failure: Failure) -> None:
    """Write a failure for the launcher. Raises OSError."""
    path.write_text(json.dumps(asdict(failure)) + "\n", encoding="utf-8")


def read_failure(path: Path) -> Failure | None:
    """The failure that a rank wrote; None where it wrote none."""
    try:
        return Failure.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
