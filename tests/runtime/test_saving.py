"""What the ranks of a run agree on before a save: wait, leave out, stop, when the next one is."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_threads import ThreadRank, Threads, run_threads
from ranks import PATIENCE
from saves_on_threads import steps, tensors
from small_fragments import cut_flat

from base.errors import Shared
from checkpoint.format.blocks import Damaged
from checkpoint.format.manifest import committed, read_manifest
from checkpoint.format.state import RunState
from checkpoint.save import commit
from checkpoint.save.commit import SaveReport
from checkpoint.save.interval import FIRST_STEPS
from checkpoint.save.replicas import Replica
from recipes.compose import compose
from runtime import save_writers, saving
from runtime.save_writers import BackgroundWriter
from runtime.saving import Saver

WORLD = 3
LAST = 1000
LONG = 60.0 * PATIENCE
HEALTH = {"skips_in_a_row": 0, "skipped_steps": 0}
ASYNC = ["checkpoint.mode=async", "checkpoint.interval=1"]


class FakeEngine:
    """A rank's share of some tensors, and weights that all ranks hold."""

    def __init__(self, rank: int):
        self.pieces = cut_flat(tensors(1), WORLD)[rank]
        self.copies = {name: torch.arange(4.0) + number for number, name in enumerate("abc")}

    def fragments(self):
        return self.pieces

    def optimizer_step(self):
        return None

    def replicas(self):
        return [Replica(name, "stage 0", tensor) for name, tensor in self.copies.items()]


class FakeStream:
    def tokens_after(self, step):
        return step

    def state(self):
        return {"order_version": 1, "corpora": {}, "window_tokens": 8}

    def past(self, step):
        return {"data_step": step}


def run_savers(folder: Path, words: list[str], action, monkeypatch):
    """[what action(saver, what was told so far, engine) returned or raised, by rank].

    Each writer gets a world of thread-ranks of its own, as `RankComm` is a group of its own.
    """
    recipe = compose("tiny", words).recipe
    beside, own = Threads(WORLD), threading.local()
    monkeypatch.setattr(save_writers, "RankComm", lambda timeout_s: ThreadRank(own.rank, beside))
    resolved = SimpleNamespace(last_step=LAST, layout=SimpleNamespace(as_dict=dict))

    def one(comm):
        own.rank = comm.rank
        me = SimpleNamespace(rank=comm.rank, is_first=comm.rank == 0, device=torch.device("cpu"))
        engine, told = FakeEngine(comm.rank), []
        saver = Saver(folder, recipe, resolved, FakeStream(), engine, comm, me)
        saver.tell = told.append
        try:
            return action(saver, told, engine)
        finally:
            with beside.changed:
                beside.ended.add(comm.rank)
                beside.changed.notify_all()

    return run_threads(WORLD, one)


def kinds(told):
    """Steps of reports, `ok` or not, and kinds of notes, in order."""
    return [
        (news.step, news.ok) if isinstance(news, SaveReport) else (news.facts["step"], news.kind)
        for news in told
    ]


def slow_rank(monkeypatch, victim, gate):
    """Let one rank's writes wait for `gate`; what is set when it waits."""
    write, waits = commit.write_rank, threading.Event()

    def slow(folder, rank, *arguments, **keywords):
        if rank == victim:
            waits.set()
            assert gate.wait(LONG)
        return write(folder, rank, *arguments, **keywords)

    monkeypatch.setattr(commit, "write_rank", slow)
    return waits


@pytest.mark.parametrize("words", [["checkpoint.interval=1"], ASYNC])
def test_the_record_is_made_durable_before_a_checkpoint_vouches_for_it(
    tmp_path, monkeypatch, words
):
    found = []

    def action(saver, told, engine):
        saver.sync_record = lambda: found.append((saver.process.rank, steps(tmp_path)))
        saver.save(1, HEALTH)
        saver.drain()
        return kinds(told)

    results = run_savers(tmp_path, words, action, monkeypatch)
    assert results == [[(1, True)]] * WORLD, results
    assert found == [(0, [])]
    assert steps(tmp_path) == [1]


def test_a_save_waits_for_the_one_in_flight_and_says_so(tmp_path, monkeypatch):
    gate = threading.Event()
    slow_rank(monkeypatch, 1, gate)
    wait = BackgroundWriter._wait

    def opening(writer):  # the first that waits lets it go on
        gate.set()
        return wait(writer)

    monkeypatch.setattr(BackgroundWriter, "_wait", opening)

    def action(saver, told, engine):
        assert saver.is_due(1)
        saver.save(1, HEALTH)
        saver.poll()
        saver.save(2, HEALTH)
        assert saver.drain() is None
        return told

    for told in run_savers(tmp_path, ASYNC, action, monkeypatch):
        assert kinds(told) == [(1, True), (2, "save_waited"), (2, True)]
        assert told[1].facts["behind"] == 1
        assert told[1].facts["seconds"] > 0
        assert told[2].stall_s < told[2].seconds
    assert steps(tmp_path) == [1, 2]


def test_a_stuck_writer_is_named_and_training_goes_on_without_it(tmp_path, monkeypatch, capsys):
    """Saves that fall due are left out by all ranks alike; when it ends they go on."""
    gate, arrived = threading.Event(), threading.Barrier(WORLD)
    waits = slow_rank(monkeypatch, 1, gate)

    def action(saver, told, engine):
        saver.writer.stuck_s = 0.2
        saver.save(1, HEALTH)
        assert waits.wait(LONG)  # on a busy machine it would still be on its way there
        for step in (2, 3):
            saver.poll()
            saver.save(step, HEALTH)
        arrived.wait(LONG)
        saver.writer.stuck_s = LONG
        gate.set()
        while saver.writer.background.in_flight:
            saver.poll()
        arrived.wait(LONG)
        saver.save(4, HEALTH)
        assert saver.drain() is None
        return told

    results = run_savers(tmp_path, ASYNC, action, monkeypatch)
    for told in results:
        found = kinds(told)
        assert found.count((1, "save_stuck")) == 1
        assert [one for one in found if one[1] != "save_waited"] == [
            (1, "save_stuck"), (2, False), (3, False), (1, True), (4, True),
        ]  # fmt: skip
        left_out = next(news for news in told if isinstance(news, SaveReport))
        assert left_out.problem.startswith("that of step 1 is still being written by rank")
        assert "rank 1 (after checkpoint prepare)" in left_out.problem
    assert steps(tmp_path) == [1, 4]
    assert "rank 1: after checkpoint prepare" in capsys.readouterr().err


def test_a_save_that_is_left_out_falls_due_again_an_interval_later(tmp_path, monkeypatch):
    gate = threading.Event()
    slow_rank(monkeypatch, 1, gate)
    words = ["checkpoint.interval=auto", "cluster.mtbf_hours=1", "checkpoint.mode=async"]

    def action(saver, told, engine):
        saver.writer.stuck_s = 0.2
        due = []
        for step in range(1, 2 * FIRST_STEPS + 1):
            saver.poll()
            if saver.is_due(step):
                saver.save(step, HEALTH)
                due.append((step, saver.pace.next))
        return due

    assert (
        run_savers(tmp_path, words, action, monkeypatch)
        == [[(FIRST_STEPS, 2 * FIRST_STEPS), (2 * FIRST_STEPS, 3 * FIRST_STEPS)]] * WORLD
    )
    gate.set()


def test_a_run_that_ends_waits_for_the_save_in_flight_but_not_for_ever(tmp_path, monkeypatch):
    gate = threading.Event()
    waits = slow_rank(monkeypatch, 1, gate)

    def action(saver, told, engine):
        saver.writer.stuck_s = 0.2
        with saver:
            saver.save(1, HEALTH)
            assert waits.wait(LONG)
            return saver.drain(), kinds(told)

    for problem, told in run_savers(tmp_path, ASYNC, action, monkeypatch):
        assert problem.startswith("step 1 is still being written by rank")
        assert "rank 1 (after checkpoint prepare)" in problem
        assert told == [(1, "save_stuck")]
    gate.set()


@pytest.mark.parametrize("error", [Shared("all ranks stop"), KeyboardInterrupt()])
def test_an_end_by_an_error_leaves_time_for_the_save_in_flight(tmp_path, monkeypatch, error):
    """In the phase of an end: a save may take longer than a step may."""
    gate, beats = threading.Event(), []
    slow_rank(monkeypatch, 1, gate)
    monkeypatch.setattr(save_writers, "HEART", SimpleNamespace(beat=beats.append))

    def action(saver, told, engine):
        try:
            with saver:
                saver.save(1, HEALTH)
                if saver.process.rank == 0:
                    threading.Timer(0.2, gate.set).start()
                raise error
        except type(error):
            return kinds(told)

    assert run_savers(tmp_path, ASYNC, action, monkeypatch) == [[(1, True)]] * WORLD
    assert steps(tmp_path) == [1]
    assert beats == ["end"] * WORLD


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failed_save_is_told_once_on_all_ranks_and_training_goes_on(tmp_path, monkeypatch, mode):
    write = commit.write_rank

    def failing(folder, rank, *arguments, **keywords):
        if rank == 1 and "00000001" in folder.name:
            raise OSError(28, "No space left on device", str(folder))
        return write(folder, rank, *arguments, **keywords)

    monkeypatch.setattr(commit, "write_rank", failing)

    def action(saver, told, engine):
        saver.state.evaluated = (1, 2.5)
        saver.save(1, HEALTH | {"skipped_steps": 1})
        first = saver.drain()
        saver.save(2, HEALTH | {"skipped_steps": 3})
        return first, saver.drain(), kinds(told)

    words = [f"checkpoint.mode={mode}", "checkpoint.interval=1"]
    for first, second, told in run_savers(tmp_path, words, action, monkeypatch):
        assert "rank 1: " in first
        assert "No space left" in first
        assert second is None
        assert told == [(1, False), (2, True)]
    assert steps(tmp_path) == [2]
    ((_, folder),) = committed(tmp_path / "checkpoints")
    health = read_manifest(folder).state["health"]  # of all that no checkpoint says yet
    assert (health["val_loss"], health["val_step"], health["skipped_since_save"]) == (2.5, 1, 3)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_last_save_is_tried_again_until_it_works_or_the_run_is_asked_to_end(
    tmp_path, monkeypatch, mode
):
    """No later step would save its weights. What was seen since the save before is not lost."""
    write, tries = commit.write_rank, []

    def failing(folder, rank, *arguments, **keywords):
        if rank == 1:
            tries.append(folder)
            if len(tries) < 2 or not asked[-1:] == [None]:
                raise OSError(28, "No space left on device", str(folder))
        return write(folder, rank, *arguments, **keywords)

    def unread(folder, rank, *arguments):
        if rank == 1 and len(tries) == 2:  # it is committed by now
            raise Damaged("a block differs from its digest")
        return read_back(folder, rank, *arguments)

    read_back = commit.check_rank
    monkeypatch.setattr(commit, "check_rank", unread)
    monkeypatch.setattr(commit, "write_rank", failing)
    monkeypatch.setattr(saving, "LAST_PAUSES_S", (1, 2))
    monkeypatch.setattr(save_writers, "POLL_S", 0.01)
    asked = []  # what the ranks heard, of all of them

    def action(saver, told, engine, heard=None):
        saver.state.evaluated = (LAST, 2.5)
        saver.save(LAST, HEALTH)
        return saver.last(LAST, HEALTH, lambda: asked.append(heard) or heard), kinds(told)

    words = [f"checkpoint.mode={mode}", "checkpoint.interval=100"]
    again = [(LAST, False), (LAST, "save_again")]
    for found in run_savers(tmp_path, words, action, monkeypatch):
        assert found == ((None, None), [*again, *again, (LAST, True)])
    assert len(asked) == 3 * WORLD
    assert steps(tmp_path) == [LAST]
    ((_, folder),) = committed(tmp_path / "checkpoints")
    assert read_manifest(folder).state["health"]["val_loss"] == 2.5

    tries.clear()
    asked[:] = ["never"]
    results = run_savers(tmp_path / "b", words, lambda *three: action(*three, "end"), monkeypatch)
    for (problem, ending), told in results:
        assert "No space left" in problem
        assert ending == "end"
        assert told == again


def test_a_last_save_that_was_left_out_is_made_good(tmp_path, monkeypatch):
    gate = threading.Event()
    slow_rank(monkeypatch, 1, gate)
    monkeypatch.setattr(saving, "LAST_PAUSES_S", (1,))

    def action(saver, told, engine):
        saver.writer.stuck_s = 0.2
        saver.save(1, HEALTH)
        saver.save(LAST, HEALTH)
        saver.writer.stuck_s = LONG
        gate.set()
        return saver.last(LAST, HEALTH, lambda: None), kinds(told)[-1]

    assert (
        run_savers(tmp_path, ASYNC, action, monkeypatch) == [((None, None), (LAST, True))] * WORLD
    )
    assert steps(tmp_path) == [1, LAST]


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_flipped_bit_in_one_ranks_weights_is_an_alarm_that_names_rank_and_weight(
    tmp_path, monkeypatch, policy
):
    def action(saver, told, engine):
        saver.save(1, HEALTH)
        if saver.process.rank == 2:
            engine.copies["b"].view(torch.int32)[1] ^= 1 << 7
        if policy == "stop":
            with pytest.raises(Shared, match=r"b differ.*rank 2 of those of stage 0"):
                saver.save(2, HEALTH)
        else:
            saver.save(2, HEALTH)
        return told

    words = ["checkpoint.interval=1", f"checkpoint.on_drift={policy}"]
    for told in run_savers(tmp_path, words, action, monkeypatch):
        saved = [] if policy == "stop" else [(2, True)]
        assert kinds(told) == [(1, True), (2, "drift"), *saved]
        assert told[1].facts["parameter"] == "b"
        assert told[1].facts["ranks"] == (2,)
        json.dumps(told[1].facts)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_automatic_interval_is_the_same_on_all_ranks_and_in_the_checkpoint(
    tmp_path, monkeypatch, mode
):
    words = ["checkpoint.interval=auto", "cluster.mtbf_hours=0.001", f"checkpoint.mode={mode}"]
    words += ["checkpoint.keep=100"]

    def action(saver, told, engine):
        saved = []
        for step in range(1, 4 * FIRST_STEPS):
            saver.poll()
            if saver.is_due(step):
                saver.save(step, HEALTH)
                saved.append((step, saver.pace.next))
        saver.drain()
        return saved

    results = run_savers(tmp_path, words, action, monkeypatch)
    assert results[0][0] == (FIRST_STEPS, 2 * FIRST_STEPS)
    assert all(result == results[0] for result in results)
    assert steps(tmp_path) == [step for step, _ in results[0]]
    states = [
        RunState.from_dict(read_manifest(folder).state)
        for _, folder in committed(tmp_path / "checkpoints")
    ]
    assert [state.saving["next"] for state in states] == [after for _, after in results[0]]

    def resume(saver, told, engine):
        saver.go_on(states[1])
        after = states[1].saving["next"]
        return saver.is_due(after) and not saver.is_due(after - 1)

    assert run_savers(tmp_path, words, resume, monkeypatch) == [True] * WORLD
