"""Decides which readings of a GPU are an alarm: pure functions over the history of one card.

    reading (every 10 s or so) -> CardWatch.add -> [Alarm, ...]

    temperature   near the slowdown temperature of this card, or on the way there
    throttle      clocks held down by heat, power supply or a fault, while the card works
    ecc, remap    uncorrected errors that were not there before; rows that wait to be remapped, or
                  cannot be
    lost, xid     the driver gave the card up, or reported an error

Rule: one alarm per trouble, not per reading. A trouble that comes and goes is one trouble until it
has been gone for CLEAR_S. A trouble that is there at the first reading is reported once. Limits are
the card's own. Units: degrees Celsius, seconds.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runtime.monitor.device_table import BAD_THROTTLE, DRAIN, IGNORE, THROTTLE, Ailment, ailments

CLEAR_S = 300.0
LOADED_PERCENT = 10  # a card that idles is cold, and its clocks are down for good reason
NEAR_C = 2  # distance to the slowdown temperature that is an alarm
TREND_C = 15  # at a larger distance a rising temperature is a normal start
# Lengths of history that a trend is taken from; it is extended by half of that. The temperature of
# a card that warms up levels off: a line that is extended by less than the time constant of that
# curve stays below its end, and a quicker curve levels off visibly.
TRENDS_S = (60.0, 300.0, 1800.0)
LEVELLING = 0.7  # slope of the later half / that of the earlier; below this it levels off
LEAST_READINGS = 5
Reading = Mapping[str, Any]


class Alarm(NamedTuple):
    """One trouble of one card. `index` None: a trouble of the host whose card is not known."""

    index: int | None
    what: str
    action: str
    text: str

    @property
    def is_quiet(self) -> bool:
        """True where it is recorded but not shown."""
        return self.action == IGNORE


class CardWatch:
    """The recent history of one card, and the troubles that have been reported."""

    def __init__(self) -> None:
        self._temperatures: deque[tuple[float, float]] = deque()
        self._reported: dict[str, float] = {}  # what -> when it was last seen
        self._uncorrected: int | None = None

    def add(self, reading: Reading, at_s: float) -> list[Alarm]:
        """The troubles that are new with this reading; `at_s` is its time by a steady clock."""
        if (temperature := reading.get("temperature_c")) is not None:
            self._temperatures.append((at_s, temperature))
            while self._temperatures[0][0] < at_s - TRENDS_S[-1]:
                self._temperatures.popleft()
        found = [*self._states(reading), *throttled(reading), *heat(reading, self._temperatures)]
        new = []
        for trouble in found:
            seen = self._reported.get(trouble.what)
            if seen is None or at_s - seen > CLEAR_S:
                new.append(Alarm(reading["index"], *trouble))
            self._reported[trouble.what] = at_s
        return new

    def _states(self, reading: Reading) -> list[Ailment]:
        """Errors and states of the card; each rise of uncorrected errors is a new trouble."""
        found = [each for each in ailments(reading) if each.what != "ecc"]
        errors, before = reading.get("ecc_uncorrected"), self._uncorrected
        if errors is not None:
            self._uncorrected = errors
            if errors > (before or 0):
                what, action, text = next(e for e in ailments(reading) if e.what == "ecc")
                more = "" if before is None else f", {errors - before} more than before"
                found.append(Ailment(f"{what} {errors}", action, text + more))
        return found


def throttled(reading: Reading) -> list[Ailment]:
    """Reasons that hold the clocks of a busy card down and that a healthy card does not have."""
    bits, load = reading.get("throttle") or 0, reading.get("utilization_percent")
    if load is not None and load < LOADED_PERCENT:
        return []
    clock = reading.get("sm_clock_mhz")
    at = "" if clock is None else f" ({clock} MHz)"
    return [
        Ailment(f"throttle {THROTTLE[bit]}", DRAIN, f"{THROTTLE[bit]}{at}: {meaning}")
        for bit, meaning in BAD_THROTTLE.items()
        if bits & bit
    ]


def heat(reading: Reading, history: Sequence[tuple[float, float]]) -> list[Ailment]:
    """The trouble of a card that is at its slowdown temperature, or soon will be."""
    temperature, limit = reading.get("temperature_c"), reading.get("slowdown_c")
    if temperature is None or limit is None:
        return []
    if temperature >= limit - NEAR_C:
        text = f"{temperature} C, its clocks go down at {limit} C: look at fans, air flow, coolant"
        return [Ailment("temperature", DRAIN, text)]
    if temperature < limit - TREND_C:
        return []
    for length_s in TRENDS_S:
        slope = trend(history, length_s)
        if slope is not None and temperature + slope * length_s / 2 >= limit:
            in_min = (limit - temperature) / slope / 60
            text = (
                f"{temperature} C, {slope * 60:.2g} C more each minute: its clocks go down at"
                f" {limit} C, in {in_min:.1f} min; look at fans, air flow, coolant"
            )
            return [Ailment("temperature trend", DRAIN, text)]
    return []


def trend(history: Sequence[tuple[float, float]], length_s: float) -> float | None:
    """Degrees per second over the last `length_s` seconds.

    None where the temperature does not rise, or levels off, or the history is shorter.
    """
    if not history:
        return None
    now = history[-1][0]
    recent = [(at, value) for at, value in history if at >= now - length_s]
    if len(recent) < LEAST_READINGS or now - recent[0][0] < 0.8 * length_s:
        return None
    # Medians of thirds: one wrong reading changes none of them.
    third = len(recent) // 3 or 1
    parts = (recent[:third], recent[third:-third], recent[-third:])
    (began, low), (between, middle), (ended, high) = (
        (statistics.fmean(at for at, _ in part), statistics.median(value for _, value in part))
        for part in parts
    )
    earlier, later = (middle - low) / (between - began), (high - middle) / (ended - between)
    if later <= 0 or later < LEVELLING * earlier:
        return None
    return (high - low) / (ended - began)
