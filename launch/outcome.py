"""What the ends of all ranks add up to: one exit status, and the error a person must see first.

    0 all ranks ended well    75 all asked to be put back in the queue    93 trying again is no use
    130, 143 stopped by Ctrl-C, SIGTERM    else the status of the rank that failed first

The one rule: ranks that were stopped because of another, or that lost their connection to it, are
consequences and decide nothing. Pure functions.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.exits import DO_NOT_RETRY, REQUEUE

# A killed rank is the cause even where the news of a rank that missed it came first.
TOGETHER_S = 5.0
SHOWN_LINES = 40


@dataclass(frozen=True)
class End:
    """How one rank ended: `status` as Popen gives it (negative = signal), `after_s` on one clock.

    `was_stopped` = a signal of the launcher ended it; `is_lost` = its host did not report an end.
    `last` = the end of its error output.
    """

    rank: int
    status: int
    after_s: float
    host: str = ""
    was_stopped: bool = False
    is_lost: bool = False
    last: tuple[str, ...] = ()
    log: str | None = None


def first_failure(ends: Sequence[End]) -> End | None:
    """The rank to blame; None where none failed by itself."""
    failed = sorted(
        (end for end in ends if end.status not in (0, REQUEUE) and not end.was_stopped),
        key=lambda end: end.after_s,
    )
    if not failed:
        return None
    early = [end for end in failed if end.after_s <= failed[0].after_s + TOGETHER_S]
    killed = [end for end in early if end.status < 0 or end.is_lost]
    refused = [end for end in early if end.status == DO_NOT_RETRY]
    # Where all refuse alike, one of them says why.
    refused.sort(key=lambda end: not any(line.startswith("refused: ") for line in end.last))
    return (killed or refused or failed)[0]


def exit_status(ends: Sequence[End], stopped_by: int | None = None) -> int:
    """One status for the caller. `stopped_by` is the signal that asked for the end."""
    statuses = {end.status for end in ends}
    if statuses == {0}:
        return 0
    if statuses <= {0, REQUEUE} and REQUEUE in statuses:
        return REQUEUE
    if stopped_by is not None:
        return 128 + stopped_by
    first = first_failure(ends)
    if first is None:
        return 1
    return first.status if first.status > 0 else 128 - first.status


def explain(ends: Sequence[End], num_ranks: int) -> list[str]:
    """The first failure for a person: who, how, where its log is, and its own last words."""
    first = first_failure(ends)
    if first is None:
        return []
    words = last_words(first.last)
    if words and (first.is_lost or first.status == DO_NOT_RETRY):
        return words  # whole sentences that need no frame
    where = f" on {first.host}" if first.host else ""
    lines = [
        f"failed: rank {first.rank} of {num_ranks}{where} {how(first.status)} after"
        f" {first.after_s:.0f} s, first of all" + (f"; its log: {first.log}" if first.log else "")
    ]
    return lines + [f"  | {line}" for line in words]


def how(status: int) -> str:
    """`ended with exit status 3`, `was killed by SIGKILL (...)`."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = {
        "SIGKILL": " (out of memory? look at dmesg)",
        "SIGBUS": " (/dev/shm or a disk full?)",
    }.get(name, "")
    return f"was killed by {name}{hint}"


def last_words(lines: Sequence[str]) -> list[str]:
    """The part of an error output that says what happened: refusals, else the last traceback, else
    the last lines."""
    said = [line for line in lines if re.match(r"(refused|failed)( on rank \d+)?: ", line)]
    if said:
        return list(dict.fromkeys(said))[-SHOWN_LINES:]
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if starts:
        return list(lines[starts[-1] :])[-SHOWN_LINES:]
    return [line for line in lines if line.strip()][-10:]
