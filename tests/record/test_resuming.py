"""record/resuming.py: a run never starts at step 0 in silence, nor with another order of data."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from rank_threads import run_threads
from small_corpora import counting_document, stream_of, write_corpus

from base.errors import UserError
from checkpoint.comm import Alone
from checkpoint.format.index import Fragment
from checkpoint.format.manifest import committed
from checkpoint.format.rectangles import Box
from checkpoint.format.state import RunState
from checkpoint.lineage import lineage_of
from checkpoint.load.outside_weights import same_everywhere
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep
from data.stream.collect import LedgerCollector
from data.stream.ledger import Ledger, read_ledger
from recipes.compose import compose_command, recipe_yaml
from record import history
from record.records import record_event
from record.resuming import standing

DATA = {"order_version": 1, "corpora": {"synthetic": "ab"}, "window_tokens": 64}
WORDS = ["recipe=tiny", "data=synthetic", "seq_len=64", "batch_tokens=512", "steps=9", "run=r"]


def recipe(*words):
    return compose_command([*WORDS, *words]).recipe


def past(step):
    return {"data_step": step, "tokens": 512 * step, "mixture": "m", "skips": None}


def save_step(folder, step, data, segment=0, **changes):
    """A checkpoint of one weight."""
    state = RunState(
        step=step,
        tokens=512 * step,
        optimizer_step=step,
        seed=1,
        recipe=json.loads(json.dumps(dataclasses.asdict(recipe()))) | changes,
        data=data,
        segment=segment,
        health={"skips_in_a_row": 0, "skipped_steps": 0},
    )
    fragment = Fragment("w", "weight", Box((4, 4), (4, 4)), 0, torch.zeros(16))
    assert save(folder, step, [fragment], state.as_dict(), Alone(), keep=Keep(newest=99)).ok


@pytest.fixture
def run(tmp_path):
    """The folder of a run with checkpoints of steps 2 and 4."""
    (tmp_path / "recipe.yaml").write_text("")
    for step in (2, 4):
        save_step(tmp_path, step, DATA | {"past": past(step)})
        record_event(tmp_path, "saved", attempt=1, step=step)
    return tmp_path


def stands(run, *words, last_step=9, **data):
    return standing(run, recipe(*words), DATA | data, past, last_step)


def damage(run, name):
    """Cut one file of every checkpoint."""
    for _, folder in committed(run / "checkpoints"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-3])


def test_a_checkpoint_that_another_run_has_saved_is_called_that(run):
    """Somebody copied it here: with another seed it was "put the old value back", and no more."""
    save_step(run, 6, DATA | {"past": past(6)}, run="other")
    stand = stands(run)
    assert stand.step == 6
    (line,) = stand.notes
    assert "the checkpoint of step 6" in line
    assert "was saved by another run, run=other" in line
    assert "init_from=runs/other@6" in line
    assert "make branch RUN=other STEP=6" in line
    with pytest.raises(UserError, match="seed: 1234 in the checkpoint, 2 now") as caught:
        stands(run, "seed=2")
    assert caught.value.problems[0] == line


def test_a_renamed_run_and_a_branch_know_the_other_name(run):
    save_step(run, 6, DATA | {"past": past(6)}, run="old-name")
    record_event(run, "saved", attempt=1, step=6)
    assert stands(run).notes == []
    save_step(run, 8, DATA | {"past": past(8)}, run="parent")
    assert "run=parent" in stands(run).notes[0]
    history.append(run, {"kind": "linked", "run": "parent"})
    assert stands(run).notes == []


def test_a_run_goes_on_from_the_newest_whole_checkpoint(run):
    assert stands(run).step == 4
    newest = run / "checkpoints" / "step-00000004"
    shutil.rmtree(newest)
    newest.mkdir()
    assert stands(run).step == 2


@pytest.mark.parametrize("name", ["rank-00000.bin", "rank-00000.json"])
def test_a_run_is_not_finished_by_a_checkpoint_that_lost_a_file(run, name):
    (run / "checkpoints" / "step-00000004" / name).write_bytes(b"")
    assert stands(run, last_step=4).step == 2


def test_step_0_is_never_chosen_in_silence_when_every_checkpoint_is_damaged(run):
    damage(run, "MANIFEST.json")
    with pytest.raises(UserError, match="none is whole"):
        stands(run)
    assert stands(run, "resume=fresh").is_new


def test_step_0_is_never_chosen_in_silence_when_the_checkpoints_are_gone(run):
    (run / "checkpoints").rename(run / "elsewhere")
    with pytest.raises(UserError, match=r"a checkpoint of step 4 was saved.*resume=fresh"):
        stands(run)
    (run / "checkpoints").symlink_to("not-mounted")
    with pytest.raises(UserError, match="not mounted"):
        stands(run)
    (run / "events.jsonl").write_text("")  # killed before its first save
    assert stands(run).step == 0
    history.begin(run, None)
    for segment, step in ((0, 4), (0, 0)):  # a branch has no save of its own; back to the start
        target = history.Target(segment, step, step)
        history.append(run, history.next_segment(history.read(run), target, [], {}))
        if step:
            with pytest.raises(UserError, match="a checkpoint of step 4 was saved"):
                stands(run)
    assert stands(run).step == 0


def rewritten(run, change):
    """The newest checkpoint's state changed by another version of the project."""
    from manifests import rewritten as manifest

    (run / "checkpoints" / "step-00000004").rename(run / "checkpoints" / "step-00001000")
    manifest(run, lambda body: (body.update(step=1000), change(body)))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(format=2),
        lambda body: body["state"].update(later=1),
        lambda body: body["state"].pop("recipe"),
        lambda body: body["state"]["data"].pop("corpora"),
        lambda body: body.update(state=[]),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_and_not_passed_over(run, change):
    rewritten(run, change)
    with pytest.raises(UserError, match="version"):
        stands(run)


def test_shorter_sequences_keep_the_windows_that_the_order_permutes(run):
    """data.window_tokens is by default seq_len: the order would change with it in silence."""
    allowed = ["seq_len=32", "allow=[seq_len]"]
    with pytest.raises(UserError, match=r"data\.window_tokens: 64 in the checkpoint, 32 now"):
        stands(run, *allowed, window_tokens=32)
    assert stands(run, *allowed, "data.window_tokens=64").step == 4


def test_another_training_under_the_name_of_a_run_is_named_first_with_two_ways_out(run):
    with pytest.raises(UserError) as refused:
        stands(run, corpora={"synthetic": "other"})
    assert refused.value.problems[0] == (
        "run=r: this run holds another training, with a checkpoint of step 4. To train this one"
        " beside it, add run=NAME; to replace it, add resume=fresh"
    )
    assert "data.sources.synthetic.corpus holds another corpus" in refused.value.problems[1]
    with pytest.raises(UserError) as refused:  # the same training with another rate
        stands(run, "optim.lr=1e-4")
    assert not any("another training" in line for line in refused.value.problems)


def test_another_training_that_saved_nothing_is_named_before_it_is_replaced(tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe()))
    assert stands(tmp_path, "data=sotu").notes == []  # nothing was trained
    line = {"segment": 0, "step": 3, "attempt": 1, "loss": 9.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert stands(tmp_path, "optim.lr=1e-4").notes == []
    for words in (["data=sotu"], ["model.hidden_size=512"], ["seed=7"]):
        (note,) = stands(tmp_path, *words).notes
        assert note.startswith("run=r: this run holds another training, up to step 3 and without")
        assert note.endswith("to train beside it, add run=NAME")


def test_a_change_is_allowed_by_name_and_not_by_a_pattern(run):
    for pattern in ("'*'", "'optim.*'"):
        with pytest.raises(UserError, match="allowed by name"):
            stands(run, "optim.lr=0.5", f"allow=[{pattern}]")
    assert stands(run, "optim.lr=0.5", "allow=[optim]").step == 4


def test_a_damaged_line_of_the_record_is_a_refusal(run):
    shutil.rmtree(run / "checkpoints")
    (run / "events.jsonl").write_text('{"kind": "saved", "time": 1.0, "attempt": 1}\nnot json\n')
    with pytest.raises(UserError, match=r"events\.jsonl: a line is damaged.*\(line 2: .*fresh"):
        stands(run)


def test_a_history_that_lost_the_line_of_a_segment_is_refused(run):
    """Its skips would be trained on."""
    history.begin(run, None)
    before = (run / "history.jsonl").read_bytes()
    history.rewind(run, 2, (2, 3), "spike")
    save_step(run, 3, {**DATA, "past": past(3)}, segment=1)
    stands(run)
    (run / "history.jsonl").write_bytes(before)
    with pytest.raises(UserError, match=r"segment 1 has left .* no line in .*history\.jsonl"):
        stands(run)
    (run / "history.jsonl").unlink()
    (run / "history.jsonl").mkdir()
    with pytest.raises(UserError, match=r"history\.jsonl is a folder"):
        stands(run)


def test_ranks_that_found_different_weights_or_corpora_refuse_together():
    """init_from=runs/x without a step, while that run saves; hosts with folders of their own."""
    recipe = SimpleNamespace(init_from="runs/x")

    def found(label, corpus):
        def one(comm):
            data = {"corpora": {"prose": corpus(comm.rank)}}
            return same_everywhere(label(comm.rank), data, recipe, comm)

        return run_threads(3, one)

    for result in found(lambda rank: f"runs/x@{rank}", lambda rank: f"id{rank // 2}"):
        assert isinstance(result, UserError)
        assert "runs/x@0 and runs/x@1" in str(result)
        assert "rank 2 reads the corpora {'prose': 'id1'}, rank 0 reads {'prose'" in str(result)
    assert found(lambda rank: "runs/x@1", lambda rank: "id") == [None] * 3


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("lengths", r"would have cut the sequences of steps 1 to \d in another way"),
        ("tokens", r"Keep the past in a ramp, such as batch_tokens=\[\[0,OLD\],\[4,NEW\]\]"),
        ("mixture", r"data.sources.NAME.weight=\[\[0,OLD\],\[4,NEW\]\]"),
        ("skips", "let new ones begin at data step 4 or later"),
    ],
)
def test_a_recipe_that_would_change_the_past_is_refused(run, field, message):
    def other(step):
        return past(step) | {field: "changed"}

    with pytest.raises(UserError, match=message):
        standing(run, recipe(), DATA, other, 9)


def test_a_new_source_is_a_matter_of_weights_and_a_lost_one_is_refused(run):
    words = "data.sources.more={corpus: corpora/more, weight: [[0,0],[4,1]]}"
    both = {"synthetic": "ab", "more": "cd"}
    with pytest.raises(
        UserError, match=r"allow it by name with allow=\[data.sources.more.weight\]"
    ):
        stands(run, words, corpora=both)
    found = stands(run, words, "allow=[data.sources]", corpora=both)
    assert found.step == 4
    with pytest.raises(UserError, match=r"data\.sources\.synthetic\.corpus holds another corpus"):
        stands(run, words, "allow=[data.sources]", corpora={"more": "cd"})


def test_resumed_at_every_step_of_three_epochs_the_ledger_has_no_gap_and_no_repeat(tmp_path):
    """20 windows, 8 a step: epochs end inside steps. Each attempt trains two steps and dies with
    one
    saved; the last rewinds in between as well.
    """
    write_corpus(tmp_path / "c", [counting_document(20 * 16)])
    unbroken = lived(tmp_path, tmp_path / "unbroken", 0, LAST, saves=())
    run = tmp_path / "run"
    for step in range(LAST):
        assert where(run, tmp_path) == step
        lived(tmp_path, run, step, min(step + 2, LAST), saves=(step + 1,))
    assert lines_of(run) == unbroken
    samples = [tuple(line["samples"]) for line in unbroken]
    assert samples == [(8 * n, 8 * n + 8) for n in range(LAST)]  # 20 windows: 3 epochs and more
    hashes = [line["batch_hash"] for line in unbroken]
    assert len(set(hashes)) == LAST
    for back in range(LAST - 1, 0, -1):
        history.rewind(run, back)
        assert where(run, tmp_path) == back
        lived(tmp_path, run, back, LAST, saves=(back + 1,))
    mine = sorted(lineage_of(run).own(read_ledger(run / "ledger")), key=lambda x: x["step"])
    assert [line["batch_hash"] for line in mine] == hashes


LAST = 8  # steps of 8 of 20 windows: the fourth epoch has begun


def lived(root, run, after, last, saves):
    """One attempt of a run, its training left out: stream, ledger, checkpoints; its ledger
    lines.
    """
    stream = stream_of(root, {"c": 1})
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text("")
    segment = history.begin(run, None, after)
    collector = LedgerCollector(Ledger(run / "ledger", after, segment), lambda own: own[None], 1)
    for step in range(after + 1, last + 1):
        collector.add(stream.step(step, 0, 1, 8))
        if step in saves:
            save_step(run, step, stream.state() | {"past": stream.past(step)}, segment)
    return lines_of(run)


def lines_of(run):
    return list(read_ledger(run / "ledger"))


def where(run, root):
    """The step that a start of the run would go on from."""
    if not run.exists():
        return 0
    stream = stream_of(root, {"c": 1})
    return standing(run, recipe(), stream.state(), stream.past, 99).step
