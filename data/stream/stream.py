"""The stream: the batch of step N, for any rank of any layout. Start here to read how data flows.

    step N --skips--> data step --schedule--> samples [a, b) --mixture--> (source, draw)
           --order--> (epoch, window) --samples--> tokens, document starts
           --windows--> micro-batches of one data-parallel rank

Rule: the global batch is a pure function of (corpora, mixture, seed, order version, skip list,
step). The sizes of the axes, the micro-batch, the prefetch depth and the storage only decide which
rank reads which part, and when. The state is therefore one integer, and a resume asks for the next
step. A global batch that is larger than a source, or that passes its end, goes on in that source's
next epoch, in a new order.

A sample is one sequence of `seq_len` tokens and one token more, its last target. The order permutes
windows of `window_tokens`; a longer window is cut into equal parts, which are consecutive samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from base.errors import UserError
from data.corpus.corpus import Corpus
from data.corpus.shards import Split
from data.stream.evaluation import (
    HeldOut,
    evaluation_set,
    few_documents,
    held_out,
    target_bytes,
)
from data.stream.masks import Masked, masked
from data.stream.mixture import Stages
from data.stream.order import ORDER_VERSION, Order
from data.stream.prefetch import Prefetch
from data.stream.run_checks import (
    SourceUse,
    check_epochs,
    check_targets,
    check_updates,
    different_ends,
    source_uses,
    twins,
    without_begin,
)
from data.stream.samples import Samples
from data.stream.schedule import Schedule
from data.stream.skips import Mask, Skips, digest
from data.stream.sources import num_windows, open_sources
from data.stream.windows import Batch, Rows, lost_targets, make_batches, num_targets, own_positions
from recipes.schema import Data

# Work done at once, to spread numpy's cost per call over small steps:
LOCATE_AHEAD = 4096  # windows put in order, and the most samples of all ranks below
STARTS_AHEAD = 256  # samples whose document starts are looked up
READ_AHEAD = 128  # samples of a rank that are read and checked; each may hash a block of 8 MiB
NO_STARTS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
MOST_NAMED = 12  # corpora whose ids a checkpoint holds one by one: its state stays below 1 KB


@dataclass(frozen=True)
class StepData:
    """The micro-batches of one data-parallel rank in one step, and facts of the global batch."""

    step: int
    data_step: int
    sample_range: tuple[int, int]  # [a, b) of the run, all ranks
    micro_batches: list[Batch]  # of this rank
    num_tokens: int  # of the global batch
    num_targets: int  # labels that count in the global batch
    length: int  # tokens that the model sees at once: less than seq_len while it is warmed up
    source_counts: dict[str, int]  # samples of each source in the global batch
    is_update: bool = True  # False: the step counts, the weights stay
    num_masked: int = 0  # targets of the global batch that a mask took away
    quarantined: tuple[int, ...] = ()  # samples of the run that touch a damaged block
    places: int = 0  # xxh3-64 of source and first token of each sample of the global batch

    @property
    def is_shortened(self) -> bool:
        """True where the model sees less than a whole sequence at once."""
        first, end = self.sample_range
        return self.length * (end - first) < self.num_tokens


class _Located(NamedTuple):
    """Places of windows [first, first + n) of the mixed order, arrays (n,) int64."""

    first: int
    source: np.ndarray
    token: np.ndarray


class _Starts(NamedTuple):
    """The documents that start in samples [first, end): row counts from `first`; arrays int64."""

    first: int
    end: int
    row: np.ndarray
    position: np.ndarray


class _Part(NamedTuple):
    """One rank's rows of a data step, and facts of the global batch."""

    sample_range: tuple[int, int]
    rows: Rows
    is_masked: np.ndarray | None
    num_targets: int
    source_counts: list[int]
    num_masked: int
    quarantined: tuple[int, ...]
    places: int


class _Ready(NamedTuple):
    """Parts of one rank for data steps [first, end), all of one size.

    place: (data rank, data size, micro-batch) of the rank.
    """

    first: int
    end: int
    place: tuple
    parts: list[_Part]


class Stream:
    """Batches by step. Holds no position: every method is a function of its arguments.

    Made by `open_stream`. Safe for threads.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        schedule: Schedule,
        corpora: Mapping[str, Corpus],
        vocab_size: int,
    ):
        self.data, self.seed, self.schedule = data, seed, schedule
        self.seq_len = schedule.seq_len
        self.window_tokens = data.window_tokens or self.seq_len
        self._parts = self.window_tokens // self.seq_len
        self.skips = Skips(data.skip)
        self.stage_steps = stage_steps(data)
        self.mixture = Stages([self._stage(step) for step in self.stage_steps])
        self.uids = self.mixture.uids
        self.corpora = [corpora[uid] for uid in self.uids]
        self._train, self._valid = (
            Samples(self.uids, self.corpora, split, self.seq_len, vocab_size)
            for split in ("train", "valid")
        )
        shift = self.window_tokens if data.shift_windows else 1
        windows = [num_windows(split, self.window_tokens, shift) for split in self._train.splits]
        self.order = Order(seed, self.uids, windows, shift)
        self._masks = [(mask, *self._masked_tokens(mask)) for mask in self.skips.masks]
        self._located = _Located(0, *np.zeros((2, 0), dtype=np.int64))
        self._starts = _Starts(0, 0, *np.zeros((2, 0), dtype=np.int64))
        self._ready = _Ready(0, 0, (), [])

    def step(self, step: int, data_rank: int, data_size: int, micro_batch: int) -> StepData:
        """The micro-batches of step N >= 1 for data-parallel coordinate `data_rank` of `data_size`.

        Micro-step m of rank r holds `micro_batch` neighbours of the global batch, from position
        m * micro_batch * data_size + r * micro_batch on. Ranks that share a coordinate (tensor,
        pipeline, context) get the same. Raises UserError for a batch that does not divide, and for
        damaged data.
        """
        data_step = self.skips.data_step(step)
        part = self._part(step, data_step, data_rank, data_size, micro_batch)
        first, end = part.sample_range
        length = self.schedule.length_at(data_step)
        return StepData(
            step=step,
            data_step=data_step,
            sample_range=part.sample_range,
            micro_batches=make_batches(
                part.rows, micro_batch, self.data.attend, is_masked=part.is_masked, length=length
            ),
            num_tokens=(end - first) * self.seq_len,
            num_targets=part.num_targets,
            length=length,
            source_counts=dict(zip(self.uids, part.source_counts, strict=True)),
            is_update=part.num_targets > 0 and self.skips.is_update(data_step),
            num_masked=part.num_masked,
            quarantined=part.quarantined,
            places=part.places,
        )

    def whole_batch(
        self, data_step: int, quarantined: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray, Rows]:
        """(source, first token, rows) of the whole global batch of a data step, for audits.

        quarantined: samples of the run that were not read then, because of damage.
        """
        first, end = self.sample_range(data_step)
        source, start = self.locate(first, end)
        is_damaged = np.isin(np.arange(first, end), np.array(quarantined, dtype=np.int64))
        row, position = self._document_starts(first, end)
        row, position = row[~is_damaged[row]], position[~is_damaged[row]]
        tokens, hashes = self._train.read(source, start, is_damaged)
        every = np.arange(end - first)
        return source, start, self._train.rows(tokens, hashes, source, row, position, every)

    def split(self, number: int) -> Split:
        """The training split of source number `number`."""
        return self._train.splits[number]

    def prefetch(
        self, first_step: int, last_step: int, data_rank: int, data_size: int, micro_batch: int
    ) -> Prefetch[StepData]:
        """Iterate over steps first_step to last_step, both included.

        One thread prepares whole steps, enough for `data.prefetch` micro-batches ahead.
        """
        slab = data_size * micro_batch
        first, end = self.sample_range(self.skips.data_step(first_step))
        accumulation = max(1, (end - first) // slab)
        depth = -(-self.data.prefetch // accumulation)

        def make(step: int) -> StepData:
            return self.step(step, data_rank, data_size, micro_batch)

        return Prefetch(make, range(first_step, last_step + 1), depth)

    def evaluation(
        self, data_rank: int, data_size: int, micro_batch: int, eval_tokens: int
    ) -> HeldOut:
        """Held-out micro-batches of one rank: always the same windows, shared out in turn.

        The set is the first windows of each source's validation split, as many as its share of
        `eval_tokens` in the first stage of the mixture, or all it has; it does not depend on the
        layout. Each rank gets the same number of batches of each source. Padding rows fill up the
        last batches of a source; they have no targets, so an uneven set neither hangs nor counts a
        window twice. Raises UserError where there is nothing to evaluate on.
        """
        chosen = self._evaluation_set(eval_tokens)
        place = data_rank, data_size, micro_batch
        return held_out(self._valid, *chosen, *place, self.data.attend, self.uids)

    def evaluation_bytes(self, eval_tokens: int) -> list[int] | None:
        """UTF-8 bytes of the targets of `evaluation` over all ranks, one number for each of its
        `uids`; None where the corpora do not tell.
        """
        chosen = self._evaluation_set(eval_tokens)
        return target_bytes(self._valid, *chosen, self.corpora, self.data.attend)

    def _evaluation_set(self, eval_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, first token in its validation split) of the evaluation samples, (n,) int64."""
        return evaluation_set(self._valid.splits, self.mixture, self.seq_len, eval_tokens)

    def state(self) -> dict:
        """The data state of a checkpoint besides the step: equal states give equal batches.

        It stays below 1 KB: more than a dozen corpora are recorded as one hash over all.
        """
        ids = {uid: c.corpus_id[:16] for uid, c in zip(self.uids, self.corpora, strict=True)}
        if len(ids) > MOST_NAMED:
            ids = {f"all {len(ids)}": digest(ids)}
        made_with = (corpus.tokenizer_fingerprint for corpus in self.corpora)
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "corpora": ids,
            "mixture": self.mixture.fingerprint(),
            "schedule": self.schedule.fingerprint(),
            "skips": self.skips.fingerprint(),
            "window_tokens": self.window_tokens,
            "attend": self.data.attend,
            "tokenizer": next((one[:16] for one in made_with if one), None),
            "begin_id": self.corpora[0].begin_id,
            "end_id": self.corpora[0].eod_id,
        } | ({"shift_windows": True} if self.data.shift_windows else {})

    def past(self, step: int) -> dict:
        """Everything that decided the batches of train steps 1 to N, and the next data step.

        In the middle of a run the recipe may change batches to come, but none of these.
        """
        data_step = self.skips.data_step(step) + 1 if step else 0
        windows = -(-self.schedule.sequences_before(data_step) // self._parts)
        skipped, cut = self.skips.past(data_step), self.schedule.cut_before(data_step)
        return {
            "data_step": data_step,
            "tokens": self.tokens_after(step),
            "mixture": digest(self.mixture.past(windows)),
            "skips": None if skipped is None else digest(skipped),
        } | ({"lengths": [list(piece) for piece in cut]} if cut else {})

    def tokens_after(self, step: int) -> int:
        """Tokens in the batches of train steps 1 to N; left-out batches do not count."""
        if step == 0:
            return 0
        data_step, before = self.skips.data_step(step), self.schedule.sequences_before
        left_out = sum(before(b) - before(a) for a, b in self.skips.ranges_before(data_step))
        return (before(data_step + 1) - left_out) * self.seq_len

    def sample_range(self, data_step: int) -> tuple[int, int]:
        """The samples [a, b) of the run in a data step."""
        return self.schedule.sample_range(data_step + 1)

    def usage(self, steps: int) -> list[SourceUse]:
        """The use of each source in a run of that many steps, left-out ranges included."""
        return source_uses(self, steps)

    def check(self, steps: int, eval_tokens: int = 0) -> list[str]:
        """Warnings for a run of that many steps.

        Raises UserError where a source exceeds its max_epochs, where no step would train, or where
        there is nothing to evaluate on.
        """
        if eval_tokens:
            self._evaluation_set(eval_tokens)
        self.check_rest(steps)
        notes = [note for corpus in self.corpora for note in corpus.notes]
        if eval_tokens:
            notes += few_documents(sum(s.num_documents for s in self._valid.splits if s))
        by_uid = dict(zip(self.uids, self.corpora, strict=True))
        notes += twins(by_uid) + different_ends(by_uid)
        notes += without_begin(by_uid) if self.data.attend == "within" else []
        return notes + check_epochs(self.usage(steps), steps)

    def check_rest(self, steps: int, after: int = 0) -> None:
        """Raises UserError where no step of after + 1 .. steps would train."""
        check_updates(self.skips, steps, after)
        check_targets(self, steps, after)

    def has_targets(self, step: int) -> bool:
        """True where a step moves the weights: its batch trains, and some target is left."""
        data_step = self.skips.data_step(step)
        if not self.skips.is_update(data_step):
            return False
        first, end = self.sample_range(data_step)
        source, start = self.locate(first, end)
        row, position = self._document_starts(first, end)
        is_begun = self._train.are_begun[source[row]]
        lost = lost_targets(row, position, is_begun, self.data.attend)
        left_out = self._masked(data_step, source, start, None)
        taken = 0 if left_out is None else left_out.num_targets(*lost)
        return (end - first) * self.seq_len > len(lost[0]) + taken

    def _part(self, step: int, data_step: int, *place: int) -> _Part:
        """One rank's part of a data step.

        Several small steps are prepared at once, as long as the batch keeps its size.
        """
        ready = self._ready  # read once: another thread may replace it
        if ready.place != place or not ready.first <= data_step < ready.end:
            first, end = self.sample_range(data_step)
            own = len(own_positions(end - first, *place))
            # Twice as far as the last time, and one step after a jump: the first touch of a block
            # hashes all of it, which the first batch of an attempt should not wait for.
            is_next = ready.place == place and ready.end == data_step
            ahead = 2 * (ready.end - ready.first) if is_next else 1
            ahead = max(1, min(ahead, READ_AHEAD // own, LOCATE_AHEAD // (end - first)))
            stop = min(data_step + ahead, self.schedule.end_of_piece(data_step))
            if self.data.on_damage == "quarantine" or self._is_masked_in(data_step, stop):
                stop = data_step + 1
            try:
                ready = self._prepare(step, data_step, stop, place)
            except UserError:  # only the step whose data is damaged may fail
                ready = self._prepare(step, data_step, data_step + 1, place)
            self._ready = ready
        return ready.parts[data_step - ready.first]

    def _prepare(self, step: int, data_step: int, stop: int, place: tuple) -> _Ready:
        """The parts of data steps [data_step, stop).

        Masks and quarantine are possible only for a single data step, which is train step `step`.
        """
        steps, attend = stop - data_step, self.data.attend
        first, end = self.sample_range(data_step)[0], self.sample_range(stop - 1)[1]
        size = (end - first) // steps
        mine = (np.arange(steps)[:, None] * size + own_positions(size, *place)).ravel()
        source, start = self.locate(first, end)
        row, position = self._document_starts(first, end)
        # Leave out damaged samples.
        is_damaged, quarantined = None, ()
        if self.data.on_damage == "quarantine":
            is_damaged = self._train.damaged(source, start)
            if is_damaged.all():
                raise UserError(
                    f"step {step}: every sample of its batch touches a damaged block of its corpus;"
                    " data.on_damage=quarantine leaves nothing to train on: restore the corpus"
                )
            row, position = row[~is_damaged[row]], position[~is_damaged[row]]
            quarantined = tuple((first + np.flatnonzero(is_damaged)).tolist())
        # Read this rank's samples.
        tokens, hashes = self._train.read(
            source[mine], start[mine], None if is_damaged is None else is_damaged[mine]
        )
        rows = self._train.rows(tokens, hashes, source, row, position, mine).split(steps)
        # Count targets, samples per source and masked targets of the global batch.
        is_begun = self._train.are_begun[source[row]]
        targets = num_targets(steps, size, self.seq_len, row, position, attend, is_begun)
        cell = np.repeat(np.arange(steps) * len(self.uids), size) + source
        counts = np.bincount(cell, minlength=steps * len(self.uids)).reshape(steps, -1).tolist()
        lost = lost_targets(row, position, is_begun, attend)
        left_out = self._masked(data_step, source, start, is_damaged)
        is_masked = None if left_out is None else left_out.of(mine, self.seq_len)
        taken = 0 if left_out is None else left_out.num_targets(*lost)
        spots = np.stack([source, start], axis=1).reshape(steps, -1)
        parts = [
            _Part(
                sample_range=(first + number * size, first + (number + 1) * size),
                rows=rows[number],
                is_masked=is_masked,
                num_targets=targets[number] - taken,
                source_counts=counts[number],
                num_masked=taken,
                quarantined=quarantined,
                places=xxhash.xxh3_64_intdigest(spots[number].data),
            )
            for number in range(steps)
        ]
        return _Ready(data_step, stop, place, parts)

    def _document_starts(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, position) of the documents that start in samples [first, end), ascending; none are
        looked up where attention goes across them.
        """
        if self.data.attend == "across":
            return NO_STARTS
        found = self._starts  # read once: another thread may replace it
        if not found.first <= first <= end <= found.end:
            stop = max(end, first + STARTS_AHEAD)
            found = _Starts(first, stop, *self._train.document_starts(*self.locate(first, stop)))
            self._starts = found
        low, high = np.searchsorted(found.row, (first - found.first, end - found.first))
        return found.row[low:high] - (first - found.first), found.position[low:high]

    def locate(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, first token in its training split) of samples [first, end), (n,) int64."""
        low, high = first // self._parts, -(-end // self._parts)
        located = self._located  # read once: another thread may replace it
        if not located.first <= low <= high <= located.first + len(located.source):
            source, draw = self.mixture.locate(np.arange(low, max(high, low + LOCATE_AHEAD)))
            epoch, window = self.order.windows(source, draw)
            token = window * self.window_tokens + self.order.shifts(source, epoch)
            self._located = located = _Located(low, source, token)
        which, part = np.divmod(np.arange(first, end), self._parts)
        which -= located.first
        return located.source[which], located.token[which] + part * self.seq_len

    def _stage(self, data_step: int) -> tuple[int, dict[str, float]]:
        """(first window, weights) of the stage that begins at a data step: windows are whole, so it
        begins with the first one that starts there or later.
        """
        first = -(-self.schedule.sequences_before(data_step) // self._parts)
        return first, {uid: one.weight_at(data_step) for uid, one in self.data.sources.items()}

    def _masked_tokens(self, mask: Mask) -> tuple[int, int, int]:
        """(source number, first token, end token) of a mask."""
        if mask.source not in self.uids:
            raise UserError(
                f"data.skip.mask names the source {mask.source}, which is never drawn: its weight "
                "is 0; remove the entry"
            )
        number = self.uids.index(mask.source)
        return number, *self._train.token_range(number, mask)

    def _is_masked_in(self, first: int, end: int) -> bool:
        """True where a mask holds in some data step of [first, end)."""
        return any(mask.steps[0] < end and first < mask.steps[1] for mask, *_ in self._masks)

    def _masked(self, data_step: int, source, start, is_damaged) -> Masked | None:
        """Tokens of a global batch that are no target, besides the cuts between documents."""
        ranges = [
            tokens for mask, *tokens in self._masks if mask.steps[0] <= data_step < mask.steps[1]
        ]
        if not ranges and is_damaged is None:
            return None
        return masked(source, start, self.seq_len, ranges, is_damaged)


def open_stream(
    data: Data, seed: int, seq_len: int, schedule: Schedule, root: Path, vocab_size: int
) -> Stream:
    """Open (and where needed build) the corpora of a recipe and check them.

    root: the folder that corpus and tokenizer paths are relative to; vocab_size: rows of the
    model's embedding. Raises UserError with all problems found. Call `check(steps)` for the length
    of the run.
    """
    assert seq_len == schedule.seq_len
    return Stream(data, seed, schedule, open_sources(data, seq_len, root, vocab_size), vocab_size)


def stage_steps(data: Data) -> list[int]:
    """The data steps at which some weight changes, ascending, 0 first."""
    return sorted({first for source in data.sources.values() for first, _ in source.stages()})
