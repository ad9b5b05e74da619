"""Why the choices that the plan did not take lost, for the run folder's plan.json.

    Ranking  ->  the fastest losers with the seconds that they lose, the nearest that do not fit
                 with the GiB that they lack and the nearest change under which they would fit

Rule: nothing is computed here that the search did not compute. Units: seconds of a step, GiB.
"""

from __future__ import annotations

from typing import Any

from base.units import GIB
from plan.memory_use import RESERVE
from plan.search import TIE, Option, Ranking, why_slower

KEPT = 40  # losers of each kind; the counts say how many there were


def losers_of(found: Ranking, winner: Option) -> dict[str, Any]:
    """The losers of a search as plain values."""
    slower = [option for option in [*found.best, *found.edge] if option is not winner]
    rules = sorted(found.refused.items(), key=lambda item: -item[1])
    return {
        "options": len(found.best) + len(found.edge) + len(found.large),
        "slower": [slower_than(option, winner) for option in slower[:KEPT]],
        "too_large": [too_large(option, found) for option in found.large[:KEPT]],
        "illegal": [{"rule": rule, "choices": count} for rule, count in rules],
    }


def slower_than(option: Option, winner: Option) -> dict[str, Any]:
    """One that could run: seconds that it loses for the tokens of a step of the winner."""
    seconds = option.time.total * winner.job.tokens / option.job.tokens - winner.time.total
    is_tie = abs(seconds) <= TIE * winner.time.total
    return {
        "knobs": option.knobs,
        "state": option.state,
        "loses_s": seconds,
        "why": "a tie: more kinds of parallelism, or more memory"
        if is_tie
        else why_slower(option, winner),
    }


def too_large(option: Option, found: Ranking) -> dict[str, Any]:
    """One that does not fit: GiB that it lacks, on the card or on a host, and what would help."""
    lacks = (option.memory.peak + RESERVE - option.machine.usable_bytes) / GIB
    lacks_host = (option.host_bytes - option.machine.usable_host_bytes) / GIB
    return {
        "knobs": option.knobs,
        "lacks_gib": max(0.0, lacks),
        "lacks_host_gib": max(0.0, lacks_host),
        "would_fit": nearest_change(option, found),
    }


def nearest_change(option: Option, found: Ranking) -> str:
    """The option that fits and shares most knobs with one that does not; "" where none fits."""
    best = max(found.best, key=lambda other: shared(option, other), default=None)
    if best is None:
        return ""
    words = set(option.knobs.split())
    changed = " ".join(word for word in best.knobs.split() if word not in words)
    return f"{changed} ({best.memory.peak / GIB:.1f} GiB)"


def shared(one: Option, other: Option) -> tuple[int, float]:
    """(knobs that two options share, speed of the other)."""
    return len(set(one.knobs.split()) & set(other.knobs.split())), other.tokens_per_s
