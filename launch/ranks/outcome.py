"""Combines the ends of all ranks: one exit status, and the error that a person must see first.

    0 all ranks ended well    75, 76 all asked to be started again, later or at once
    93 trying again is no use    130, 143 stopped by Ctrl-C, SIGTERM
    else the status of the rank that failed first

Rule: ranks that were stopped because of another, or that lost their connection to it, are
consequences and decide nothing. Pure functions.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from base.exits import DO_NOT_RETRY, FINISHED, INTERRUPTED, REQUEUE, REWOUND
from record.attempts import RankEnd

# All ranks agree on these; whoever has another status failed by itself.
AGREED = {FINISHED: "finished", REQUEUE: "preempted", REWOUND: "rewound", INTERRUPTED: "stopped"}
# Signals that take a run's place away.
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A killed rank is the cause, even where a rank that lost it was reported first.
TOGETHER_S = 5.0
SHOWN_LINES = 40
# On a GPU, in Python, in numpy, in torch on a CPU.
OUT_OF_MEMORY = re.compile(
    r"^(\[rank\d+\]: )?"
    r"([\w.]*(OutOfMemoryError|MemoryError)\b|RuntimeError: .*can't allocate memory)"
)


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank to blame; None where none failed by itself."""
    failed = sorted(
        (end for end in ends if end.status not in AGREED and not end.was_stopped),
        key=lambda end: end.after_s,
    )
    if not failed:
        return None
    early = [end for end in failed if end.after_s <= failed[0].after_s + TOGETHER_S]
    hung = sorted((end for end in early if end.hung), key=lambda end: end.only_waits)
    killed = [end for end in early if end.status < 0 or end.is_lost]
    refused = [end for end in early if end.status == DO_NOT_RETRY]
    # Where all refuse alike, one of them prints why.
    refused.sort(key=lambda end: not any(line.startswith("refused: ") for line in end.last))
    return (hung or killed or refused or failed)[0]


def exit_status(ends: Sequence[RankEnd], stopped_by: int | None = None) -> int:
    """One status for the caller. `stopped_by` is the signal that asked for the end."""
    statuses = {end.status for end in ends}
    for status in AGREED:
        if statuses and statuses <= {FINISHED, status}:
            return status
    if is_requeue(ends, stopped_by):
        return REQUEUE
    if is_led(ends, REWOUND):
        return REWOUND
    if stopped_by is not None:
        return 128 + stopped_by
    if is_led(ends, INTERRUPTED):
        return INTERRUPTED
    first = first_failure(ends)
    if first is None:
        return 1
    return first.status if first.status > 0 else 128 - first.status


def is_requeue(ends: Sequence[RankEnd], stopped_by: int | None) -> bool:
    """Whether the ranks ended because their place is taken away: nothing failed or is lost.

    That is so where the first rank that ended reports it: the other ends are then consequences. It
    is also so where a signal that announces it ended ranks that had not trained yet.
    """
    ended = [end for end in ends if end.status]
    if not ended:
        return False
    first = min(ended, key=lambda end: (end.after_s, end.status == REQUEUE))
    if first.status == REQUEUE:
        return not any(end.status == DO_NOT_RETRY or end.hung for end in ends)
    return stopped_by in PREEMPTING and all(
        end.status == REQUEUE or (end.was_stopped and end.phase in ("start", "load"))
        for end in ended
    )


def is_led(ends: Sequence[RankEnd], status: int) -> bool:
    """Whether the first rank that ended left with `status`: rewound, or by a Ctrl-C of its own.

    The errors of ranks that lost it are then consequences.
    """
    first = min(ends, key=lambda end: (end.after_s, end.status != status), default=None)
    bad = any(end.status in (DO_NOT_RETRY, REQUEUE) or end.hung for end in ends)
    return first is not None and first.status == status and not bad


def cause_of(ends: Sequence[RankEnd], stopped_by: int | None = None) -> str:
    """The cause of an attempt's end, as its line in events.jsonl has it."""
    status = exit_status(ends, stopped_by)
    if status in AGREED:
        return AGREED[status]
    first = first_failure(ends)
    if stopped_by is not None:
        return "stopped"
    if first is None:
        # Their hosts ended them, and nobody here asked: they no longer heard this process.
        return "killed" if any(end.was_stopped for end in ends) else "failed"
    if first.is_lost:
        return "lost_host"
    if first.hung:
        return "hung"
    if first.status == DO_NOT_RETRY:
        return "refused"
    if first.is_oom or any(OUT_OF_MEMORY.search(line) for line in first.last):
        return "out_of_memory"
    return "killed" if first.status < 0 else "failed"


def explain(ends: Sequence[RankEnd], num_ranks: int) -> list[str]:
    """The first failure for a person: who, how, where its log is, and its last output."""
    first = first_failure(ends)
    if first is None:
        return []
    words = first.stack if first.hung else last_words(first.last)
    if words and (first.is_lost or first.status == DO_NOT_RETRY):
        return words  # whole sentences that need no frame
    where = f" on {first.host}" if first.host else ""
    who = f"rank {first.rank} of {num_ranks}{where} " if num_ranks > 1 else f"the run{where} "
    what = f"{how(first.status)} after {first.after_s:.0f} s"
    what += ", first of all" if num_ranks > 1 else ""
    if first.hung:
        what = f"{first.hung}; all ranks were killed, their stacks are in their logs"
    lines = [f"failed: {who}{what}" + (f"; its log: {first.log}" if first.log else "")]
    return lines + [f"  | {line}" for line in words]


def how(status: int) -> str:
    """A phrase for an exit status: `ended with exit status 3`, `was killed by SIGKILL (...)`."""
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
    """The part of an error output that explains the end.

    That is: refusals, else the last traceback, else the last lines.
    """
    refusals = [line for line in lines if re.match(r"(refused|failed)( on rank \d+)?: ", line)]
    if refusals:
        return list(dict.fromkeys(refusals))[-SHOWN_LINES:]
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if starts:
        return list(lines[starts[-1] :])[-SHOWN_LINES:]
    return [line for line in lines if line.strip()][-10:]
