"""One writer: a second start fails, a dead one is followed at once, a stopped one ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest
from saves_on_threads import load_on_all, save_on_all, tensors
from small_fragments import cut_flat

from base.errors import UserError
from base.run_variables import FAMILY
from checkpoint.comm import Alone
from checkpoint.format import epochs
from checkpoint.format.blocks import Damaged
from checkpoint.format.epochs import Fenced, Holder
from checkpoint.format.manifest import committed, read_manifest
from checkpoint.load.choosing import verify
from checkpoint.save import lease
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep
from record import run_folder

ME = {"boot": "b1", "namespace": "n1", "lock": 7, "folder": 70, "family": "f1"}
HOLDER = Holder(3, "t", "h", "b1", "n1", 100, "s", lock=7, folder=70)


def ignore(problem):
    """Nothing is lost in a test that does not look."""


def refuse(problem):
    os._exit(93)


def take(run, lost=ignore, lock=0):
    run.mkdir(exist_ok=True)
    return lease.take(run, lock, lost)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.1)
    monkeypatch.setattr(lease, "LEASE_S", 0.6)


@pytest.mark.parametrize(
    ("holder", "me", "alive", "verdict"),
    [
        (None, {}, False, "unknown"),  # its maker died making it
        (replace(HOLDER, is_released=True), {"boot": "b2"}, True, "free"),
        (replace(HOLDER, family="f1"), {"boot": "b2"}, True, "free"),  # its supervisor lost it
        (replace(HOLDER, family="f2"), {"boot": "b2"}, True, "unknown"),
        (HOLDER, {"boot": "b2", "family": ""}, True, "unknown"),
        (HOLDER, {"boot": "b2"}, False, "unknown"),  # a lock of another kernel proves nothing
        (HOLDER, {}, True, "free"),  # the kernel freed its lock; the number is another process's
        (HOLDER, {"lock": 8}, True, "held"),  # the lock file was deleted and made again
        (HOLDER, {"lock": 8, "folder": 71}, True, "free"),  # a copy of a run that goes on
        (HOLDER, {"lock": 0}, True, "held"),
        (HOLDER, {"lock": 0}, False, "free"),
        (replace(HOLDER, lock=0), {}, True, "held"),
        (replace(HOLDER, lock=0), {}, False, "free"),
        # A number of another container says nothing here, but its lock does.
        (HOLDER, {"namespace": "n2", "lock": 0}, False, "unknown"),
        (HOLDER, {"namespace": "n2"}, True, "free"),
    ],
)
def test_what_is_known_of_a_holder(holder, me, alive, verdict):
    assert lease.judge(holder, ME | me, lambda _: alive) == verdict


def test_each_life_has_the_next_epoch_and_a_second_one_is_refused(tmp_path):
    run = tmp_path / "run"
    first = take(run)
    with pytest.raises(UserError, match=f"process {os.getpid()} of host .* is writing it"):
        take(run)
    first.check()
    first.release()
    second = take(run)
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(Fenced, match=r"\(epoch 2\) has taken it over from epoch 1"):
        first.check()
    first.release()  # says nothing about the other's
    assert not epochs.read(run, 2).is_released
    second.check()
    second.release()


def test_a_supervisor_takes_the_run_from_a_life_on_a_host_that_it_has_lost(tmp_path, monkeypatch):
    """A partition: the old attempt goes on, renews and has the lock; it can write nothing more."""
    monkeypatch.setenv(FAMILY, "one")
    old = run_folder.open_folder(tmp_path / "run", {}, False)
    new = run_folder.open_folder(tmp_path / "run", {}, False)
    assert (old.epoch, new.epoch) == (1, 2)
    with pytest.raises(Fenced):
        old.check()
    monkeypatch.setenv(FAMILY, "another")
    with pytest.raises(UserError, match=r"another process is writing .*\(epoch 2\)"):
        run_folder.open_folder(tmp_path / "run", {}, False)
    for one in (old, new):
        one.release()
    while run_folder.LOCKS:
        run_folder.LOCKS.pop().close()


def test_of_two_that_start_at_once_one_gets_the_run(tmp_path, monkeypatch):
    real, taken = epochs.create, []

    def slow(run, holder):
        if not taken:
            taken.append(1)
            assert real(run, replace(holder, token="other"))
        return real(run, holder)

    monkeypatch.setattr(epochs, "create", slow)
    with pytest.raises(UserError, match="is writing it"):
        take(tmp_path / "run")


def in_child(action, *args):
    """Start `action` in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=action, args=args)
    process.start()
    return process


def _hold_and_die(run):
    take(run)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_of_this_host_is_followed_at_once(tmp_path, capsys):
    run = tmp_path / "run"
    in_child(_hold_and_die, run).join(30)
    assert take(run).epoch == 2
    assert "waiting" not in capsys.readouterr().err  # nothing was watched


def test_a_holder_elsewhere_is_watched_refused_while_it_renews_followed_when_silent(
    tmp_path, short, monkeypatch, capsys
):
    run = tmp_path / "run"
    first = take(run)
    monkeypatch.setattr(lease, "_or_random", lambda read: "another kernel")
    with pytest.raises(UserError, match="on another host or in another container"):
        take(run)
    first.ended.set()  # it is silent, but did not say that it ended
    first.thread.join()
    began = time.monotonic()
    second = take(run)
    assert second.epoch == 2
    assert time.monotonic() - began > 0.1
    assert "waiting up to" in capsys.readouterr().err
    second.release()
    # An epoch whose maker died making it: nothing is known, so it is watched, too.
    epochs.path_of(run, 3).touch()
    assert take(run).epoch == 4


def _stop_at(run, moment, results):
    """An attempt that saves steps 1 and 2, and is stopped by the kernel at `moment` of the
    second.
    """
    lease.RENEW_S, lease.LEASE_S = 0.1, 0.6
    lease._or_random = lambda read: "host A"
    mine = take(run, lost=lambda problem: None)
    (fragments,) = cut_flat(tensors(1), 1)
    assert save(run, 1, fragments, {"who": "A"}, Alone(), fence=mine).ok
    rename = os.rename

    def point(name, rank):
        if name == moment:
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopped_rename(source, target):
        if str(source).endswith(f".tmp-{mine.epoch}"):
            os.kill(os.getpid(), signal.SIGSTOP)
        rename(source, target)

    if moment == "after the last check":
        os.rename = stopped_rename
    outcome = "went on"
    try:
        report = save(
            run, 2, fragments, {"who": "A"}, Alone(), fence=mine, point=point, keep=Keep(newest=1)
        )
        outcome = f"saved: {report.ok}"
    except Fenced as fenced:
        outcome = str(fenced)
    results.put(outcome)


MOMENTS = ["exchange prepare", "write data", "commit", "after the last check", "rename hint",
           "exchange commit", "rename old"]  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_that_was_stopped_and_wakes_up_makes_nothing_final(tmp_path, short, moment):
    """SIGSTOP for longer than the lease, a second attempt, SIGCONT; as two hosts, without locks."""
    run, results = tmp_path / "run", multiprocessing.get_context("fork").SimpleQueue()
    old = in_child(_stop_at, run, moment, results)
    assert os.WIFSTOPPED(os.waitpid(old.pid, os.WUNTRACED)[1])
    is_committed = moment in ("rename hint", "exchange commit", "rename old")
    new = take(run)
    assert new.epoch == 2
    assert sorted(new.holder.found) == [
        f"step-0000000{n}" for n in ([1, 2] if is_committed else [1])
    ]
    before = sorted((p, p.read_bytes()) for p in run.rglob("*") if p.is_file())
    os.kill(old.pid, signal.SIGCONT)
    old.join(30)
    assert "(epoch 2) has taken it over from epoch 1" in results.get()
    after = [(p, data) for p, data in before if p.is_file() and p.read_bytes() == data]
    assert after == before  # no checkpoint came, none went, the hint is the same
    step = 3 if is_committed else 2
    assert save(run, step, cut_flat(tensors(step), 1)[0], {}, Alone(), fence=new).ok
    assert read_manifest(run / "checkpoints" / f"step-0000000{step}").epoch == 2
    assert not list((run / "checkpoints").glob("*.tmp-*"))
    new.release()


def test_the_thread_ends_a_process_that_has_lost_the_run(tmp_path, short):
    def live(run):
        take(run, lost=refuse)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)

    run = tmp_path / "run"
    old = in_child(live, run)
    os.waitpid(old.pid, os.WUNTRACED)
    epochs.rewrite(run, replace(epochs.read(run, 1), boot="another"))
    new = take(run)
    os.kill(old.pid, signal.SIGCONT)
    assert os.WEXITSTATUS(os.waitpid(old.pid, 0)[1]) == 93
    new.check()
    new.release()


def test_what_a_fenced_writer_commits_all_the_same_is_no_checkpoint(tmp_path):
    """A network file system may show it the new epoch too late: readers do not believe it."""

    class Late:
        epoch = 1

        def check(self):
            """Sees nothing."""

    first = take(tmp_path)
    assert all(r.ok for r in save_on_all(tmp_path, 1, fence=first))
    first.release()
    second = take(tmp_path)
    assert all(r.ok for r in save_on_all(tmp_path, 3, fence=Late()))
    late = tmp_path / "checkpoints" / "step-00000003"
    assert "committed it when epoch 2 had the run already" in verify(late)[0]
    with pytest.raises(Damaged) as caught:
        read_manifest(late)
    assert caught.value.problems[0].kind == "late"
    results, same = load_on_all(tmp_path)
    assert same
    assert {result.step for result in results} == {1}
    # It is not in the way of the attempt that has the run, and no later attempt believes it.
    assert all(r.ok for r in save_on_all(tmp_path, 4, fence=Late()))
    assert all(r.ok for r in save_on_all(tmp_path, 3, fence=second))
    second.release()
    third = take(tmp_path)
    assert third.holder.found == {"step-00000001": 1, "step-00000003": 2}
    assert load_on_all(tmp_path)[0][0].step == 3
    assert [step for step, _ in committed(tmp_path / "checkpoints")] == [1, 3, 4]
    assert (tmp_path / "checkpoints" / "step-00000003.damaged-1").is_dir()


def test_a_run_that_was_moved_and_begun_again_is_not_the_old_ones(tmp_path):
    run = tmp_path / "run"
    old = take(run)
    run.rename(tmp_path / "run.before-1")
    with pytest.raises(FileNotFoundError):
        old.check()
    new = take(run)
    assert (old.epoch, new.epoch) == (1, 1)
    with pytest.raises(Fenced):
        old.check()
    new.check()


def test_files_of_old_epochs_go_and_damaged_ones_do_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(epochs, "KEPT", 3)
    for number in range(1, 7):
        one = take(tmp_path)
        assert one.epoch == number
        one.release()
    assert epochs.epochs(tmp_path) == [4, 5, 6]
    for text in (b"", b"[]", b"{}", b'{"epoch": 6}', b"\xff", b"[" * 100_000):
        epochs.path_of(tmp_path, 6).write_bytes(text)
        assert epochs.read(tmp_path, 6) is None
    assert epochs.is_late(tmp_path, "step-00000001", 5) is None
    assert epochs.is_late(tmp_path, "step-00000001", 2) == 5
    assert json.loads(epochs.path_of(tmp_path, 5).read_bytes())["is_released"]
