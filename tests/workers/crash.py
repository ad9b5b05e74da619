"""Trains a small run and kills it at any moment of a save: the cases of `make crash`.

    attempt: lease -> load -> step, ledger, save (sync or async), step, ... -> last save -> release
    moments of a save = points that the product announces (`point`) + each call that changes a file
                        or waits for other ranks, found by replacing os.* in the ranks

The ranks are forked processes with pipes between them; lease, load, save, ledger and retention are
the product's own, on real files. Rule: the moments are recorded in an uninterrupted run, then each
is repeated in a new run that is killed there. Units: steps, samples.
"""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ranks import PATIENCE
from small_fragments import blank, cut_flat, full_tensors

from checkpoint.comm import Alone
from checkpoint.format.manifest import committed
from checkpoint.load.choosing import set_aside, verify
from checkpoint.load.restoring import load
from checkpoint.save import lease
from checkpoint.save.background import Background
from checkpoint.save.commit import save
from checkpoint.save.retention import Keep
from data.stream.ledger import Ledger, read_ledger

WORLD, LAST, INTERVAL, BATCH = 3, 6, 2, 8
SHAPES = {"w": (40, 12), "norm": (12,)}
KEEP = Keep(newest=1)
LIMIT_S = 60.0 * PATIENCE
CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


@dataclass(frozen=True)
class Case:
    """One kill: in the save after `step`, at moment `number` of rank `rank`."""

    mode: str  # sync or async
    step: int
    rank: int
    number: int
    name: str  # of the moment, for people
    how: str  # one = that rank alone, all = every rank at once, torn = in the middle of a write

    def __str__(self) -> str:
        return (
            f"{self.mode} save of step {self.step}, rank {self.rank}, moment {self.number}"
            f" ({self.name}), {self.how}"
        )


class Pipes:
    """Interface of checkpoint.comm between forked processes; rank 0 forwards all values."""

    def __init__(self, rank: int, links: list[Any]):
        self.rank, self.world, self.links = rank, WORLD, links

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Values of all ranks in their order. Raises RuntimeError where another rank has ended."""
        try:
            if self.rank:
                self.links[0].send(value)
                return self.links[0].recv()
            values = [value, *(link.recv() for link in self.links)]
            for link in self.links:
                link.send(values)
            return values
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a rank is gone ({what})") from error


@dataclass
class Moments:
    """Counts the moments of one save on this rank; ends the process at `stop`."""

    step: int
    is_beside: bool  # the save runs in a thread of its own
    stop: Case | None = None
    seen: list[str] = field(default_factory=list)
    savers: set[int] = field(default_factory=set)  # threads whose calls count

    def watch(self, step: int) -> Callable[[str, int], None]:
        """Return the `point` callback of the save after `step`; calls of its thread are counted."""
        if step != self.step:
            return lambda name, rank: None

        def point(name: str, rank: int) -> None:
            is_training = threading.current_thread() is threading.main_thread()
            if self.is_beside and is_training:
                self.note(name)  # what else training does is no part of the save
            else:
                self.savers.add(threading.get_ident())
                self.meet(name)

        return point

    def close(self) -> None:
        """Stop counting: the save has ended."""
        self.savers.clear()

    def meet(self, name: str, tear: Callable[[], Any] = lambda: None) -> None:
        """Count a moment where this thread saves; `tear` does half of the coming write."""
        if threading.get_ident() in self.savers:
            self.note(name, tear)

    def note(self, name: str, tear: Callable[[], Any] = lambda: None) -> None:
        """Count a moment, and end the process where it is the one to stop at."""
        self.seen.append(name)
        stop = self.stop
        if stop is None or len(self.seen) != stop.number + 1:
            return
        assert name == stop.name, f"{name}: the moments of {stop} have changed"
        if stop.how == "torn":
            tear()
        if stop.how == "all":
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Replace the functions of os, so that every call that changes a file is counted."""
        for name in CALLS:
            setattr(os, name, self._seen(name, getattr(os, name)))
        builtins.open = self._seen_open(builtins.open)

    def _seen(self, name: str, call: Callable) -> Callable:
        real_write = os.write

        def seen(*args: Any, **options: Any) -> Any:
            is_write = name == "write"
            half = (lambda: real_write(args[0], args[1][: len(args[1]) // 2])) if is_write else None
            self.meet(f"os.{name}", *([half] if half else []))
            return call(*args, **options)

        return seen

    def _seen_open(self, call: Callable) -> Callable:
        def seen(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if set(mode) & set("wax+"):
                self.meet("open")
            return call(file, mode, *args, **options)

        return seen


def update(fragments: list, rank: int, step: int) -> None:
    """Train one step in place; the change depends on the step alone."""
    for mine, change in zip(
        fragments, cut_flat(full_tensors(SHAPES, seed=step), WORLD)[rank], strict=True
    ):
        mine.tensor.mul_(0.5).add_(change.tensor)


def trained(step: int, rank: int) -> list:
    """State of a rank after `step` of an uninterrupted run."""
    fragments = blank(cut_flat(full_tensors(SHAPES), WORLD)[rank])
    for one in fragments:
        one.tensor.zero_()
    for number in range(1, step + 1):
        update(fragments, rank, number)
    return fragments


def attempt(run: Path, mode: str, main: Pipes, beside: Pipes, moments: Moments) -> dict[str, Any]:
    """Train one attempt of one rank to the last step."""
    torch.set_num_threads(1)
    rank = main.rank
    held = lease.take(run, 0, os._exit) if rank == 0 else None
    main.exchange(None, "lease")
    fragments = trained(0, rank)
    loaded = load(run, fragments, main)
    start = loaded.step if loaded else 0
    if loaded and rank == 0:
        set_aside([path for path, _ in loaded.damaged])
    ledger = Ledger(run / "ledger", start) if rank == 0 else None
    moments.install()
    writer = Background(beside)
    for step in range(start + 1, LAST + 1):
        update(fragments, rank, step)
        if ledger:
            samples = ((step - 1) * BATCH, step * BATCH)
            facts = {"batch_hash": f"{step}", "tokens": 1, "targets": 1, "sources": {}}
            ledger.append(step=step, samples=samples, **facts)
        if step % INTERVAL:
            continue
        options = {"fence": held, "keep": KEEP, "point": moments.watch(step), "local": {}}
        if mode == "sync":
            report = save(run, step, fragments, {"step": step}, main, **options)
            moments.close()
        else:
            while writer.in_flight is not None and not (report := writer.take(1)):
                pass
            if step > start + INTERVAL:
                assert report.ok, report.problem
                moments.close()
            writer.begin(run, step, fragments, {"step": step}, **options)
    while writer.in_flight is not None and not (report := writer.take(1)):
        pass
    assert report.ok, report.problem
    main.exchange(None, "end")
    if held:
        held.release()
    return {"rank": rank, "start": start, "moments": moments.seen}


def start_ranks(run: Path, mode: str, stop: Case | None, step: int) -> list[dict | None]:
    """Run an attempt of all ranks; returns their results, None where one was killed or cut off."""
    run.mkdir(exist_ok=True)
    links = [[multiprocessing.Pipe() for _ in range(WORLD - 1)] for _ in range(2)]
    answers = [multiprocessing.Pipe(duplex=False) for _ in range(WORLD)]
    pids: list[int] = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, pids[0] if pids else 0, links, answers, run, mode, stop, step)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    for pair in (pair for group in links for pair in group):
        for end in pair:
            end.close()
    results: list[dict | None] = []
    for receive, send in answers:
        send.close()
        results.append(_answer(receive, pids))
    for pid in pids:
        os.waitpid(pid, 0)
    problems = [one["error"] for one in results if one and "error" in one]
    if problems and stop is None:
        raise AssertionError("\n".join(problems))
    return [None if one is None or "error" in one else one for one in results]


def _answer(receive: Any, pids: list[int]) -> dict | None:
    if not receive.poll(LIMIT_S):
        os.killpg(pids[0], signal.SIGKILL)
        raise AssertionError(f"no end of an attempt after {LIMIT_S:.0f} s: a rank waits for ever")
    try:
        return json.loads(receive.recv())
    except EOFError:
        return None


def _be_rank(rank, group, links, answers, run, mode, stop, step) -> None:
    """Run the rank in the forked child; never returns."""
    os.setpgid(0, group)
    mine = []
    for pipes in links:
        kept = [pair[0] for pair in pipes] if rank == 0 else [pipes[rank - 1][1]]
        for end in (end for pair in pipes for end in pair if end not in kept):
            end.close()
        mine.append(Pipes(rank, kept))
    for other, (receive, send) in enumerate(answers):
        receive.close()
        if other != rank:
            send.close()
    try:
        moments = Moments(step, mode == "async", stop if stop and stop.rank == rank else None)
        answer = attempt(run, mode, *mine, moments)
    except BaseException:
        answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
    answers[rank][1].send(json.dumps(answer))
    os._exit(0)


def cases(folder: Path, mode: str, step: int) -> Iterator[Case]:
    """Cases for every moment of the save after `step`: rank 0, rank 1, the last rank, all ranks."""
    results = start_ranks(folder / f"probe-{mode}-{step}", mode, None, step)
    for rank, result in enumerate(results):
        for number, name in enumerate(result["moments"]):
            yield Case(mode, step, rank, number, name, "one")
            if name == "os.write":
                yield Case(mode, step, rank, number, name, "torn")
            if rank == 0:
                yield Case(mode, step, rank, number, name, "all")


def crash(folder: Path, case: Case) -> int:
    """Kill a run at `case`, resume it and check it; returns the step from which it resumed."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    results = start_ranks(run, case.mode, case, case.step)
    assert results[case.rank] is None, f"{case}: it was not killed"
    there = [step for step, _ in committed(run / "checkpoints")]
    # 3, 5: what was committed before is there; so at most one interval is lost.
    least = case.step - INTERVAL
    assert there == [] if least == 0 and not there else max(there) >= least, f"{case}: {there}"
    for step, path in committed(run / "checkpoints")[-1:]:
        assert verify(path, "full") == [], f"{case}: step {step} is committed and not whole"
    results = start_ranks(run, case.mode, None, 0)
    # 1, 2: all ranks went on from the newest committed one.
    assert {one["start"] for one in results} == {max(there, default=0)}, f"{case}: {results}"
    # 4: the end is that of a run that nothing stopped, to the bit.
    check_end(run, case)
    return results[0]["start"]


def check_end(run: Path, case: Case | None) -> None:
    """Check weights, moments and ledger of a finished run, and that no file is left over."""
    for rank in range(WORLD):
        expected = trained(LAST, rank)
        found = blank(expected)
        assert load(run, found, Alone()).step == LAST, case
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one.tensor, two.tensor), case
    # 6: each sample once.
    lines = [(line["step"], *line["samples"]) for line in read_ledger(run / "ledger")]
    assert lines == [(s, (s - 1) * BATCH, s * BATCH) for s in range(1, LAST + 1)], (
        f"{case}: {lines}"
    )
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", f"step-{LAST:08d}"], f"{case}: {names}"
