"""A run trained again: the replay segments, the code it was trained with, the comparison."""

from __future__ import annotations

import json
import subprocess

import pytest

from base.errors import UserError
from compare.agreement import compared, numbers_of, verdict_of, why_not_bits
from compare.recorded_code import recorded_code
from compare.replay_segments import plan
from data.stream.ledger import Ledger
from record import environment

# ---- replay segments


def opening(number, parent=None, step=0, skip=()):
    place = None if parent is None else {"segment": parent, "step": step, "run": "other"}
    skips = [{"range": list(one)} for one in skip]
    return {"kind": "segment", "segment": number, "parent": place, "first_step": step + 1,
            "skips": skips}  # fmt: skip


def entry(segment, after, name="a"):
    return {"segment": segment, "after_step": after, "name": name}


def shown(replay_segments):
    return [
        (
            replay_segment.segment,
            replay_segment.after,
            replay_segment.stop,
            replay_segment.entry["name"],
            bool(replay_segment.opens),
        )
        for replay_segment in replay_segments
    ]


def test_replay_segments_end_where_the_next_one_has_to_begin():
    lines = [opening(0), opening(1, 0, 80, [(85, 90)])]
    entries = [entry(0, 0), entry(1, 80, "b"), entry(1, 120, "c")]
    replay_segments, numbers = plan(lines, entries, {0: 105, 1: 200})
    assert shown(replay_segments) == [
        (0, 0, 80, "a", False),
        (0, 80, 105, "a", False),
        (1, 80, 120, "b", True),
        (1, 120, 200, "c", False),
    ]
    assert numbers == {0: 0, 1: 1}
    assert replay_segments[2].opens["parent"] == {"segment": 0, "step": 80}
    assert replay_segments[2].opens["skips"] == [{"range": [85, 90]}]


def test_what_started_again_from_an_earlier_checkpoint_replaces_what_it_trained_again():
    entries = [entry(0, 0), entry(0, 60, "lost"), entry(0, 40, "b"), entry(0, 90, "late")]
    replay_segments, _ = plan([opening(0)], entries, {0: 80})
    assert shown(replay_segments) == [(0, 0, 40, "a", False), (0, 40, 80, "b", False)]


def test_segments_of_a_branch_that_recorded_nothing_are_left_out_and_numbers_close_up():
    """Of the parent's segments the branch has only the line it comes from."""
    lines = [opening(0), opening(1, 0, 60), opening(2, 0, 80), opening(3, 2, 90)]
    entries = [entry(0, 0), entry(2, 80, "b"), entry(3, 90, "c")]
    replay_segments, numbers = plan(lines, entries, {0: 80, 2: 90, 3: 100})
    assert numbers == {0: 0, 2: 1, 3: 2}
    assert shown(replay_segments) == [
        (0, 0, 80, "a", False), (2, 80, 90, "b", True), (3, 90, 100, "c", True),
    ]  # fmt: skip
    assert [replay_segment.opens["segment"] for replay_segment in replay_segments[1:]] == [1, 2]
    assert replay_segments[2].opens["parent"] == {"segment": 1, "step": 90}


@pytest.mark.parametrize(
    ("entries", "reached", "message"),
    [
        ([entry(0, 0)], {}, "recorded no step"),
        ([], {0: 5}, "does not say under which conditions segment 0 began"),
        ([entry(0, 0), entry(1, 7)], {0: 5, 1: 9}, "step 7 is not on record"),
    ],
)
def test_a_record_that_does_not_say_enough_is_refused(entries, reached, message):
    lines = [opening(0), opening(1, 0, 7)]
    with pytest.raises(UserError, match=message):
        plan(lines, entries, reached)


# ---- the code


def git(root, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    (root / ".gitignore").write_text("runs\ncorpora\n")
    (root / "code.py").write_text("one = 1\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    return root


def test_the_recorded_code_is_put_together_again_and_goes_away(repository):
    (repository / "code.py").write_text("one = 11\n")
    (repository / "new.py").write_text("new = 1\n")
    (repository / "other.py").write_text("other = 1\n")
    then = environment.code(repository)
    assert then["uncommitted_changes"]
    assert set(then["untracked"]) == {"new.py", "other.py"}
    with recorded_code(repository, [then], print) as code:
        assert code.root == repository  # nothing has changed
    git(repository, "commit", "-qam", "two")
    (repository / "other.py").write_text("other = 2\n")
    with recorded_code(repository, [then], print) as code:
        assert code.root != repository
        assert (code.root / "code.py").read_text() == "one = 11\n"
        assert (code.root / "new.py").read_text() == "new = 1\n"
        assert not (code.root / "other.py").exists()
        assert code.notes == [
            "other.py, an untracked file of the recorded run, is missing or changed"
        ]
        (code.root / "runs" / "x").mkdir()
        place = code.root
    assert (repository / "runs" / "x").is_dir()
    assert not place.parent.exists()
    listed = subprocess.run(
        ["git", "-C", str(repository), "worktree", "list"], capture_output=True, check=True
    )
    assert listed.stdout.count(b"\n") == 1
    gone = then | {"commit": "0" * 40}
    with pytest.raises(UserError, match="cannot be checked out"):
        recorded_code(repository, [gone], print).__enter__()


def test_secrets_and_large_changes_are_not_recorded(repository, monkeypatch):
    (repository / ".env").write_text("TOKEN=hidden\n")
    (repository / "code.py").write_text('api_key = "hidden"\n')
    git(repository, "add", "-A")
    now = environment.code(repository)
    assert "hidden" not in json.dumps(now)
    assert "secret" in now["diff"]["reason"]
    (repository / "code.py").write_text("x" * 300_000)
    now = environment.code(repository)
    assert now["diff"]["text"] is None
    assert "larger" in now["diff"]["reason"]
    inside = repository / "inside"
    inside.mkdir()
    assert environment.code(inside)["commit"] is None  # another's repository
    monkeypatch.setattr(environment, "GIT_S", 0)
    silent = environment.difference(repository)  # git does not answer: not "no changes"
    assert silent["text"] is None
    assert "more than 0 s" in silent["reason"]


def test_conditions_are_appended_where_they_differ(tmp_path):
    for threads, segment, after in ((1, 0, 0), (1, 0, 5), (2, 0, 7), (2, 1, 6), (2, 1, 9)):
        environment.record(tmp_path, {"threads": threads}, segment, after)
    found = [(x["threads"], x["segment"], x["after_step"]) for x in environment.read(tmp_path)]
    assert found == [(1, 0, 0), (2, 0, 7), (2, 1, 6)]
    assert json.loads((tmp_path / "environment.json").read_text())["threads"] == 2


# ---- the comparison


def run_of(folder, losses, hashes, segment=0):
    ledger = Ledger(folder / "ledger", segment=segment)
    lines = []
    for step, (loss, value) in enumerate(zip(losses, hashes, strict=True), start=1):
        ledger.append(step=step, samples=(0, 8), batch_hash=value, tokens=8, targets=8, sources={})
        lines.append(
            {"segment": segment, "step": step, "attempt": 1, "loss": loss, "grad_norm": 1.0}
        )
    ledger.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return numbers_of(folder)


ENTRY = {"torch": "2", "processor": "x", "packages": {"deepspeed": "1"}}


def test_the_verdict_is_identical_or_the_first_difference_or_why_not(tmp_path):
    old = run_of(tmp_path / "old", [3.0, 2.0, None], "abc")
    same = run_of(tmp_path / "same", [3.0, 2.0, None], "abc", segment=1)
    text, is_good = verdict_of(compared(old, same, {0: 1}), [])
    assert is_good
    assert text == "identical: 3 losses and 3 batch hashes of segment 0 (1 to 3)"

    near = run_of(tmp_path / "near", [3.0, 2.0 + 1e-6, None], "abc")
    found = compared(old, near, {0: 0})
    text, is_good = verdict_of(found, [])
    assert not is_good
    assert text.startswith("first difference: segment 0, step 2: loss 2.0 recorded, 2.000001 now")
    assert "DIFFERENT" in text
    reasons = why_not_bits([ENTRY], [ENTRY | {"torch": "3"}], ["a note"])
    assert reasons == ["a note", "torch was 2, now 3"]
    text, is_good = verdict_of(found, reasons)
    assert is_good
    assert "bits cannot be expected: torch was 2, now 3" in text

    for losses, hashes in (([3.0, 2.0, None], "abx"), ([3.0, 2.1, None], "abc"), ([3.0], "a")):
        other = run_of(tmp_path / f"{losses}{hashes}", losses, hashes)
        assert not verdict_of(compared(old, other, {0: 0}), reasons)[1]


def test_a_rewind_that_the_copys_own_policy_came_to_is_not_repeated(tmp_path):
    from commands.reproduce import ReplayError, open_segment
    from record import history

    history.begin(tmp_path, None)
    line = opening(1, 0, 80, [(85, 90)])
    open_segment(tmp_path, line)
    open_segment(tmp_path, line)
    assert (tmp_path / "history.jsonl").read_text().count("\n") == 2
    with pytest.raises(ReplayError, match="the policy rewound it to step 80"):
        open_segment(tmp_path, opening(1, 0, 60, [(85, 90)]))


def test_a_name_that_exists_already_is_refused(tmp_path, monkeypatch, capsys):
    from commands import reproduce

    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    for name in ("r", "r-again"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").write_text("")
    assert reproduce.main(["r"]) == 93
    assert "NAME=r-again: runs/r-again exists" in capsys.readouterr().err
    assert reproduce.main(["r", "--name", "a/b"]) == 93
    assert reproduce.main(["nobody"]) == 93
    assert reproduce.main(["r", "--name", "x"]) == 93
    assert "recorded no step" in capsys.readouterr().err
