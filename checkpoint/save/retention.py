"""Decides which old checkpoints are removed after a save, and removes them.

Rule: a checkpoint is removed only after a newer one was committed and read back. A folder is
renamed before its files are removed, so a half removed one is never taken for a checkpoint. No
torch. Units: steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from checkpoint.format.blocks import Damaged
from checkpoint.format.epochs import Fence
from checkpoint.format.index_file import Point, nothing
from checkpoint.format.manifest import abandoned, committed, read_manifest


@dataclass(frozen=True)
class Keep:
    """The checkpoints to keep: the `newest` ones, one each `every` steps for ever (0 = none), and
    the one of best health.
    """

    newest: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if self.newest < 1 or self.every < 0:
            raise ValueError(f"{self}: newest must be at least 1, every at least 0")


KEEP = Keep()


def best(states: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the step of best health among {step: state of the run}; None where none has a
    validation loss. Pure.

    The best has the lowest validation loss since the save before it (`health.val_loss`), among
    those with no skipped step since that save (`health.skipped_since_save`); the latest of equal
    ones.
    """
    found = []
    for step, state in states.items():
        health = state.get("health") or {}
        loss = health.get("val_loss")
        is_number = isinstance(loss, int | float) and not isinstance(loss, bool)
        if is_number and math.isfinite(loss) and health.get("skipped_since_save", 0) == 0:
            found.append((-loss, step))
    return max(found)[1] if found else None


def removable(
    steps: Sequence[int], keep: Keep, verified: int, healthiest: int | None = None
) -> list[int]:
    """Return the steps that may be removed once `verified` is committed and read back. Pure.

    Only older ones are removed. A checkpoint newer than the verified one belongs to another attempt
    or segment, and does not count among the newest that stay.
    """
    older = sorted(step for step in steps if step <= verified)
    stay = {verified, healthiest, *older[-keep.newest :]}
    if keep.every:
        stay |= {step for step in older if step % keep.every == 0}
    return [step for step in older if step not in stay]


def prune(
    checkpoints: Path, keep: Keep, verified: int, fence: Fence, point: Point = nothing
) -> list[int]:
    """Remove the checkpoints that `removable` names, and abandoned ones that are `outlived`; return
    their steps. Raises Fenced, also between two removals.

    Each folder is renamed first, so that a half removed one is never taken for a checkpoint.
    """
    folders = dict(committed(checkpoints))
    gone = removable(list(folders), keep, verified, best(_states(folders)))
    passed = [found for found in abandoned(checkpoints) if outlived(found[0], keep, verified)]
    for path in [*(folders[step] for step in gone), *(path for *_, path in passed)]:
        doomed = checkpoints / f"{path.name}.gone-{fence.epoch}"
        point("rename old", 0)
        fence.check()
        os.rename(path, doomed)
        point("remove old", 0)
        shutil.rmtree(doomed)
    return [*gone, *(step for step, *_ in passed)]


def _states(folders: Mapping[int, Path]) -> dict[int, dict[str, Any]]:
    """Return the state of each checkpoint that has a valid manifest."""
    states = {}
    for step, folder in folders.items():
        with contextlib.suppress(Damaged, UserError):
            states[step] = read_manifest(folder).state
    return states


def outlived(step: int, keep: Keep, verified: int) -> bool:
    """Return whether a checkpoint of an abandoned segment may be removed: the run has reached its
    step again. Until then a person may still go back to it. Pure.
    """
    return step <= verified and not (keep.every and step % keep.every == 0)
