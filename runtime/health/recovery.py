"""Recovery after a verdict that ends an attempt: the run is rewound, or it stops.

    roll back -> newest healthy checkpoint at least `health.rewind` steps before the trouble, else
                 the oldest healthy one before it -> one line of history.jsonl -> exit status 76
    stop      -> a bundle for a person -> exit status 93

Rule: rank 0 decides from the checkpoints on the disk, and every rank ends. The data steps from the
checkpoint's position to the last one seen are skipped (as in PaLM, Chowdhery et al. 2022, section
5.1), and at least `health.skip` of them. Units: steps; ranges [first, end) of data steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import UserError
from base.jsonl import encode
from base.redaction import redacted, secret_values
from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import committed, read_manifest, size_problems
from recipes.faults import Health as Knobs
from record import history
from record.bundle import write_bundle
from runtime.health.verdict import HealthState, Judgement, Verdict


class Rewound(Exception):
    """Raised after the run was rewound; the same command goes on from there."""


class Saved(NamedTuple):
    """A checkpoint to which the run could be rewound."""

    step: int
    data_step: int  # the data step that comes next
    is_well: bool


@dataclass(frozen=True)
class RecoveryPlan:
    """The checkpoint to go back to, and the data steps to skip from there."""

    step: int
    skip: tuple[int, int]


def plan(saved: Iterable[Saved], onset: int, data_step: int, knobs: Knobs) -> RecoveryPlan | None:
    """The checkpoint to go back to from trouble that began at step `onset`, seen at `data_step`.

    None where no healthy checkpoint is older than the trouble. Pure.
    """
    healthy = sorted(one for one in saved if one.is_well and one.step < onset)
    if not healthy:
        return None
    early = [one for one in healthy if one.step <= onset - knobs.rewind]
    target = early[-1] if early else healthy[0]
    end = max(data_step + 1, target.data_step + knobs.skip)
    return RecoveryPlan(target.step, (target.data_step, end))


def saved_states(folder: Path) -> list[Saved]:
    """The whole checkpoints of the run's current lineage, oldest first, from their manifests."""
    found = []
    for step, path in committed(folder / "checkpoints"):
        try:
            manifest = read_manifest(path)
            if size_problems(path, manifest):
                continue
            state = manifest.state
            is_well = HealthState.from_dict(state["health"]).is_well
            found.append(Saved(step, state["data"]["past"]["data_step"], is_well))
        except (Damaged, UserError, KeyError, TypeError):
            continue  # one that cannot be read is no target; loading it would report the damage
    return found


def recover(
    folder: Path, data: Any, judgement: Judgement, knobs: Knobs, record: Any
) -> RecoveryPlan:
    """Rewind the run after the step of `data` and record that; only rank 0 calls it.

    Raises UserError where the run must stop; a bundle with everything a person needs is written
    first.
    """
    chosen, reason = None, judgement.reason
    if judgement.verdict == Verdict.ROLL_BACK:
        chosen = plan(saved_states(folder), judgement.onset, data.data_step, knobs)
        if chosen is None:
            reason += f"; there is no healthy checkpoint from before step {judgement.onset}"
    if chosen is not None:
        try:
            history.rewind(folder, chosen.step, chosen.skip, why=reason, who="policy")
        except UserError as error:
            reason += f"; the run could not be rewound: {error}"
            chosen = None
    if chosen is None:
        raise UserError(stopped(folder, data.step, reason, judgement, record))
    first, end = chosen.skip
    record.alert(
        "roll_back",
        f"{folder.name}: step {data.step}: {reason}; rewound to step {chosen.step}, data steps"
        f" {first} to {end - 1} are skipped",
        step=data.step,
        to_step=chosen.step,
        skip=[first, end],
        reason=reason,
    )
    record.close("rewound", step=data.step)
    return chosen


def stopped(folder: Path, step: int, reason: str, judgement: Judgement, record: Any) -> str:
    """Write the bundle and send the alert; returns why the run ended early and what to do."""
    verdict = {
        "step": step,
        "verdict": str(Verdict.STOP),
        "reason": reason,
        "trouble_began_at_step": judgement.onset,
        "bad_steps": [
            {"step": bad, "data_step": data_step} for bad, data_step in judgement.health.bad
        ],
        "best_loss": judgement.health.best_loss,
        "best_loss_at_step": judgement.health.best_step,
    }
    try:
        known = secret_values(os.environ)
        texts = {
            "WHY.txt": f"{reason}\n",
            "verdict.json": encode(redacted(verdict, known)).decode(),
        }
        bundle = write_bundle(folder, f"step-{step:08d}", texts)
        where = f"runs/{folder.name}/{bundle.relative_to(folder)}/"
    except OSError as error:  # a full disk must not hide why the run stopped
        bundle, where = None, f"{folder}/events.jsonl (no bundle: {error})"
    shown = None if bundle is None else str(bundle.relative_to(folder))
    record.alert("stop", f"{folder.name}: stopped after step {step}: {reason}", step=step,
                 reason=reason, bundle=shown)  # fmt: skip
    record.close("gave_up", step=step, reason=reason)
    return (
        f"stopped after step {step}: {reason}. Everything about it is in {where}. Lower optim.lr,"
        " skip bad data (data.skip), rewind by hand (make rewind), or change health.*"
    )
