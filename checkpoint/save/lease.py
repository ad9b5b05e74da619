"""The lease: one attempt writes a run, and the next one takes over from a dead or silent one.

    who holds the newest epoch?   nobody, or released    -> take the next epoch
                                  the same supervisor    -> take it: its attempts follow each other
                                  a process that ended   -> take it at once (same host)
                                  a living process       -> refuse (same host)
                                  another host           -> watch: renewed, refuse; silent, take it
    taken -> remove unfinished saves of older epochs -> list committed checkpoints -> renew (thread)

Rule: the clocks of two hosts are never compared. Silence is measured with the watcher's monotonic
clock and with the file system's own times. A holder that was only slow loses the run: its next
`check` raises Fenced, the folder that it was saving into is gone, and readers ignore a checkpoint
that it commits nevertheless. Units: seconds; nanoseconds where named.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from base.errors import UserError
from checkpoint.format import epochs, manifest
from checkpoint.format.blocks import Damaged
from checkpoint.format.epochs import Fenced, Holder

RENEW_S = 5.0
# Silence after which a holder on another host counts as gone; longer than file systems pause.
LEASE_S = 60.0
POLL_S = 0.5


def clock() -> float:
    """Return seconds of a clock that goes on while this process, or its host, is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_process(run_folder: Path, lock: int, family: str) -> dict[str, str | int]:
    """Return fields of a Holder that tell this process and this run from every other."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _or_random(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip()),
        "namespace": _or_random(lambda: os.readlink("/proc/self/ns/pid")),
        "pid": pid,
        "start": started(pid) or "",
        "lock": lock,
        "folder": os.stat(run_folder / epochs.FOLDER).st_ino,
        "family": family,
    }


def _or_random(read: Callable[[], str]) -> str:
    """Return what `read` gives, or a random value, which nobody else has, where the kernel hides
    it.
    """
    try:
        return read()
    except OSError:
        return secrets.token_hex(8)


def started(pid: int) -> str | None:
    """Return when a process of this host started, in the kernel's clock; None when it has ended.

    "" means that the kernel hides it, for example another user's process under `hidepid`.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # the process is another user's
    try:
        # proc(5): the name, in brackets, may contain blanks; state is field 3, starttime field 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


def is_alive(holder: Holder) -> bool:
    """Return whether a holder of this host still runs."""
    now = started(holder.pid)
    return now is not None and (now == holder.start or "" in (now, holder.start))


def judge(holder: Holder | None, me: Mapping, alive: Callable[[Holder], bool] = is_alive) -> str:
    """Return free, held or unknown: what this host knows of the newest epoch's holder.

    Pure except for `alive`. `me` is `this_process`, with `lock` 0 unless this process has the lock
    now. Two inferences hold under one kernel where locks work: if this process has the lock that
    the holder had, the holder has ended; and if the holder names another folder, this folder is a
    copy of its run. A supervisor starts an attempt only when the one before has ended or its host
    is lost.
    """
    if holder is None:
        return "unknown"
    if holder.is_released or (holder.family and holder.family == me["family"]):
        return "free"
    if holder.boot != me["boot"]:
        return "unknown"
    has_both = holder.lock and me["lock"]
    if has_both and (holder.lock == me["lock"] or holder.folder != me["folder"]):
        return "free"
    if holder.namespace != me["namespace"]:
        return "unknown"
    return "held" if alive(holder) else "free"


def refuse_held(run_folder: Path, lock: int, family: str = "", wait: bool = True) -> int:
    """Return the newest epoch as soon as its holder is known to be gone. With `wait`, a holder on
    another host is watched first.

    `lock` is the inode of the lock file, where this process has it. Raises UserError where an
    attempt of the run is running.
    """
    while epoch := epochs.newest(run_folder):
        holder = epochs.read(run_folder, epoch)
        verdict = judge(holder, this_process(run_folder, lock, family))
        if verdict == "held":
            raise _busy(run_folder, f"{holder} is writing it", f"kill {holder.pid}")
        if verdict == "free" or not wait:
            break
        is_alive_there = is_renewed(run_folder, epoch)
        if epochs.newest(run_folder) != epoch:
            continue
        if is_alive_there:
            who = holder or f"another process (epoch {epoch})"
            raise _busy(run_folder, f"{who} is writing it, on another host or in another container")
        break
    return epoch


def _busy(run_folder: Path, why: str, how: str = "") -> UserError:
    stop = f"stop it ({how})" if how else "stop it"
    return UserError(
        f"run={run_folder.name}: {why}; wait for it to end, {stop}, or choose another name"
        f" (run={run_folder.name}-2)"
    )


def is_renewed(run_folder: Path, epoch: int) -> bool:
    """Watch a holder on another host: True as soon as it renews, False when it was silent too long.

    The silence before the watch began is taken from the file system's own times.
    """
    before = renewed_ns(run_folder, epoch)
    silent_s = (_server_now_ns(run_folder) - before) / 1e9
    # Times may come from a cache, so always watch for longer than a renewal takes.
    end = clock() + min(max(2 * RENEW_S, LEASE_S - silent_s), LEASE_S)
    print(f"run={run_folder.name}: waiting up to {end - clock():.0f} s to see whether the attempt"
          f" that holds it still runs", file=sys.stderr, flush=True)  # fmt: skip
    while clock() < end:
        time.sleep(min(POLL_S, RENEW_S / 10))
        if epochs.newest(run_folder) != epoch or renewed_ns(run_folder, epoch) != before:
            return True
    return False


def renewed_ns(run_folder: Path, epoch: int) -> int:
    """Return when an epoch was last renewed, in the file system's time. Opening the file makes a
    network file system ask for the newest value.
    """
    descriptor = os.open(epochs.path_of(run_folder, epoch), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _server_now_ns(run_folder: Path) -> int:
    probe = run_folder / epochs.FOLDER / f"now-{secrets.token_hex(8)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.unlink(probe)
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


class Lease:
    """An epoch that this process holds. A thread renews it until `release` or the process's end.

    That thread calls `lost(problem)` when another attempt has taken the run.
    """

    def __init__(self, run_folder: Path, holder: Holder, lost: Callable[[str], None]):
        self.run_folder, self.holder, self.lost = run_folder, holder, lost
        self.renewed_s = clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        """Number of this attempt among those of the run."""
        return self.holder.epoch

    def check(self) -> None:
        """Raise Fenced unless this attempt is still the newest. Raises OSError where the file
        system does not answer.
        """
        now = epochs.newest(self.run_folder)
        current = epochs.read(self.run_folder, now or self.epoch)
        if current is None or current.token != self.holder.token:
            raise Fenced(
                f"run={self.run_folder.name}: {current or f'epoch {now}'} has taken it over from"
                f" epoch {self.epoch}, this process, which did not answer for a while, or whose"
                " folder was moved; this process ends and writes nothing more"
            )

    def confirm(self) -> None:
        """Call `check` if this process was stopped for so long that it may have lost the run."""
        if clock() - self.renewed_s > LEASE_S / 2:
            self.check()

    def release(self) -> None:
        """Record that this attempt has ended, so that no other host waits. Best effort: errors are
        ignored.
        """
        self.ended.set()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()
        try:
            self.check()
            epochs.rewrite(self.run_folder, replace(self.holder, is_released=True))
        except (OSError, Fenced):
            pass

    def _renew(self) -> None:
        path = epochs.path_of(self.run_folder, self.epoch)
        while not self.ended.wait(RENEW_S):
            try:
                self.check()
                os.utime(path)
                self.renewed_s = clock()
            except Fenced as fenced:
                self.lost(str(fenced))
                return
            except OSError:
                pass  # the file system is away; `confirm` and the next save will notice


def take(run_folder: Path, lock: int, lost: Callable[[str], None], family: str = "") -> Lease:
    """Begin an attempt: take the next epoch as soon as no other attempt runs.

    `lock` is the inode of the lock file that this process has, 0 where there are no locks. Raises
    UserError where another attempt runs, and OSError.
    """
    (run_folder / epochs.FOLDER).mkdir(exist_ok=True)
    while True:
        epoch = 1 + refuse_held(run_folder, lock, family)
        me = this_process(run_folder, lock, family)
        mine = Holder(epoch=epoch, token=secrets.token_hex(16), **me)
        if epochs.create(run_folder, mine):
            break
    found = _fence_off(run_folder, epoch)
    mine = replace(mine, found=found)
    epochs.rewrite(run_folder, mine)
    epochs.forget(run_folder, epoch)
    lease = Lease(run_folder, mine, lost)
    lease.thread.start()
    return lease


def _fence_off(run_folder: Path, epoch: int) -> dict[str, int | None]:
    """Return the checkpoints that exist as an attempt begins: name -> epoch that wrote it.

    First the folders that older epochs save into are renamed. If a stopped writer wakes up later,
    the rename by which it would commit finds nothing. Only then committed checkpoints are listed.
    """
    checkpoints = run_folder / "checkpoints"
    manifest.disown(checkpoints, epoch - 1)
    manifest.sweep(checkpoints, epoch - 1)
    found: dict[str, int | None] = {}
    for _, _, folder in manifest.all_committed(checkpoints):
        try:
            written = manifest.read_manifest(folder).epoch
        except Damaged as damage:
            if damage.problems[0].kind == "late":
                continue
            written = None  # the disk may be away
        except UserError:  # another version of the project wrote it
            written = None
        found[folder.name] = written
    return found
