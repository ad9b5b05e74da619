"""A step traced to its documents, and a document to every step that sees it, past and to come.

    data step --order--> samples --index--> documents --side file--> their origin
    document --index--> windows --inverse order, by epoch--> samples --> data steps --> train steps

Rule: both ways are computed from the function that ordered the run; there is no index of samples
and no scan. Only the origin of a document is read from a file: `<shard>.docs.parquet`, or the
manifest of a built-in corpus. Without either a document has its number alone.

Units: documents count from 0 over the training split of a source; tokens count from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.corpus.corpus import Corpus
from data.stream.skips import FOREVER, Ranges, clipped, merged
from data.stream.stream import Stream

SIDE_FILE = ".docs.parquet"
MOST_EPOCHS = 1 << 20  # of one document; far beyond any run, so an error does not fill memory


@dataclass(frozen=True)
class Piece:
    """A part of a document in a sample."""

    sample: int  # of the run
    source: str
    document: int
    first: int  # token of the document that the part begins with
    end: int
    column: int  # of the sample's row
    masked: Ranges  # its tokens that give no loss, counted like `first`


@dataclass(frozen=True)
class Sighting:
    """One sample that holds a part of a document."""

    step: int  # train step; 0 = left out by data.skip
    data_step: int
    sample: int
    epoch: int
    effect: str  # trained, masked, masked in part, no update or left out


def pieces_of_step(stream: Stream, data_step: int) -> list[Piece]:
    """The parts of documents in the samples of a data step, in batch order."""
    first, end = stream.sample_range(data_step)
    source, start = stream.locate(first, end)
    pieces = []
    for sample, number, token in zip(
        range(first, end), source.tolist(), start.tolist(), strict=True
    ):
        split, uid, stop = stream.split(number), stream.uids[number], token + stream.seq_len + 1
        at = token
        while at < stop:
            document = split.document_at(at)
            low, high = split.document_range(document)
            mine = at - low, min(high, stop) - low
            masked = masked_tokens(stream, uid, document, data_step, mine)
            pieces.append(Piece(sample, uid, document, *mine, at - token, masked))
            at = high
    return pieces


def steps_of_document(
    stream: Stream, uid: str, document: int, steps: int, tokens: tuple[int, int] = (0, FOREVER)
) -> list[Sighting]:
    """Every sample of train steps 1 to `steps` that holds a token of the document, in order.

    A token counts as input and as target. tokens: only these tokens of the document. Samples that
    are left out between those steps are included.
    """
    # The tokens, and the draws and epochs of the source so far.
    number, seq_len = stream.uids.index(uid), stream.seq_len
    parts = stream.window_tokens // seq_len
    begin, end = stream.split(number).document_range(document)
    low, high = begin + tokens[0], min(end, begin + tokens[1])
    num_windows = int(stream.order.num_windows[number])
    last = stream.sample_range(stream.skips.data_step(steps))[1]
    draws = int(stream.mixture.draws_before(-(-last // parts))[number])
    epochs = -(-draws // num_windows)
    assert epochs <= MOST_EPOCHS
    # Sample k of an epoch holds tokens [k * T, k * T + T], after the shift of the epoch.
    epoch = np.arange(epochs)
    shift = stream.order.shifts(np.full(epochs, number), epoch)
    first = np.maximum(0, -((shift - low) // seq_len) - 1)
    end = np.minimum((high - 1 - shift) // seq_len + 1, num_windows * parts)
    counts = np.maximum(0, end - first) if high > low else np.zeros_like(epoch)
    epoch = np.repeat(epoch, counts)
    k = np.arange(len(epoch)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    # The run's sample of each of them, where it is drawn.
    draw = stream.order.draws(np.full(len(k), number), epoch, k // parts) if len(k) else k
    is_drawn = draw < draws
    epoch, k, draw = epoch[is_drawn], k[is_drawn], draw[is_drawn]
    window = stream.mixture.sample(np.full(len(draw), number), draw)
    sample = window * parts + k % parts
    is_seen = (window >= 0) & (sample < last)
    order = np.argsort(sample[is_seen])
    sample, epoch, k = (column[is_seen][order] for column in (sample, epoch, k))
    # Steps and effects.
    data_step = stream.schedule.data_steps_of(sample)
    step = stream.skips.steps_of(data_step)
    start = shift[epoch] + k * seq_len
    first, end = np.maximum(start, low) - begin, np.minimum(start + seq_len + 1, high) - begin
    return [
        Sighting(*numbers, effect(stream, uid, document, *numbers[:2], tuple(mine)))
        for *numbers, mine in zip(
            *(column.tolist() for column in (step, data_step, sample, epoch)),
            np.stack([first, end], axis=1).tolist(),
            strict=True,
        )
    ]


def effect(
    stream: Stream, uid: str, document: int, step: int, data_step: int, tokens: tuple[int, int]
) -> str:
    """The effect of a data step, past or to come, on these tokens of a document."""
    if not step:
        return "left out"
    if not stream.skips.is_update(data_step):
        return "no update"
    masked = masked_tokens(stream, uid, document, data_step, tokens)
    return "trained" if not masked else "masked" if masked == (tokens,) else "masked in part"


def masked_tokens(
    stream: Stream, uid: str, document: int, data_step: int, tokens: tuple[int, int]
) -> Ranges:
    """Ranges of these tokens [first, end) of a document that give no loss in a data step."""
    masked = merged(
        mask.tokens
        for mask in stream.skips.masks
        if mask.source == uid
        and mask.documents[0] <= document < mask.documents[1]
        and mask.steps[0] <= data_step < mask.steps[1]
    )
    first, end = tokens
    return tuple((max(low, first), high) for low, high in clipped(masked, end) if high > first)


def origins(corpus: Corpus, documents: Iterable[int]) -> dict[int, dict]:
    """Origin of training documents by number: source and whatever else is recorded.

    A document whose shard has no side file is missing.
    """
    wanted, found, before = sorted(set(documents)), {}, 0
    for entry in corpus.manifest["splits"].get("train", []):
        mine = [one - before for one in wanted if before <= one < before + entry["documents"]]
        path = corpus.folder / (entry["name"] + SIDE_FILE)
        if mine and path.is_file():
            found |= {before + row: values for row, values in _rows(path, mine).items()}
        before += entry["documents"]
    inputs = [one for one in corpus.manifest.get("inputs", []) if one.get("split") == "train"]
    if len(inputs) == before:  # a built-in corpus: one input is one document
        found |= {one: {"source": inputs[one]["name"]} for one in wanted if one not in found}
    return found


def _rows(path, rows: list[int]) -> dict[int, dict]:
    """Rows of a Parquet file by number, reading only the groups that hold them."""
    import pyarrow.parquet as pq  # only where there is such a file

    found, begin = {}, 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            mine = [row for row in rows if begin <= row < end]
            if mine:
                table = file.read_row_group(group).take([row - begin for row in mine])
                found |= dict(zip(mine, table.to_pylist(), strict=True))
            begin = end
    return found
