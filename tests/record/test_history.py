"""record/history.py: a rewind is one line, moves nothing, and abandoned steps never come back."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from base.errors import UserError
from checkpoint.comm import Alone
from checkpoint.format.index import Fragment
from checkpoint.format.manifest import abandoned, committed
from checkpoint.format.rectangles import Box
from checkpoint.format.state import RunState
from checkpoint.lineage import lineage, lineage_of, read
from checkpoint.load import choosing
from checkpoint.load.choosing import at_step
from checkpoint.load.restoring import load
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep
from commands import verify
from recipes.compose import compose
from record import history

RECIPE = {"model": {}, "data": {"skip": {"advance": [[0, 2]]}}, "optim": {}, "seq_len": 64}
ALL = Keep(newest=100)
LEFT_OUT = 2  # data steps that the recipe itself leaves out


def put(folder, step, segment=0, keep=ALL):
    """A checkpoint whose one weight says where it is from."""
    state = RunState(
        step=step,
        tokens=512 * step,
        optimizer_step=step,
        seed=1,
        recipe=RECIPE,
        data={"order_version": 1, "corpora": {}, "window_tokens": 64,
              "past": {"data_step": step + LEFT_OUT}},
        segment=segment,
        health={"skips_in_a_row": 0, "skipped_steps": 0},
    )  # fmt: skip
    values = torch.full((16,), 1000.0 * segment + step)
    fragment = Fragment("w", "weight", Box((4, 4), (4, 4)), 0, values)
    report = save(folder, step, [fragment], state.as_dict(), Alone(), keep=keep)
    assert report.ok, report.problem
    return report


def weight(folder, step=None):
    """What a start would load."""
    values = torch.zeros(16)
    load(folder, [Fragment("w", "weight", Box((4, 4), (4, 4)), 0, values)], Alone(), step)
    return values[0].item()


def steps(folder):
    return [step for step, _ in committed(folder / "checkpoints")]


@pytest.fixture
def run(tmp_path):
    """A run of one segment with checkpoints of steps 20, 40, ... 100."""
    folder = tmp_path / "r"
    folder.mkdir()
    history.begin(folder, None)
    for step in range(20, 101, 20):
        put(folder, step)
    return folder


def test_a_rewind_is_one_line_and_moves_nothing(run):
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    old = (run / "history.jsonl").read_bytes()
    line = history.rewind(run, 80, (85, 90), "loss spike", "policy")
    assert (line["segment"], line["parent"]) == (1, {"segment": 0, "step": 80})
    assert (line["first_step"], line["data_step"]) == (81, 80 + LEFT_OUT)
    new = (run / "history.jsonl").read_bytes()
    assert new.startswith(old)
    assert new.count(b"\n") == old.count(b"\n") + 1
    assert {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")} == before
    assert weight(run) == 80
    assert steps(run) == [20, 40, 60, 80]
    (skip,) = history.in_force(read(run))
    assert (skip["range"], skip["from_step"], skip["who"]) == ([85, 90], 81, "policy")
    assert skip["why"] == "loss spike"
    assert skip["since"].endswith("Z")


def test_a_kill_in_a_rewind_leaves_the_old_lineage_or_the_new_one(run):
    """Every length that the line can have on disk."""
    old = (run / "history.jsonl").read_bytes()
    history.rewind(run, 80, [(85, 90)], "why")
    line = (run / "history.jsonl").read_bytes()[len(old) :]
    for length in range(len(line) + 1):
        (run / "history.jsonl").write_bytes(old + line[:length])
        is_whole = length == len(line)
        assert steps(run)[-1] == (80 if is_whole else 100)
        assert len(history.in_force(read(run))) == is_whole
        history.append(run, {"kind": "override", "segment": 0, "first_step": 3, "key": "x"})
        assert lineage_of(run).segment == is_whole
        assert read(run)[-1]["key"] == "x"


def test_segments_never_overwrite_each_other_and_the_abandoned_stay_until_outlived(run):
    history.rewind(run, 60)
    put(run, 80, segment=1)
    assert weight(run) == 1080
    assert [(s, n) for s, n, _ in abandoned(run / "checkpoints")] == [(100, 0)]
    assert weight(run, 60) == 60
    with pytest.raises(UserError, match="no such checkpoint"):
        at_step(run, 100, Alone())
    history.rewind(run, 80)
    put(run, 90, segment=2, keep=Keep(newest=2))
    assert steps(run) == [80, 90]
    assert [(s, n) for s, n, _ in abandoned(run / "checkpoints")] == [(100, 0)]
    put(run, 100, segment=2, keep=Keep(newest=2))
    assert not abandoned(run / "checkpoints")
    assert lineage_of(run).spans[1].last == 80


def test_permanent_ones_of_an_abandoned_segment_stay(run):
    history.rewind(run, 40)
    put(run, 100, segment=1, keep=Keep(newest=1, every=60))
    assert [(s, n) for s, n, _ in abandoned(run / "checkpoints")] == [(60, 0)]


def test_a_revived_writer_of_an_abandoned_segment_changes_nothing(run):
    history.rewind(run, 60)
    put(run, 120, segment=0)
    assert weight(run) == 60


def test_a_run_can_be_taken_back_to_its_start_and_to_what_it_abandoned(run):
    history.rewind(run, 0)
    assert steps(run) == []
    put(run, 20, segment=1)
    line = history.rewind(run, 100, segment=0)
    assert line["parent"] == {"segment": 0, "step": 100}
    assert weight(run) == 100
    assert [span.segment for span in lineage_of(run).spans] == [0, 2]


def test_skips_ahead_stay_in_force_and_what_the_target_trained_on_is_past(run):
    history.rewind(run, 80, (85, 95))
    history.rewind(run, 60, (70, 75), "another")
    ranges = [(tuple(s["range"]), s["from_step"]) for s in history.in_force(read(run))]
    assert ranges == [((85, 95), 61), ((70, 75), 61)]
    put(run, 70, segment=2)
    history.rewind(run, 70, (101, 104))
    assert len(history.in_force(read(run))) == 3
    history.rewind(run, 100, segment=0)  # which has trained on the data steps before 102
    ranges = [(tuple(s["range"]), s["from_step"]) for s in history.in_force(read(run))]
    assert ranges == [((102, 104), 101)]


def test_a_segment_whose_checkpoint_is_damaged_goes_on_from_an_older_one_as_a_new_one(run):
    history.rewind(run, 80, (85, 90), "why")
    shutil.rmtree(run / "checkpoints" / "step-00000080")
    assert weight(run) == 60
    for _ in range(2):  # killed at once, and started again
        assert history.begin(run, None, 60) == 2
    line = read(run)[-1]
    assert (line["parent"], line["who"]) == ({"segment": 0, "step": 60}, "resume")
    assert line["why"] == "the checkpoint of step 80 is damaged"
    (skip,) = history.in_force(read(run))
    assert (skip["range"], skip["why"]) == ([85, 90], "why")


def test_skips_join_those_of_the_recipe():
    data = compose("tiny", ["data.skip.advance=[[3,5]]"]).recipe.data
    skips = [{"effect": "advance", "range": [85, 90]}, {"effect": "no_update", "range": [95, 96]}]
    both = history.data_with_skips(data, skips).skip
    assert [list(one) for one in both.advance] == [[3, 5], [85, 90]]
    assert both.no_update == ((95, 96),)
    assert history.data_with_skips(data, []) is data


@pytest.mark.parametrize(
    ("ranges", "problems"),
    [
        ([(85, 85)], ["0 <= first < end"]),
        ([(70, 90)], ["begins in the past of step 80.*before 82"]),
        ([(85, 90), (88, 95)], ["SKIP=88:95 overlaps SKIP=85:90"]),
        ([(96, 98)], ["left out already"]),
        ([(5, 1), (1, 9), (90, 91), (90, 91)], ["5:1", "past", "overlaps"]),
    ],
)
def test_ranges_that_make_no_sense_are_refused_all_at_once(run, ranges, problems):
    history.rewind(run, 80, [(95, 97), (97, 99)])
    before = (run / "history.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        history.rewind(run, 80, ranges)
    assert len(caught.value.problems) == len(problems)
    for line, expected in zip(caught.value.problems, problems, strict=True):
        assert re.search(expected, line)
    assert (run / "history.jsonl").read_bytes() == before


def test_a_step_without_a_whole_checkpoint_is_refused(run):
    with pytest.raises(UserError, match=r"STEP=70: r has no checkpoint.*20, 40, 60, 80, 100"):
        history.rewind(run, 70)
    with pytest.raises(UserError, match="SEGMENT=4: r has the segments 0 to 0"):
        history.rewind(run, 80, segment=4)
    (run / "checkpoints" / "step-00000080" / "rank-00000.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"STEP=80: .* is damaged"):
        history.rewind(run, 80)
    (run / "history.jsonl").unlink()
    with pytest.raises(UserError, match="recorded no step"):
        history.rewind(run, 80)


def test_a_damaged_history_is_refused_and_never_read_as_another_lineage(run):
    history.rewind(run, 60)
    history.rewind(run, 40)
    whole = (run / "history.jsonl").read_bytes().split(b"\n")
    (run / "history.jsonl").write_bytes(b"\n".join([whole[0], whole[2], b""]))
    with pytest.raises(UserError, match=r"segments are \[0, 2\]"):
        steps(run)


def test_a_flipped_bit_anywhere_in_the_history_is_refused_by_its_line(run):
    """One in a range of skips would train another run."""
    history.rewind(run, 80, (85, 90))
    path = run / "history.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for place in range(first, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"history.jsonl line [23] is damaged"):
            read(run)
    old = whole[: whole.rindex(b", ")] + b"}\n"  # as an earlier version wrote it
    path.write_bytes(old)
    with pytest.raises(
        UserError, match="line 2 is damaged: it has no digest, its text gives"
    ) as no:
        read(run)
    wanted = re.search(r"gives (\w{16})", str(no.value))[1]
    path.write_bytes(old[:-2] + f', "digest": "{wanted}"}}\n'.encode())
    assert path.read_bytes() == whole
    assert len(read(run)) == 2


def test_verify_reads_what_belongs_to_the_run_and_with_all_whatever_there_is(run, capsys):
    history.rewind(run, 60)
    put(run, 70, segment=1)
    choosing.set_aside([run / "checkpoints" / "step-00000040"])
    flipped = run / "checkpoints" / "step-00000100" / "rank-00000.bin"
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])

    def verified(*words):
        status = verify.main([str(run), *words])
        said = capsys.readouterr()
        lines = [line.partition(";")[0] for line in said.out.splitlines() if ";" in line]
        return status, lines, said.err

    own = ["step 20: whole", "step 60: whole", "step 70 of segment 1: whole"]
    assert verified() == (0, own, "")
    status, lines, _ = verified("--all")
    assert status == 1
    assert lines == [
        own[0],
        "step 40 (set aside, step-00000040.damaged-1): whole",
        own[1],
        own[2],
        "step 80 (abandoned): whole",
        "step 100 (abandoned): damaged",
    ]
    assert verified("--all", "--step=80") == (0, ["step 80 (abandoned): whole"], "")
    status, _, said = verified("--step=100")
    assert status == 93
    assert "no checkpoint of step 100 to verify; ALL=1 also looks at abandoned ones" in said
    path = run / "history.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 60', b'"step": 61'))
    assert verified()[0] == 93


def test_a_change_on_record_is_what_the_next_start_compares_with(run):
    lines = [
        *read(run),
        {"kind": "override", "segment": 0, "first_step": 41, "key": "optim.lr", "now": 1},
        {"kind": "override", "segment": 0, "first_step": 101, "key": "optim.lr", "now": 2},
        {"kind": "override", "segment": 0, "first_step": 101, "key": "optim.x", "now": "(absent)"},
    ]
    stored = {"optim": {"lr": 1, "x": 3}}
    assert history.recorded(lines, 100, stored) == {"optim": {"lr": 2}}
    assert history.recorded(lines, 101, stored) == stored
    assert stored == {"optim": {"lr": 1, "x": 3}}
    rewound = [*lines, {"kind": "segment", "segment": 1, "parent": {"segment": 0, "step": 40},
                        "first_step": 41}]  # fmt: skip
    assert history.recorded(rewound, 40, stored) == stored
    assert json.dumps(lineage(rewound).own([{"segment": 0, "step": 41}, {"step": 40}])) == (
        '[{"step": 40}]'
    )
