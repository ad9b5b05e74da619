"""Knobs of what a run writes, saves and watches; they do not change its numbers.

A part of `recipes.schema`, under the same rule: a knob exists here or nowhere. Units: steps and
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from base.values import MANY, knob
from recipes.faults import LONG


@dataclass(frozen=True)
class Log:
    """Output while training."""

    every: int = knob(1, "steps between console lines when piped", unit="steps", low=1, high=MANY)
    tensorboard: bool = knob(True, "write event files")
    wandb: str | None = knob(
        None, "project name: mirror TensorBoard to Weights & Biases; null = off"
    )
    communication: bool = knob(False, "count the bytes of every step's collectives")
    profile: str | None = knob(
        None,
        "A:B records steps A to B-1 with torch's profiler, into runs/<run>/profile/; null = off",
        unit="steps",
    )


@dataclass(frozen=True)
class Checkpoint:
    """When the state of a run is saved, and which checkpoints are kept."""

    interval: Any = knob(
        "auto",
        "steps between saves; 0 = only at the end (and at stop_after); auto = by time (minutes), or"
        " by Young's formula where cluster.mtbf_hours is given",
        unit="steps",
        kind="integer or auto",
    )
    minutes: float | None = knob(
        None,
        "with interval=auto: work that a kill may lose; null = 10, or what Young's formula gives",
        unit="minutes",
        above=0,
        high=1e6,
    )
    mode: str = knob(
        "auto",
        "async: the state is copied in host memory (12 bytes for each parameter that a rank owns),"
        " and written while training goes on; sync: training waits until it is on disk; auto ="
        " async on GPUs",
        choices=("auto", "sync", "async"),
    )
    stuck_s: int = knob(
        600,
        "async: a save in flight for longer raises an alarm; training goes on without further saves"
        " until it ends",
        unit="seconds",
        low=1,
        high=LONG,
    )
    on_drift: str = knob(
        "warn",
        "ranks whose copies of the same weights differ at a save: warn and save, or stop the run",
        choices=("warn", "stop"),
    )
    keep: int = knob(3, "newest checkpoints that stay", low=1, high=2**20)
    keep_every: int = knob(
        0,
        "checkpoints at multiples of this stay for ever; 0 = none",
        unit="steps",
        low=0,
        high=MANY,
    )
    verify: str = knob(
        "sampled",
        "how much of a save is read back before older ones go",
        choices=("sampled", "full"),
    )
    at_end: bool = knob(True, "save after the last step too; false = a trial to be thrown away")


@dataclass(frozen=True)
class Hardware:
    """Readings of the machines while a run trains."""

    every_s: float | None = knob(
        None,
        "time between readings of every GPU; 0 = none; null = 10 where the run trains on GPUs, else"
        " none",
        unit="seconds",
        low=0,
        high=3600,
    )
    timeout_s: float = knob(
        20.0,
        "a reading that takes longer is given up and its process started anew",
        unit="seconds",
        above=0,
        high=3600,
    )
    own_times: bool = knob(
        True, "time every rank's own work, without its waits, and name a rank that is slow"
    )
