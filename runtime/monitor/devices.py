"""Listens to the process that reads this host's GPUs (runtime.monitor.device_reader).

    reader process --lines--> thread of this process --> newest values, alarms so far

Rule: a call into the driver that never returns costs readings and nothing else. A reader that
prints nothing for too long is killed and started again, with longer and longer pauses; there is one
notice at the first time, and one when readings come again. Units: seconds.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from base.paths import ROOT
from runtime.monitor.device_alarms import Alarm, CardWatch

START_S = 30.0  # time to start Python and the driver's library, on a busy host
LONGEST_PAUSE_S = 600.0
MOST_KEPT = 100  # alarms and notices that rank 0 may not have read yet
NO_NVML = 3


class Devices:
    """The GPUs of this host. `changed` is called, from a thread, when `news` has something new."""

    def __init__(self, every_s: float, timeout_s: float, changed: Callable[[], None]):
        self._every_s, self._timeout_s, self._changed = every_s, timeout_s, changed
        self._cards: dict[int, CardWatch] = {}
        self._process: subprocess.Popen | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._news: dict[str, Any] = {"number": 0, "gpus": [], "said": []}
        self._num_facts = 0  # alarms and notices so far
        self._is_silent, self._reported_at = False, float("-inf")
        threading.Thread(target=self._run, daemon=True, name="devices").start()

    def news(self) -> dict[str, Any]:
        """{"number": of the reading, "gpus": [...], "said": [[number, {...}], ...]}.

        `said` holds the last alarms and notices with their numbers, so that a reader that looks
        rarely misses none.
        """
        with self._lock:
            return dict(self._news)

    def count(self) -> int:
        """A number that rises with every change of `news`."""
        with self._lock:
            return self._news["number"] + self._num_facts

    def close(self) -> None:
        """End the reader."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        pause_s = self._timeout_s
        while not self._stopping.is_set():
            readings, why = self._listen()
            if self._stopping.is_set() or why is None:
                return
            if readings:
                pause_s = self._timeout_s
            now = time.monotonic()
            if not self._is_silent and now - self._reported_at > LONGEST_PAUSE_S:
                # Readings that stop again and again are reported from time to time.
                self._is_silent, self._reported_at = True, now
                self._log("notice", text=f"GPU readings have stopped: {why}; starting anew")
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _listen(self) -> tuple[int, str | None]:
        """Start a reader and listen until it ends.

        Returns the number of readings and the reason of the end; None: this host has nothing to
        read.
        """
        command = [
            sys.executable,
            "-m",
            "runtime.monitor.device_reader",
            "--every",
            str(self._every_s),
        ]
        try:
            process = self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,  # the reader ends when this is closed
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            return 0, f"no process for it: {error.strerror}"
        readings, rest = 0, b""
        deadline = time.monotonic() + START_S + self._timeout_s
        output = selectors.DefaultSelector()
        output.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not output.select(max(0.0, deadline - time.monotonic())):
                process.kill()  # without a wait: it may be stuck in the kernel
                return readings, f"no answer for {self._timeout_s:.0f} s"
            more = os.read(process.stdout.fileno(), 65536)
            if not more:
                process.stdin.close()
                status = process.wait()
                return readings, None if status == NO_NVML else f"its reader ended with {status}"
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "notice" in said:
                    self._log("notice", text=said["notice"])
                else:
                    readings += 1
                    self._take(said)
            deadline = time.monotonic() + self._every_s + self._timeout_s

    def _take(self, said: dict[str, Any]) -> None:
        """Take one reading: its values, and the alarms that follow from it."""
        now = time.monotonic()
        alarms: list[Alarm] = []
        for gpu in said["gpus"]:
            watch = self._cards.setdefault(gpu["index"], CardWatch())
            alarms += watch.add(gpu, now)
        alarms += [Alarm(found["index"], *found["ailment"]) for found in said["xids"]]
        if self._is_silent:
            self._is_silent = False
            self._log("notice", text="GPU readings have come again")
        for alarm in alarms:
            self._log("alarm", **alarm._asdict(), is_quiet=alarm.is_quiet)
        with self._lock:
            self._news["number"] += 1
            self._news["gpus"] = said["gpus"]
        self._changed()

    def _log(self, kind: str, **facts: Any) -> None:
        with self._lock:
            self._num_facts += 1
            said = [*self._news["said"], [self._num_facts, {"kind": kind, **facts}]]
            self._news["said"] = said[-MOST_KEPT:]
        self._changed()
