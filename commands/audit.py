"""`make audit RUN=`: rebuild the batches of a run from its recipe and compare them with its ledger.

    make audit RUN=name                    rebuild every recorded step and compare hashes (EVERY=k)
    make audit RUN=name STEP=120           the documents in step 120 (TEXT=1: and their text)
    make audit RUN=name DOC=17             every step that sees document 17, or code:17 of a source
                                           (TOKENS=100:140: only these tokens; TEXT=1)

RUN is a run folder or a name under runs/. Rule: nothing is believed unless the recorded hash
confirms it. Where the recipe of a run was changed, each step is rebuilt with the recipe in force
then (history.jsonl).

Exit status: 0 = all agrees; 1 = it does not; 93 = there is nothing to audit.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base.command_line import Parser, refuse
from base.errors import UserError
from base.paths import ROOT
from base.table import table
from base.values import counted
from checkpoint.lineage import lineage, run_folder, segments
from data.corpus.tokenizer import load_tokenizer
from data.stream.ledger import batch_hash, read_ledger
from data.stream.schedule import schedule_of
from data.stream.stream import Stream, open_stream
from data.stream.trace import Piece, origins, pieces_of_step, steps_of_document
from data.stream.usage import use_problems
from model.cost import num_parameters
from recipes.check import to_recipe
from recipes.compose import compose
from recipes.schema import Recipe
from record import history
from record.records import HAVE, LEDGER, damage
from runtime.resolve import length_in_steps

MOST_LINES = 40  # of a table of steps; the rest is counted
TOKENS_A_LINE, FEW_TOKENS = 16, 40  # of a document's text; fewer have a line each
AGREES, DIFFERS = 0, 1


@dataclass(frozen=True)
class Era:
    """Train steps [first, end) with one recipe in force."""

    first: int
    end: int
    recipe: Recipe

    @functools.cached_property
    def stream(self) -> Stream:
        """The stream of the recipe, opened on first use: most audits look at few eras."""
        return stream_of(self.recipe)


@dataclass(frozen=True)
class Audited:
    """A run: its recipes in each segment, and its recorded steps."""

    name: str
    history: list[dict]
    eras_of: dict[int, list[Era]]  # segment -> eras of its lineage
    recorded: list[dict]  # all ledger lines, abandoned ones too
    segment: int  # whose lineage is looked at
    steps: int  # planned length

    @functools.cached_property
    def lines(self) -> dict[int, dict]:
        """Train step -> ledger line of the lineage."""
        return own_lines(self.recorded, self.history, self.segment)

    @property
    def eras(self) -> list[Era]:
        """The eras of the lineage."""
        return self.eras_of[self.segment]

    def era(self, step: int, segment: int | None = None) -> Era:
        """The era of a step of a segment; without segment, of the lineage."""
        eras = self.eras if segment is None else self.eras_of[segment]
        return next((era for era in eras if era.first <= step < era.end), eras[-1])


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.audit`; returns the exit status."""
    parser = Parser(prog="make audit", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--step", type=int, help="train step to look at")
    parser.add_argument("--doc", help="document number, or SOURCE:NUMBER")
    parser.add_argument("--tokens", metavar="A:B", help="only these tokens of the document")
    parser.add_argument("--text", action="store_true", help="print the text, too")
    parser.add_argument("--segment", type=int, help="look at this segment's lineage")
    parser.add_argument("--every", type=int, default=1, help="check every k-th recorded step")
    options = parser.parse_args(arguments)
    try:
        if options.every < 1:
            raise UserError(f"EVERY={options.every}: give 1 or more")
        if options.tokens is not None and options.doc is None:
            raise UserError(f"TOKENS={options.tokens}: are those of one document: give DOC= too")
        folder = run_folder(options.run, ROOT)
        run = open_run(folder, options.segment)
        if options.step is not None:
            return show_step(run, options.step, options.text)
        if options.doc is not None:
            return show_document(run, options.doc, options.tokens, options.text)
        status, damaged = check(run, options.every), damage(folder / LEDGER, HAVE[LEDGER])
        if damaged:
            print(damaged)
        return DIFFERS if damaged else status
    except UserError as error:
        return refuse(error)


def show_step(run: Audited, step: int, with_text: bool) -> int:
    """Print the documents of one train step; exit status 0 where they equal the record."""
    if not 1 <= step <= run.steps:
        raise UserError(f"STEP={step}: {run.name} has the steps 1 to {run.steps}")
    # The step and its record.
    stream, line = run.era(step).stream, run.lines.get(step)
    data_step = line["data_step"] if line else stream.skips.data_step(step)
    first, end = stream.sample_range(data_step)
    found = rebuilt(stream, data_step, line)
    length = stream.schedule.length_at(data_step)
    cut = f" cut to {length} tokens" if length < stream.seq_len else ""
    where = f"step {step}" + (f" in segment {line['segment']}" if line else "")
    print(
        f"{run.name}, {where}: data step {data_step}, samples {first} to {end - 1}{cut},"
        f" batch hash {found}"
    )
    for other in run.recorded:
        if other["step"] == step and line and other["segment"] != line["segment"]:
            print(
                f"  abandoned segment {other['segment']} used data step {other['data_step']} in it"
                f" (batch hash {other['batch_hash']})"
            )
    print(verdict(found, line, stream, data_step))
    # Its documents.
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
            shown_mask(piece),
        ]
        if with_text:
            print(table([row], ""))
            ids = tokens[piece.sample - first, piece.column :][: piece.end - piece.first]
            print(text_of(stream, piece.source, ids))
        rows.append(row)
    if not with_text:
        print(table(rows))
    return AGREES if line is None or found == line["batch_hash"] else DIFFERS


def show_document(run: Audited, name: str, asked: str | None, with_text: bool) -> int:
    """Print every step that sees one document, or only its tokens `asked`; steps to come too."""
    stream = run.eras[-1].stream
    uid, number = document_of(stream, name)
    low, high = stream.split(stream.uids.index(uid)).document_range(number)
    where = place(origins(stream.corpora[stream.uids.index(uid)], [number]).get(number))
    first, end = (0, high - low) if asked is None else tokens_of(asked, name, high - low)
    part = "" if asked is None else f", of them {first} to {end - 1}"
    print(
        f"{uid}:{number}: {high - low} tokens{part}, {where or 'no record of where it came from'}"
    )
    if with_text and end > first:
        ids = stream.split(stream.uids.index(uid)).read(np.array([low + first]), end - first)[0]
        print(numbered(stream, uid, ids, first))
    seen = [
        one
        for era in run.eras
        if uid in era.stream.uids
        for one in steps_of_document(
            era.stream, uid, number, min(era.end - 1, run.steps), (first, end)
        )
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
    """Rebuild every k-th recorded step and compare; prints those that differ."""
    wrong = []
    lines = sorted(run.recorded, key=lambda line: (line["segment"], line["step"]))[::every]
    for line in lines:
        step, segment = line["step"], line["segment"]
        found = rebuilt(run.era(step, segment).stream, line["data_step"], line)
        if found != line["batch_hash"]:
            wrong.append(step)
            print(f"step {step}: rebuilt {found}, recorded {line['batch_hash']}")
    print(f"{run.name}: {len(lines) - len(wrong)} of {len(lines)} recorded steps rebuilt and equal")
    problems = use(run)
    return DIFFERS if wrong or problems else AGREES


def use(run: Audited) -> list[str]:
    """Print the samples that the lineage used and left out, with reasons; returns problems."""
    lines = [run.lines[step] for step in sorted(run.lines)]
    if not lines:
        return []
    stream = run.eras[-1].stream
    problems = use_problems(
        lines,
        stream.skips,
        lambda line: run.era(line["step"]).stream.sample_range(line["data_step"]),
    )
    for problem in problems[:MOST_LINES]:
        print(problem)
    for number in sorted({line["segment"] for line in lines}):
        own = [line["step"] for line in lines if line["segment"] == number]
        print(f"  segment {number}: steps {own[0]} to {own[-1]}")
    gone = len(run.recorded) - len(lines)
    if gone:
        steps = counted(gone, "more recorded step")
        are = "belongs" if gone == 1 else "belong"
        print(f"  {steps} {are} to abandoned segments: no weight comes from them")
    last = lines[-1]["data_step"]
    for low, high in stream.skips.ranges_before(last):
        first, end = stream.sample_range(low)[0], stream.sample_range(high - 1)[1]
        print(f"  left out: data steps {low} to {high - 1}, samples {first} to {end - 1}")
    for skip in history.in_force(run.history, run.segment):
        print(f"  {history.described(skip)}")
    if not problems:
        first, end = lines[0]["samples"][0], lines[-1]["samples"][1]
        rest = " but what was left out" if stream.skips.ranges_before(last) else ""
        print(f"  samples {first} to {end - 1} were used once each{rest}")
    return problems


def open_run(folder: Path, segment: int | None = None) -> Audited:
    """A run with all its recipes. Raises UserError where there is none, or no such segment."""
    recipe = compose(str(folder / "recipe.yaml")).recipe
    lines, recorded = history.read(folder), list(read_ledger(folder / "ledger"))
    count = max(1, len(segments(lines)))
    if segment is not None and not 0 <= segment < count:
        raise UserError(f"SEGMENT={segment}: {folder.name} has the segments 0 to {count - 1}")
    schedule = schedule_of(recipe)
    steps = length_in_steps(recipe, schedule, num_parameters(recipe.model))
    first_recipe = at_start(lines, recipe)
    eras = {number: eras_of(lines, first_recipe, number, steps) for number in range(count)}
    chosen = count - 1 if segment is None else segment
    return Audited(folder.name, lines, eras, recorded, chosen, steps)


def at_start(lines: list[dict], recipe: Recipe) -> dict:
    """The recipe of step 1 (nested), from the newest: the deliberate changes of the lineage are
    undone, the last one first.
    """
    values = dataclasses.asdict(recipe)
    for line in reversed(overrides_of(lines, None)):
        history.put(values, line["key"], line["stored"])
    return values


def overrides_of(lines: list[dict], segment: int | None) -> list[dict]:
    """The deliberate changes in a segment's lineage, in order."""
    chain = lineage(lines, segment)
    changed = [line for line in lines if line["kind"] == "override"]
    return [line for line in changed if chain.holds(line.get("segment", 0), line["first_step"])]


def eras_of(lines: list[dict], values: dict, segment: int, steps: int) -> list[Era]:
    """The recipes of a segment's lineage, in order: the first recipe with the changes applied.

    The skip list of the segment holds for all its steps, since a past step is never left out.
    """
    changed = overrides_of(lines, segment)
    firsts = sorted({x["first_step"] for x in changed if changes_batches(x["key"])} - {1})
    eras = []
    for first, end in zip([1, *firsts], [*firsts, steps + 1], strict=True):
        now = copy.deepcopy(values)
        for line in changed:
            if line["first_step"] <= first:
                history.put(now, line["key"], line["now"])
        recipe = to_recipe(now, {}, [])[0]
        data = history.data_with_skips(recipe.data, history.in_force(lines, segment))
        eras.append(Era(first, end, dataclasses.replace(recipe, data=data)))
    return eras


def changes_batches(key: str) -> bool:
    """True for a knob that decides the batches."""
    return key in ("seq_len", "seq_len_warmup", "batch_tokens", "seed") or key.startswith("data.")


def stream_of(recipe: Recipe) -> Stream:
    """The stream of a recipe."""
    schedule = schedule_of(recipe)
    vocabulary = recipe.model.vocab_size
    return open_stream(recipe.data, recipe.seed, recipe.seq_len, schedule, ROOT, vocabulary)


def rebuilt(stream: Stream, data_step: int, line: dict | None) -> str:
    """The batch hash of a data step, computed again from the corpus as it is now."""
    return batch_hash(stream.whole_batch(data_step, (line or {}).get("quarantined", ()))[2].hashes)


def verdict(found: str, line: dict | None, stream: Stream, data_step: int) -> str:
    """One line: the comparison of a rebuilt step with its record."""
    if line is None:
        return "  not recorded: this step is to come" + (
            "" if stream.skips.is_update(data_step) else ", without an update (data.skip)"
        )
    if found != line["batch_hash"]:
        return f"  DIFFERS from the recorded hash {line['batch_hash']}"
    more = "" if line.get("update", True) else "; it did not move the weights"
    return f"  equal to what was recorded: {line['targets']} targets{more}"


def within(era: Era, data_step: int) -> bool:
    """True where a data step, used or left out, belongs to an era."""
    low = era.stream.skips.data_step(era.first - 1) + 1 if era.first > 1 else 0
    return low <= data_step <= era.stream.skips.data_step(era.end - 1)


def origins_of(stream: Stream, uid: str, pieces) -> dict[int, dict]:
    """Origins of the documents of one source in some pieces, by number."""
    wanted = {piece.document for piece in pieces if piece.source == uid}
    return origins(stream.corpora[stream.uids.index(uid)], wanted)


def place(origin: dict | None) -> str:
    """File and row of a document, for a person."""
    if origin is None:
        return ""
    row = origin.get("row")
    return f"{origin.get('source')}" + ("" if row is None else f", row {row}")


def shown_mask(piece: Piece) -> str:
    """The tokens of a piece that give no loss, for a person."""
    if piece.masked == ((piece.first, piece.end),):
        return "masked"
    spans = ", ".join(f"{first} to {end - 1}" for first, end in piece.masked)
    return f"masked: {spans}" if spans else ""


def numbered(stream: Stream, uid: str, ids: np.ndarray, first: int) -> str:
    """Text in lines that begin with the number of their first token, a line each for few tokens.

    Quoted, so that blanks and line ends can be seen.
    """
    size = 1 if len(ids) <= FEW_TOKENS else TOKENS_A_LINE
    width = len(str(first + len(ids)))
    return "\n".join(
        f"  {first + at:>{width}}  "
        + json.dumps(text_of(stream, uid, ids[at : at + size]), ensure_ascii=False)
        for at in range(0, len(ids), size)
    )


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


def tokens_of(asked: str, name: str, length: int) -> tuple[int, int]:
    """The range of a document's tokens named FIRST:END."""
    first, _, end = asked.partition(":")
    if not all(one.isascii() and one.isdigit() for one in (first, end)):
        raise UserError(f"TOKENS={asked}: expected FIRST:END, such as 100:140, the end left out")
    if not int(first) < int(end) <= length:
        raise UserError(f"TOKENS={asked}: document {name} has {length} tokens: 0:{length}")
    return int(first), int(end)


def own_lines(recorded: list[dict], lines: list[dict], segment: int | None) -> dict[int, dict]:
    """The ledger lines of a segment's lineage, by train step."""
    return {line["step"]: line for line in lineage(lines, segment).own(recorded)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
