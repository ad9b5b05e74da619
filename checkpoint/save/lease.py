"""The lease: one attempt writes a run; the next one takes over from a dead or silent one, for good.

    who holds the newest epoch?   nobody, or released    -> take the next one
                                  of the same supervisor -> take it: it starts one after the other
                                  ended on this host     -> take it, at once
                                  alive on this host     -> refused
                                  somewhere else         -> watch: renewed, refused; silent, take it
    took it -> sweep what older epochs were saving -> list what is committed -> renew, in a thread

The one rule: no two clocks are compared. Silence is measured with the watcher's monotonic clock and
the file system's own times. A holder that was only slow loses the run: its next `check` raises
Fenced, the folder that it was saving into is gone, and what it commits all the same is no
checkpoint to any reader. Units: seconds; nanoseconds where named.
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
# Silence after which a holder elsewhere counts as gone: more than a long pause of a file system.
LEASE_S = 60.0
POLL_S = 0.5


def clock() -> float:
    """Seconds that go on while this process, or its host, is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_process(run_folder: Path, lock: int, family: str) -> dict[str, str | int]:
    """What tells this process and this run from every other, as fields of a Holder."""
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
    """What a kernel that does not tell is taken for: one that nobody else has."""
    try:
        return read()
    except OSError:
        return secrets.token_hex(8)


def started(pid: int) -> str | None:
    """When a process of this host started, in the kernel's clock; None when it has ended.

    "" where the kernel does not tell, as of another user's process under `hidepid`.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it is another user's
    try:
        # proc(5): the name, in brackets, may hold blanks; state is field 3, starttime field 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


def is_alive(holder: Holder) -> bool:
    """Whether a holder of this host still runs."""
    now = started(holder.pid)
    return now is not None and (now == holder.start or "" in (now, holder.start))


def judge(holder: Holder | None, me: Mapping, alive: Callable[[Holder], bool] = is_alive) -> str:
    """free, held or unknown: what this host knows of the newest epoch's holder. Pure but for
    `alive`. `me` is `this_process`, its `lock` 0 unless this process has the lock now.

    Under one kernel, a lock that the holder had and this process has was freed by its end; and with
    locks that work, a holder of another folder than this one wrote what this is a copy of. A
    supervisor starts an attempt when the one before has ended, or is on a host that it has lost.
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
    """The newest epoch, once its holder is known to be gone; watches one elsewhere, with `wait`.

    `lock` is the inode of the lock file, where this process has it. Raises UserError where an
    attempt
    of the run goes on.
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
    """Watch a holder elsewhere: True as soon as it renews, False when it was silent too long.

    How long it was silent already is told by the file system's own times.
    """
    before = renewed_ns(run_folder, epoch)
    silent_s = (_server_now_ns(run_folder) - before) / 1e9
    # Times may come from a cache: look for longer than a renewal takes, in any case.
    end = clock() + min(max(2 * RENEW_S, LEASE_S - silent_s), LEASE_S)
    print(f"run={run_folder.name}: waiting up to {end - clock():.0f} s to see whether the attempt"
          f" that holds it goes on", file=sys.stderr, flush=True)  # fmt: skip
    while clock() < end:
        time.sleep(min(POLL_S, RENEW_S / 10))
        if epochs.newest(run_folder) != epoch or renewed_ns(run_folder, epoch) != before:
            return True
    return False


def renewed_ns(run_folder: Path, epoch: int) -> int:
    """When an epoch was last renewed, in the file system's time; opening asks for the newest."""
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
    """An epoch that this process holds; renewed by a thread until `release` or the process's end.

    `lost(problem)` is called by that thread when another attempt has taken the run.
    """

    def __init__(self, run_folder: Path, holder: Holder, lost: Callable[[str], None]):
        self.run_folder, self.holder, self.lost = run_folder, holder, lost
        self.renewed_s = clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        """The number of this attempt among the run's."""
        return self.holder.epoch

    def check(self) -> None:
        """Raise Fenced unless this attempt still is the newest. OSError where nothing can be
        known.
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
        """`check`, where this process was stopped for so long that it may have lost the run."""
        if clock() - self.renewed_s > LEASE_S / 2:
            self.check()

    def release(self) -> None:
        """Say that this attempt has ended, so that no other host waits; what cannot be said is
        not.
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
                pass  # the file system is away: `confirm` and the next save will tell


def take(run_folder: Path, lock: int, lost: Callable[[str], None], family: str = "") -> Lease:
    """Begin an attempt: the next epoch, once no other one goes on. Raises UserError, OSError.

    `lock` is the inode of the lock file that this process has, 0 where there are no locks.
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
    """Checkpoints of an attempt that begins: name -> epoch that wrote it.

    First the folders that older epochs save into lose their names: the rename by which a stopped
    one would commit then finds nothing, whenever it wakes up. What was committed before is listed.
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
            written = None  # it may be a disk that is away
        except UserError:  # of another version of the project
            written = None
        found[folder.name] = written
    return found
