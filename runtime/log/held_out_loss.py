"""The numbers of an evaluation: validation loss, bits per byte, and both for each source.

    validation.numbers(losses) -> (val_loss, bits_per_byte, more scalars by name)

Rule: bits per byte = summed loss in nats / (ln 2 x UTF-8 bytes of the targets' text). The end of a
document is a target without bytes, so what it costs counts. Losses per source, weighted with their
targets, add up to the pooled loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Validation:
    """The sources of a run's evaluation set, and the UTF-8 bytes of each one's targets over all
    ranks; `num_bytes` is None where they are not known.
    """

    uids: list[str]
    num_bytes: list[int] | None

    def numbers(
        self, losses: Sequence[Sequence[float]]
    ) -> tuple[float, float | None, dict[str, float]]:
        """Mean loss in nats per token, bits per byte, and the numbers of each source by tag, where
        there are several. `losses` = (summed loss, targets) of each source.
        """
        sums = np.array(losses, dtype=np.float64)
        total, targets = sums.sum(axis=0)
        sizes = self.num_bytes
        by_source: dict[str, float] = {}
        if len(self.uids) > 1:
            for number, (uid, (loss, count)) in enumerate(zip(self.uids, sums, strict=True)):
                by_source[f"validation/loss/{uid}"] = mean(loss, count)
                if sizes:
                    by_source[f"validation/bits_per_byte/{uid}"] = bits(loss, sizes[number])
        pooled = float(np.float32(mean(total, targets)))
        return pooled, bits(total, sum(sizes)) if sizes else None, by_source


def mean(loss: float, targets: float) -> float:
    """Nats per target; NaN where there is no target."""
    return float(loss / targets) if targets else math.nan


def bits(loss: float, num_bytes: int) -> float:
    """Bits per byte of a summed loss in nats; NaN where there is no byte."""
    return float(loss / (math.log(2) * num_bytes)) if num_bytes else math.nan
