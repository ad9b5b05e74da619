"""`make audit-diff A= B=`: find the first step with different batches in two runs, from their
ledgers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED
from base.paths import ROOT
from base.table import table
from checkpoint.lineage import lineage, run_folder
from data.stream.ledger import read_ledger
from record import history

AGREES, DIFFERS = FINISHED, FAILED


def main(arguments: Sequence[str]) -> int:
    """Entry of `make audit-diff`; returns the exit status: 1 where the batches differ."""
    parser = Parser(prog="make audit-diff", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("other", help="another run to compare with")
    options = parser.parse_args(arguments)
    try:
        return diff(ledger_of(options.run), ledger_of(options.other), options.run, options.other)
    except UserError as error:
        return refuse(error)


def diff(one: dict[int, dict], two: dict[int, dict], name: str, other: str) -> int:
    """Print the first step in which the batches of two runs differ; returns the exit status."""
    both = sorted(set(one) & set(two))
    if not both:
        raise UserError(f"{name} and {other} have no step in common")
    fields = ("batch_hash", "data_step", "targets", "update")
    wrong = [s for s in both if any(one[s].get(f, True) != two[s].get(f, True) for f in fields)]
    print(f"{name}: steps {min(one)} to {max(one)}; {other}: steps {min(two)} to {max(two)}")
    if not wrong:
        print(f"the batches of all {len(both)} steps in both are equal")
        return AGREES
    print(f"{len(wrong)} of {len(both)} steps in both differ, the first is step {wrong[0]}:")
    rows = [["", "data step", "samples", "batch hash", "targets"]]
    for label, line in ((name, one[wrong[0]]), (other, two[wrong[0]])):
        low, high = line["samples"]
        rows.append(
            [label, str(line["data_step"]), f"{low} to {high - 1}", line["batch_hash"]]
            + [f"{line['targets']}" + ("" if line.get("update", True) else ", no update")]
        )
    print(table(rows))
    return DIFFERS


def ledger_of(name: str) -> dict[int, dict]:
    """Ledger lines of a run's current lineage by train step."""
    folder = run_folder(name, ROOT)
    own = lineage(history.read(folder), None).own(list(read_ledger(folder / "ledger")))
    return {line["step"]: line for line in own}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
