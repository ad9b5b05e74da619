"""Checks that a run used each sample once, from the ledger lines of its current lineage.

    steps 1 2 3 4 5 ...   each once, none missing
    data steps            ascending; between two steps only ranges that the skip list leaves out
    samples [a, b)        each range begins where the one before ended, or behind a left-out range

Rule: the ledger is judged by its own lines and the skip list alone. Units: samples count over the
whole run, epochs included; ranges [first, end).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data.stream.skips import Skips


def use_problems(
    lines: Sequence[dict], skips: Skips, samples: Callable[[dict], tuple[int, int]]
) -> list[str]:
    """Problems that show a sample was not used exactly once, one line each.

    lines: the ledger lines of the lineage in order of step; samples: gives the range of samples
    that a line should have.
    """
    problems = []
    for before, line in zip([None, *lines], lines, strict=False):
        step, data_step = line["step"], line["data_step"]
        if before is not None and step != before["step"] + 1:
            what = "is recorded twice" if step == before["step"] else "has a gap before it"
            problems.append(f"step {step} {what}: step {before['step']} comes before it")
        if data_step != skips.data_step(step):
            problems.append(
                f"step {step} used data step {data_step}; by the skip list it is data step"
                f" {skips.data_step(step)}"
            )
        if tuple(line["samples"]) != tuple(samples(line)):
            problems.append(
                f"step {step} used samples {line['samples']}; data step {data_step} has"
                f" {list(samples(line))}"
            )
    return problems
