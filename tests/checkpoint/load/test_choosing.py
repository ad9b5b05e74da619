"""Which checkpoint is taken, and what can go: numbers, damage, pointers, paths, retention."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import WORLD, folder, rewritten
from rank_threads import run_threads
from saves_on_threads import load_on_all, save_on_all, steps
from saves_on_threads import tensors as tensors_at
from small_fragments import Payload, blank, cut_flat, full_tensors

from base.errors import UserError
from checkpoint.comm import Alone
from checkpoint.format import manifest as manifests
from checkpoint.format.blocks import BLOCK_BYTES, Damaged
from checkpoint.format.index import Fragment
from checkpoint.format.index_file import parse_index
from checkpoint.format.manifest import Manifest, committed, decode, encode, read_manifest, sweep
from checkpoint.load.choosing import at_step, newest, set_aside, verify
from checkpoint.load.restoring import load
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep, removable
from commands import checkpoints as lister
from commands import verify as verifier


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 90, 100 and 1000."""
    for step in (90, 100, 1000):
        assert save_on_all(tmp_path, step, world=WORLD)[0].ok
    return tmp_path


def test_steps_are_compared_as_numbers_and_strays_are_never_chosen(run):
    """CKP-09."""
    there = run / "checkpoints"
    (there / "step-00000002000.tmp-0").mkdir()
    (there / "step-999999").mkdir()
    (there / "step-00003000.old").mkdir()
    (there / "step-00004000").write_text("a file")
    (there / "step-00005000").symlink_to(folder(run, 90))
    assert steps(run) == [90, 100, 1000]
    assert newest(run, Alone()).found.step == 1000
    assert removable([90, 100, 1000], Keep(newest=2), verified=1000) == [90]
    assert removable([1000, 90, 100], Keep(newest=2), verified=1000) == [90]


def test_a_checkpoint_of_nine_digits_is_newer_than_one_of_eight(tmp_path):
    for step in (99_999_999, 100_000_000):
        (tmp_path / manifests.folder_name(step)).mkdir()
    assert [step for step, _ in committed(tmp_path)] == [99_999_999, 100_000_000]


@pytest.mark.parametrize("hint", [None, "", "step-00000090\n\n", "step-77777777", "\0", "../../x"])
def test_the_pointer_is_only_a_hint(run, hint):
    """CKP-03: missing, empty, torn, dangling or stale, the newest whole checkpoint is taken."""
    path = run / "checkpoints" / "latest"
    path.unlink()
    if hint is not None:
        path.write_text(hint)
    results, same = load_on_all(run, WORLD)
    assert same
    assert results[0].step == 1000


FILES = ["MANIFEST.json", "rank-00000.bin", "rank-00001.bin", "rank-00000.json", "rank-00001.json"]


@pytest.mark.parametrize("depth", ["sizes", "sampled", "full"])
@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_cut_file_is_found_at_any_depth(run, name, depth):
    path = folder(run, 1000) / name
    data = path.read_bytes()
    assert verify(folder(run, 1000), depth) == []
    for change in (None, data[:-1], data + b" ", b""):
        path.unlink(missing_ok=True)
        if change is not None:
            path.write_bytes(change)
        assert name in "".join(verify(folder(run, 1000), depth))


@pytest.mark.parametrize("name", FILES)
def test_damage_is_passed_over_aloud_by_all_ranks_together(run, name):
    """CKP-04: one flipped bit in one file of the newest; all ranks take the next older one."""
    path = folder(run, 1000) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    results, same = load_on_all(run, 3)
    assert same
    assert {result.step for result in results} == {100}
    for result in results:
        ((damaged, problems),) = result.damaged
        assert damaged.name == "step-00001000"
        assert name in "".join(problems)


def test_step_0_is_never_chosen_in_silence(run):
    for step in (90, 100, 1000):
        (folder(run, step) / "rank-00001.bin").unlink()
    results, _ = load_on_all(run, WORLD)
    for result in results:
        assert isinstance(result, UserError)
        assert "step-00000090/rank-00001.bin: No such file" in str(result)
        assert "resume=fresh" in str(result)
    for result in run_threads(WORLD, lambda comm: newest(run, comm)):
        assert "none is whole" in str(result)
    assert newest(run / "other", Alone()).found is None


def test_a_step_asked_for_is_taken_or_refused_never_replaced(run):
    """CKP-26."""
    results, same = load_on_all(run, WORLD, step=100)
    assert same
    assert {result.step for result in results} == {100}
    path = folder(run, 100) / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[9] ^= 1  # of the right size: only reading finds it
    path.write_bytes(data)
    results, _ = load_on_all(run, WORLD, step=100)
    assert all(isinstance(result, UserError) for result in results)
    assert all(
        "rank-00000.bin: differs from its digests in 1 block" in str(result) for result in results
    )
    (folder(run, 100) / "rank-00000.json").write_bytes(b"{}")
    results, _ = load_on_all(run, WORLD, step=100)
    assert all("rank-00000.json" in str(result) for result in results)
    with pytest.raises(UserError, match="no such checkpoint; it has: 90, 100, 1000"):
        at_step(run, 200, Alone())


def test_weights_alone_can_be_read(run):
    """CKP-26: the older tag, without optimizer states."""
    (fragments,) = cut_flat(full_tensors({"w": (40, 12), "norm": (12,)}, seed=90), 1)
    weights = [f for f in fragments if f.kind == "weight"]
    expected = [f.tensor.clone() for f in weights]
    for fragment in weights:
        fragment.tensor.zero_()
    assert load(run, weights, Alone(), step=90).step == 90
    assert all(torch.equal(a, f.tensor) for a, f in zip(expected, weights, strict=True))


def test_another_model_is_refused_on_all_ranks_and_no_older_checkpoint_is_tried(run):
    ranks = cut_flat(full_tensors({"w": (40, 13), "norm": (12,)}), WORLD)
    for result in run_threads(WORLD, lambda comm: load(run, ranks[comm.rank], comm)):
        assert isinstance(result, UserError)
        assert result.problems == ["step-00001000: w: stored as (40, 12), wanted as (40, 13)"]


def test_one_bad_block_of_many_is_found_by_a_full_check_and_by_the_load(tmp_path):
    tensors = {("w", "weight"): torch.zeros(20 * BLOCK_BYTES // 4)}
    (fragments,) = cut_flat(tensors, 1)
    assert save(tmp_path, 1, fragments, {}, Alone()).ok
    path = folder(tmp_path, 1) / "rank-00000.bin"
    with path.open("r+b") as file:
        file.seek(13 * BLOCK_BYTES + 77)
        file.write(b"\1")
    assert f"first at byte {13 * BLOCK_BYTES}" in verify(folder(tmp_path, 1), "full")[0]
    found = [bool(verify(folder(tmp_path, 1), "sampled", seed)) for seed in range(12)]
    assert any(found)
    with pytest.raises(UserError, match=f"first at byte {13 * BLOCK_BYTES}"):
        load(tmp_path, fragments, Alone())


# Manifests from elsewhere


NAMES = ["../../outside.bin", "/etc/passwd", "rank-00000.bin/../x", "rank-00001.bin\0", "x.pt", ""]


@pytest.mark.parametrize("name", NAMES)
def test_names_in_a_manifest_cannot_leave_the_folder(run, name):
    (run / "outside.bin").write_bytes(b"secret")

    def change(body):
        body["files"][name] = body["files"].pop("rank-00001.bin")

    rewritten(run, change)
    with pytest.raises(Damaged, match="illegal file name"):
        read_manifest(folder(run, 1000))
    assert load_on_all(run, WORLD)[0][0].step == 100


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(step=90),
        lambda body: body.update(step="1000"),
        lambda body: body.update(world=1 << 60),
        lambda body: body.update(world=True),
        lambda body: body.update(surprise=1),
        lambda body: body.pop("state"),
        lambda body: body.update(files=[]),
        lambda body: body["files"].popitem(),
        lambda body: body["files"].update({"rank-00001.bin": [-1, "0" * 32]}),
        lambda body: body["files"].update({"rank-00001.bin": [1, "0" * 31 + "G"]}),
        lambda body: body["files"].update({"rank-00001.bin": 7}),
    ],
)
def test_a_manifest_with_impossible_values_is_damaged(run, change):
    rewritten(run, change)
    with pytest.raises(Damaged):
        read_manifest(folder(run, 1000))


@settings(max_examples=100, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_of_a_manifest_is_found(place, bit, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "MANIFEST.json"
    made = Manifest(
        3, 0, 1, {"a": "b"}, {f"rank-00000.{e}": [5, "0" * 32] for e in ("bin", "json")}
    )
    data = bytearray(encode(made))
    assert decode(bytes(data), path) == made
    data[int(place * len(data))] ^= 1 << bit
    with pytest.raises(Damaged):
        decode(bytes(data), path)


def test_a_manifest_that_is_a_pickle_is_not_executed(run, tmp_path):
    mark = tmp_path / "executed"
    (folder(run, 1000) / "MANIFEST.json").write_bytes(pickle.dumps(Payload(mark)))
    (folder(run, 1000) / "state.pt").write_bytes(pickle.dumps(Payload(mark)))
    assert load_on_all(run, WORLD)[0][0].step == 100
    assert not mark.exists()


def test_a_folder_copied_under_another_step_is_damaged(run):
    shutil.copytree(folder(run, 90), folder(run, 2000))
    assert "is of step 90" in verify(folder(run, 2000), "sizes")[0]
    assert load_on_all(run, WORLD)[0][0].step == 1000


# Retention and leftovers


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True),
    st.integers(1, 4),
    st.integers(0, 50),
    st.data(),
)
def test_the_verified_one_the_newest_and_every_mth_always_stay(numbers, count, every, data):
    verified = data.draw(st.sampled_from(numbers))
    gone = removable(numbers, Keep(newest=count, every=every), verified)
    stay = sorted(set(numbers) - set(gone))
    assert verified in stay
    assert sorted(numbers)[-count:] == stay[-min(count, len(numbers)) :]
    assert all(step < verified for step in gone)
    assert not every or not any(step % every == 0 for step in gone)


def test_keeping_nothing_is_refused():
    with pytest.raises(ValueError, match="newest must be at least 1"):
        Keep(newest=0)


def test_leftovers_are_swept_and_nothing_outside_is_touched(run):
    outside = run / "precious"
    outside.mkdir()
    (outside / "file").write_text("kept")
    there = run / "checkpoints"
    (there / "step-00002000.tmp-0").mkdir()
    (there / "step-00002000.tmp-0" / "link").symlink_to(outside)
    (there / "step-00000080.gone-3").symlink_to(outside)
    (there / "notes.tmp-0").mkdir()
    (there / "step-00002000.tmp-5").mkdir()  # of a later epoch
    assert sorted(sweep(there, 4)) == ["step-00000080.gone-3", "step-00002000.tmp-0"]
    assert (there / "step-00002000.tmp-5").is_dir()
    assert (outside / "file").read_text() == "kept"
    assert (there / "notes.tmp-0").is_dir()
    assert steps(run) == [90, 100, 1000]


# Commands


def test_the_list_shows_every_checkpoint_and_its_condition(run, capsys):
    (folder(run, 100) / "rank-00000.bin").write_bytes(b"")
    assert lister.main([str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["90", "100", "1000"]
    assert "damaged" in lines[2]
    assert "rank-00000.bin" in lines[4]
    assert lister.main([str(run / "nothing")]) == 93


def test_what_cannot_be_judged_here_is_said_and_is_no_traceback(run, capsys):
    rewritten(run, lambda body: body.update(format=2))
    assert lister.main([str(run)]) == 1
    assert "written in format 2" in capsys.readouterr().out
    (run / "history.jsonl").write_text("no line\n")
    for command in (lister, verifier):
        assert command.main([str(run)]) == 93
        assert "refused: " in (said := capsys.readouterr().err)
        assert "line 1 is damaged" in said
    for result in run_threads(WORLD, lambda comm: at_step(run, 90, comm)):
        assert isinstance(result, UserError)
        assert "line 1 is damaged" in str(result)


def test_verify_names_damaged_files_and_fails(run, capsys):
    assert verifier.main([str(run)]) == 0
    path = folder(run, 100) / "rank-00001.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert verifier.main([str(run)]) == 1
    assert str(path) in capsys.readouterr().out
    assert verifier.main([str(run), "--step", "1000"]) == 0
    assert verifier.main([str(run), "--step", "5"]) == 93


def test_a_deeply_nested_manifest_or_index_is_damaged(run):
    path = folder(run, 1000) / "MANIFEST.json"
    body = path.read_bytes()[len(manifests.HEAD) + 32 :]
    deep = b"[" * 100_000 + b"]" * 100_000
    zeros = manifests.BLANK.encode()
    text = manifests.HEAD.encode() + zeros + body.rstrip()[:-1] + b',"x":' + deep + b"}"
    path.write_bytes(text.replace(zeros, manifests.digest(text).hex().encode(), 1))
    with pytest.raises(Damaged, match="recursion"):
        read_manifest(folder(run, 1000))
    with pytest.raises(Damaged, match="recursion"):
        parse_index(deep, path)


@pytest.mark.parametrize("text", [b"[]", b"{}", b"7", b'{"format": 1}'])
def test_what_is_no_index_is_damaged(text, tmp_path):
    with pytest.raises(Damaged, match="not the index"):
        parse_index(text, tmp_path)


def test_a_checkpoint_of_another_version_is_refused_and_not_passed_over(run):
    rewritten(run, lambda body: body.update(format=2))
    assert "format 2" in verify(folder(run, 1000), "full")[0]
    for result in load_on_all(run, WORLD)[0]:
        assert isinstance(result, UserError)
        assert "go on with the version that wrote it" in str(result)


def test_an_unexpected_failure_of_one_rank_is_heard_by_all_and_no_older_one_is_tried(run):
    """A bug or a full memory says nothing about the checkpoint."""
    ranks = [blank(fragments) for fragments in cut_flat(tensors_at(0), WORLD)]
    ranks[1][0] = Fragment("w", "weight", ranks[1][0].box, 0, None)
    for result in run_threads(WORLD, lambda comm: load(run, ranks[comm.rank], comm)):
        assert isinstance(result, UserError)
        assert "step-00001000: rank 1: AttributeError" in str(result)


def test_damaged_checkpoints_are_kept_under_another_name(run):
    where = folder(run, 1000)
    (where.parent / "step-00001000.damaged-1").mkdir()
    lines = set_aside([where])
    assert "step-00001000.damaged-2" in lines[0]
    assert (where.parent / "step-00001000.damaged-2" / "MANIFEST.json").is_file()
    assert 1000 not in [step for step, _ in committed(where.parent)]
    with pytest.raises(UserError, match="could not be set aside"):
        set_aside([where])
