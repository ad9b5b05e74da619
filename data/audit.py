"""`make audit`: what a run trained on, computed from its recipe and held against its ledger.

    python -m data.audit RUN                    rebuild recorded steps, compare hashes (--every k)
    python -m data.audit RUN --step 120 [--text]   the documents in step 120
    python -m data.audit RUN --doc 17           every step that sees document 17; --doc code:17
    python -m data.audit RUN --diff OTHER       where two runs begin to differ

RUN is a run folder or a name under runs/. Its one rule: nothing is believed that the recorded hash
does not confirm. Where a run was changed on the way, each step is rebuilt with the recipe that held
then (history.jsonl).

Exit status: 0 = all agrees; 1 = it does not; 2 = there is nothing to audit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint import history
from data.ledger import batch_hash, read_ledger
from data.schedule import read_schedule
from data.stream import Stream, open_stream
from data.tokenizer import load_tokenizer
from data.trace import origins, pieces_of_step, steps_of_document
from model.cost import num_parameters
from recipes.check import to_recipe
from recipes.compose import compose
from recipes.schema import Recipe, UserError
from recipes.table import table
from runtime.settle import length_in_steps

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 40  # of a table of steps; the rest is counted
AGREES, DIFFERS, NOTHING = 0, 1, 2


@dataclass(frozen=True)
class Era:
    """Train steps [first, end) that one recipe holds for."""

    first: int
    end: int
    stream: Stream


@dataclass(frozen=True)
class Audited:
    """A run: the recipes it had, and what it recorded."""

    name: str
    eras: list[Era]
    lines: dict[int, dict]  # train step -> ledger line, the newest of each
    steps: int  # planned length

    def era(self, step: int) -> Era:
        return next(era for era in self.eras if era.first <= step < era.end)


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m data.audit`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", type=int, help="train step to look at")
    parser.add_argument("--doc", help="document number, or SOURCE:NUMBER")
    parser.add_argument("--diff", metavar="OTHER", help="another run to compare with")
    parser.add_argument("--text", action="store_true", help="print the text, too")
    parser.add_argument("--every", type=int, default=1, help="check every k-th recorded step")
    options = parser.parse_args(arguments)
    try:
        if options.diff is not None:
            return diff(ledger_of(options.run), ledger_of(options.diff), options.run, options.diff)
        run = open_run(run_folder(options.run))
        if options.step is not None:
            return show_step(run, options.step, options.text)
        if options.doc is not None:
            return show_document(run, options.doc, options.text)
        return check(run, max(options.every, 1))
    except UserError as error:
        for problem in error.problems:
            print(f"audit: {problem}", file=sys.stderr)
        return NOTHING


def show_step(run: Audited, step: int, with_text: bool) -> int:
    """Print the documents of one train step; whether they are what was recorded."""
    if not 1 <= step <= run.steps:
        raise UserError(f"STEP={step}: {run.name} has the steps 1 to {run.steps}")
    stream, line = run.era(step).stream, run.lines.get(step)
    data_step = line["data_step"] if line else stream.skips.data_step(step)
    first, end = stream.sample_range(data_step)
    found = rebuilt(stream, data_step, line)
    print(
        f"{run.name}, step {step}: data step {data_step}, samples {first} to {end - 1},"
        f" batch hash {found}"
    )
    print(verdict(found, line, stream, data_step))
    pieces = pieces_of_step(stream, data_step)
    names = {uid: origins_of(stream, uid, pieces) for uid in {piece.source for piece in pieces}}
    rows = [["sample", "document", "its tokens", "from", ""]]
    tokens = stream.whole_batch(data_step, (line or {}).get("quarantined", ()))[2].tokens
    for piece in pieces:
        row = [
            str(piece.sample),
            f"{piece.source}:{piece.document}",
            f"{piece.first} to {piece.end - 1}",
            place(names[piece.source].get(piece.document)),
            "masked" if piece.is_masked else "",
        ]
        if with_text:
            print(table([row], ""))
            ids = tokens[piece.sample - first, piece.column :][: piece.end - piece.first]
            print(text_of(stream, piece.source, ids))
        rows.append(row)
    if not with_text:
        print(table(rows))
    return AGREES if line is None or found == line["batch_hash"] else DIFFERS


def show_document(run: Audited, name: str, with_text: bool) -> int:
    """Print every step that sees one document, those to come included."""
    stream = run.eras[-1].stream
    uid, number = document_of(stream, name)
    low, high = stream.split(stream.uids.index(uid)).document_range(number)
    where = place(origins(stream.corpora[stream.uids.index(uid)], [number]).get(number))
    print(f"{uid}:{number}: {high - low} tokens, {where or 'no record of where it came from'}")
    if with_text:
        ids = stream.split(stream.uids.index(uid)).read(np.array([low]), max(high - low, 1))[0]
        print(text_of(stream, uid, ids[: high - low]))
    seen = [
        one
        for era in run.eras
        if uid in era.stream.uids
        for one in steps_of_document(era.stream, uid, number, min(era.end - 1, run.steps))
        if era.first <= (one.step or era.first) and within(era, one.data_step)
    ]
    rows = [["step", "data step", "sample", "epoch", "effect"]]
    for one in seen[:MOST_LINES]:
        is_past = one.step in run.lines
        effect = one.effect if is_past or not one.step else f"to come: {one.effect}"
        cells = (one.step or "-", one.data_step, one.sample, one.epoch)
        rows.append([*map(str, cells), effect])
    print(table(rows) if seen else f"no step from 1 to {run.steps} sees it")
    if len(seen) > MOST_LINES:
        print(f"  ... and {len(seen) - MOST_LINES} more, the last in step {seen[-1].step}")
    return AGREES


def check(run: Audited, every: int) -> int:
    """Rebuild every k-th recorded step and compare; says which do not agree."""
    wrong = []
    steps = sorted(run.lines)[::every]
    for step in steps:
        line, stream = run.lines[step], run.era(step).stream
        found = rebuilt(stream, line["data_step"], line)
        if found != line["batch_hash"]:
            wrong.append(step)
            print(f"step {step}: rebuilt {found}, recorded {line['batch_hash']}")
    print(f"{run.name}: {len(steps) - len(wrong)} of {len(steps)} recorded steps rebuilt and equal")
    return DIFFERS if wrong else AGREES


def diff(one: dict[int, dict], two: dict[int, dict], name: str, other: str) -> int:
    """Print where two runs' batches begin to differ."""
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


def open_run(folder: Path) -> Audited:
    """A run with a stream for each recipe it had. Raises UserError where there is none."""
    recipe = compose(str(folder / "recipe.yaml")).recipe
    lines = ledger_of(str(folder))
    schedule = read_schedule(recipe.batch_tokens, recipe.seq_len)
    steps = length_in_steps(recipe, schedule, num_parameters(recipe.model))
    eras = [
        Era(first, end, stream_of(past)) for first, end, past in recipes_of(folder, recipe, steps)
    ]
    return Audited(folder.name, eras, lines, steps)


def recipes_of(folder: Path, recipe: Recipe, steps: int) -> Iterator[tuple[int, int, Recipe]]:
    """(first step, end, recipe that held there), in order: deliberate changes are taken back from
    the last one on.
    """
    changes = [line for line in history.read(folder) if line["kind"] == "override"]
    found, end, values = [], steps + 1, dataclasses.asdict(recipe)
    for first in sorted({line["first_step"] for line in changes}, reverse=True):
        mine = [line for line in changes if line["first_step"] == first]
        if any(changes_batches(line["key"]) for line in mine):
            found.append((first, end, to_recipe(values, {}, [])[0]))
            end = first
        for line in reversed(mine):
            put_back(values, line["key"].split("."), line["stored"])
    found.append((1, end, to_recipe(values, {}, [])[0]))
    return reversed(found)


def changes_batches(key: str) -> bool:
    """Whether a knob decides what is in a step."""
    return key in ("seq_len", "batch_tokens", "seed") or key.startswith("data.")


def put_back(values: dict, names: list[str], stored: object) -> None:
    """Set a dotted knob to what it was; what was absent is removed."""
    for name in names[:-1]:
        values = values.setdefault(name, {})
    if stored == "(absent)":
        values.pop(names[-1], None)
    else:
        values[names[-1]] = stored


def stream_of(recipe: Recipe) -> Stream:
    """The stream of a recipe."""
    schedule = read_schedule(recipe.batch_tokens, recipe.seq_len)
    vocabulary = recipe.model.vocab_size
    return open_stream(recipe.data, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)


def rebuilt(stream: Stream, data_step: int, line: dict | None) -> str:
    """The batch hash of a data step, from the function and the corpus of now."""
    return batch_hash(stream.whole_batch(data_step, (line or {}).get("quarantined", ()))[2].hashes)


def verdict(found: str, line: dict | None, stream: Stream, data_step: int) -> str:
    """What the record says of a rebuilt step."""
    if line is None:
        return "  not recorded: this step is to come" + (
            "" if stream.skips.is_update(data_step) else ", without an update (data.skip)"
        )
    if found != line["batch_hash"]:
        return f"  DIFFERS from the recorded hash {line['batch_hash']}"
    more = "" if line.get("update", True) else "; it did not move the weights"
    return f"  equal to what was recorded: {line['targets']} targets{more}"


def within(era: Era, data_step: int) -> bool:
    """Whether a data step belongs to an era, also one that is left out."""
    low = era.stream.skips.data_step(era.first - 1) + 1 if era.first > 1 else 0
    return low <= data_step <= era.stream.skips.data_step(era.end - 1)


def origins_of(stream: Stream, uid: str, pieces) -> dict[int, dict]:
    """Where the documents of one source in some pieces came from."""
    wanted = {piece.document for piece in pieces if piece.source == uid}
    return origins(stream.corpora[stream.uids.index(uid)], wanted)


def place(origin: dict | None) -> str:
    """File and row of a document."""
    if origin is None:
        return ""
    row = origin.get("row")
    return f"{origin.get('source')}" + ("" if row is None else f", row {row}")


def text_of(stream: Stream, uid: str, ids: np.ndarray) -> str:
    """Token ids as text, or as numbers where the corpus has no tokenizer."""
    folder = stream.corpora[stream.uids.index(uid)].tokenizer_folder
    return (
        " ".join(map(str, ids.tolist())) if folder is None else load_tokenizer(folder).decode(ids)
    )


def document_of(stream: Stream, name: str) -> tuple[str, int]:
    """Source and number of a document named NUMBER or SOURCE:NUMBER."""
    uid, _, number = name.rpartition(":")
    known = ", ".join(stream.uids)
    if not uid and len(stream.uids) > 1:
        raise UserError(f"DOC={name}: the run has several sources ({known}); write SOURCE:{number}")
    uid = uid or stream.uids[0]
    if uid not in stream.uids:
        raise UserError(f"DOC={name}: the run has no source {uid!r}; there are: {known}")
    count = stream.split(stream.uids.index(uid)).num_documents
    if not (number.isascii() and number.isdigit()) or int(number) >= count:
        raise UserError(f"DOC={name}: {uid} has the training documents 0 to {count - 1}")
    return uid, int(number)


def run_folder(name: str) -> Path:
    """The folder of a run given by path or by name. Raises UserError where there is none."""
    for path in (Path(name), ROOT / "runs" / name):
        if (path / "recipe.yaml").is_file():
            return path.resolve()
    raise UserError(f"RUN={name}: no run here or under runs/")


def ledger_of(name: str) -> dict[int, dict]:
    """Ledger lines of a run by train step; where segments share a step, the newest one's."""
    return {line["step"]: line for line in read_ledger(run_folder(name) / "ledger")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
