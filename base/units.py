"""Units of memory and time."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30  # bytes


def duration(seconds: float) -> str:
    """Seconds as text in at most two units: 45 s, 2 min 31 s, 3 h 05 min, 2 d 04 h."""
    whole = round(seconds)
    for size, unit, part, part_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {part_unit}"
    return f"{whole} s"
