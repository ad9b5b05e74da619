"""Knobs of what happens when something fails: health, alerts, silence and restarts.

A part of `recipes.schema`, under the same rule: a knob exists here or nowhere. Units: steps, nats,
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from base.values import MANY, knob

LONG = 10**7  # seconds: four months; every timer accepts it


@dataclass(frozen=True)
class Health:
    """Limits of a healthy step, and what happens beyond them; `docs/spikes.md` explains tuning.

    A step that is not finite is always skipped. Outliers are finite steps far above the median of
    the steps before them; they are rare and cheap to leave out.
    """

    outliers: str = knob(
        "skip",
        "a finite step far above the usual: skip = the weights do not move; keep = it trains, but"
        " counts as bad; off = not looked for",
        choices=("skip", "keep", "off"),
    )
    norm_factor: float = knob(
        6.0,
        "an outlier's gradient norm is at least this many times the median (clipping already bounds"
        " what a norm of 2 or 3 times can do)",
        above=1,
        high=1e6,
    )
    loss_rise: float = knob(
        0.5,
        "an outlier's loss is at least this far above the median (one batch of another kind of text"
        " moves it less, a spike more)",
        unit="nats",
        above=0,
        high=1e6,
    )
    sigmas: float = knob(
        8.0,
        "an outlier is at least this many standard deviations above the median (heavy tails reach"
        " 6)",
        above=0,
        high=1e6,
    )
    window: int = knob(
        128,
        "accepted steps that medians and deviations are taken over",
        unit="steps",
        low=16,
        high=2**14,
    )
    tolerant: int = knob(
        64,
        "accepted steps before anything is an outlier, from the start and from each change of batch"
        " size or mixture (early losses fall fast); in the warm-up limits are twice as wide",
        unit="steps",
        low=16,
        high=2**14,
    )
    max_skips: int = knob(
        3,
        "non-finite steps in a row that are trouble (weights that give three will give more)",
        unit="steps",
        low=1,
        high=MANY,
    )
    patience: int = knob(
        8,
        "bad steps among the last 4 times as many that are trouble (a bad batch or two is not);"
        " 0 = never",
        unit="steps",
        low=0,
        high=2**14,
    )
    drift: float = knob(
        0.5,
        "rise of the median loss above its lowest that is trouble (a healthy run hardly rises);"
        " 0 = never",
        unit="nats",
        low=0,
        high=1e6,
    )
    rewind: int = knob(
        100,
        "in trouble go back this many steps before it began, to the newest healthy checkpoint"
        " there (as PaLM did); 0 = stop instead",
        unit="steps",
        low=0,
        high=MANY,
    )
    skip: int = knob(
        200,
        "batches left out after a rewind, at the least; always all that were seen since (PaLM left"
        " out 200 to 500)",
        unit="steps",
        low=0,
        high=MANY,
    )
    max_rewinds: int = knob(
        3,
        "rewinds within 10 x health.rewind steps; after them the run stops (what three cannot cure"
        " is not in the data)",
        low=1,
        high=2**20,
    )


@dataclass(frozen=True)
class Alerts:
    """The command that is started for each alert."""

    command: Any = knob(
        (),
        "[program, argument, ...] started for each alert without a shell; the text comes on its"
        " standard input and in ALERT_TEXT, the kind in ALERT_KIND; [] = none",
        kind="list of texts",
    )
    timeout_s: int = knob(10, "the command is killed after this", unit="seconds", low=1, high=600)


@dataclass(frozen=True)
class Restart:
    """Restarts: the launcher starts failed ranks again from the newest checkpoint."""

    attempts: int = knob(
        3,
        "attempts in a row without a newer step that end the run; 0 = never start again",
        low=0,
        high=2**20,
    )
    wait_s: int = knob(
        1800, "how long to wait for a lost host where no spare is left", low=0, high=LONG
    )
    shrink: bool = knob(False, "then go on with the hosts that are left; false = stop")
    host_failures: int = knob(
        3, "failures within a day that bar a host from the run", low=1, high=2**20
    )


@dataclass(frozen=True)
class Watch:
    """Seconds that a rank may be silent before its attempt is ended as hung; 0 = for ever."""

    start_s: int = knob(
        3600, "from the start of the process, and in its first steps", low=0, high=LONG
    )
    load_s: int = knob(3600, "while a checkpoint is loaded", low=0, high=LONG)
    step_s: int = knob(
        240, "in a step, or step_factor usual ones where that is longer", low=0, high=LONG
    )
    step_factor: float = knob(10.0, "see step_s", low=1, high=1e6)
    evaluate_s: int = knob(1800, "in an evaluation", low=0, high=LONG)
    save_s: int = knob(1800, "in a save", low=0, high=LONG)
    end_s: int = knob(1800, "after the last step", low=0, high=LONG)
    grace_s: int = knob(
        300, "from a request to end (Ctrl-C, SIGTERM) until it is killed", low=1, high=LONG
    )
