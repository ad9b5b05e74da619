"""What follows a verdict that ends an attempt: the run is taken back to a healthy checkpoint, or
stops.

    roll back -> newest healthy checkpoint at least `health.rewind` steps before the trouble, else
                 the oldest healthy one before it -> one line of history.jsonl -> exit status 76
    stop      -> a bundle for a person -> exit status 93

The one rule: rank 0 decides from what lies on the disk, every rank leaves. Skipped are the data
steps from the checkpoint's position to the last one seen (as in PaLM, Chowdhery et al. 2022, 5.1),
and `health.skip` of them at the least. Units: steps; ranges [first, end) of data steps.
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
from runtime.health.verdict import Health, Judgement, Verdict


class Rewound(Exception):
    """The run was taken back; the same command goes on from there."""


class Saved(NamedTuple):
    """A checkpoint that could be gone back to."""

    step: int
    data_step: int  # that comes next
    is_well: bool


@dataclass(frozen=True)
class Plan:
    """The checkpoint to go back to, and the data steps to leave out from there."""

    step: int
    skip: tuple[int, int]


def plan(saved: Iterable[Saved], onset: int, data_step: int, knobs: Knobs) -> Plan | None:
    """Where to go back to from trouble that began at step `onset` and was seen at `data_step`; None
    where no healthy checkpoint is older. Pure."""
    healthy = sorted(one for one in saved if one.is_well and one.step < onset)
    if not healthy:
        return None
    early = [one for one in healthy if one.step <= onset - knobs.rewind]
    target = early[-1] if early else healthy[0]
    end = max(data_step + 1, target.data_step + knobs.skip)
    return Plan(target.step, (target.data_step, end))


def saved_states(folder: Path) -> list[Saved]:
    """The whole checkpoints of the run's current lineage, by their manifests."""
    found = []
    for step, path in committed(folder / "checkpoints"):
        try:
            manifest = read_manifest(path)
            if size_problems(path, manifest):
                continue
            state = manifest.state
            is_well = Health.from_dict(state["health"]).is_well
            found.append(Saved(step, state["data"]["past"]["data_step"], is_well))
        except (Damaged, UserError, KeyError, TypeError):
            continue  # what cannot be read is not gone back to; loading would say so aloud
    return found


def recover(folder: Path, data: Any, judgement: Judgement, knobs: Knobs, record: Any) -> Plan:
    """Rank 0: take the run back after the step of `data` and put that on record.

    Raises UserError where the run must stop, with everything a person needs in a bundle.
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
            reason += f"; the run could not be taken back: {error}"
            chosen = None
    if chosen is None:
        raise UserError(stopped(folder, data.step, reason, judgement, record))
    first, end = chosen.skip
    record.alert(
        "roll_back",
        f"{folder.name}: step {data.step}: {reason}; taken back to step {chosen.step}, data steps"
        f" {first} to {end - 1} are left out",
        step=data.step,
        to_step=chosen.step,
        skip=[first, end],
        reason=reason,
    )
    record.close("rewound", step=data.step)
    return chosen


def stopped(folder: Path, step: int, reason: str, judgement: Judgement, record: Any) -> str:
    """Write the bundle, tell, and say why the run ended before its last step, and what to do."""
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
        f"stopped after step {step}: {reason}. What a person needs is in {where}; lower optim.lr,"
        " leave out bad data (data.skip), go back by hand (make rewind), or change health.*"
    )
