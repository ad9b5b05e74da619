"""Sends alerts to people: an event, a line on the console, and the command of the recipe.

    alert = AlertSender(...)    alert("roll_back", "tiny: step 120: ...", step=120)

Rule: an alert never harms the run. The command has fixed arguments and no shell. It runs beside
training under a time limit, one command at a time, and its failure becomes an event. It gets the
text on standard input and in its environment, which holds no other variable of the run. Secrets
are removed from both. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from base.parent_death import PR_SET_PDEATHSIG
from base.redaction import redacted, secret_values
from recipes.faults import Alerts as Knobs

# Variables that a program needs to start. None of them can hold a key.
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE")
# A small process between the run and the command. It leads the command's session and ends all of it
# when the run's process is killed. The usual way, a prctl call between fork and exec, is not safe
# in a process with threads.
GUARD = f"""
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
status = subprocess.call(sys.argv[2:])
os._exit(status if status >= 0 else 128 - status)
"""
MOST_WAITING = 32
LONGEST_TEXT = 2000


class AlertSender:
    """Sends the alerts of one run. `event(kind, **fields)` writes a line of events.jsonl."""

    def __init__(
        self, run: str, knobs: Knobs, event: Callable[..., None], log: Callable[[str], None]
    ):
        self.run, self.knobs, self.event, self.log = run, knobs, event, log
        self._waiting: queue.Queue = queue.Queue(MOST_WAITING)
        self._worker: threading.Thread | None = None
        self._running: subprocess.Popen | None = None  # the command that was started last
        self._is_over = False

    def __call__(self, kind: str, text: str, **facts: Any) -> None:
        """Write an event and a console line, and start the command if there is one.

        Returns at once.
        """
        known = secret_values(os.environ)
        text = redacted(text, known)[:LONGEST_TEXT]
        facts = redacted(facts, known)
        self.event(kind, text=text, **facts)
        self.log(f"alert: {text}")
        self._send(kind, text, facts)

    def pass_on(self, kind: str, text: str) -> None:
        """Start only the command, for what is on record and shown already; returns at once."""
        self._send(kind, redacted(text, secret_values(os.environ))[:LONGEST_TEXT], {})

    def _send(self, kind: str, text: str, facts: Mapping[str, Any]) -> None:
        if not self.knobs.command:
            return
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._worker.start()
        try:
            self._waiting.put_nowait((kind, text, facts))
        except queue.Full:
            self.event("alert_failed", alert=kind, reason=f"{MOST_WAITING} alerts wait already")

    def close(self) -> None:
        """Wait until all alerts are sent or the time limit is over, then kill what still runs."""
        if self._worker is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._worker.join(self.knobs.timeout_s + 1)
            self._is_over = True
            while self._worker.is_alive():
                if self._running is not None:
                    kill(self._running)
                self._worker.join(0.1)
            self._worker = None

    def _work(self) -> None:
        def started(process: subprocess.Popen) -> None:
            self._running = process

        while (waiting := self._waiting.get()) is not None:
            reason = "the run ended before it was sent"
            if not self._is_over:
                reason = run_command(self.knobs, self.run, *waiting, started)
            if reason:
                with contextlib.suppress(OSError):  # perhaps the disk is full
                    self.event("alert_failed", alert=waiting[0], reason=reason)
            if self._is_over and self._waiting.empty():
                return


def kill(process: subprocess.Popen) -> None:
    """End a command and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:  # else the number may belong to another process by now
            os.killpg(process.pid, signal.SIGKILL)


def run_command(
    knobs: Knobs,
    run: str,
    kind: str,
    text: str,
    facts: Mapping[str, Any],
    started: Callable[[subprocess.Popen], None] = lambda process: None,
) -> str | None:
    """Run the command for one alert; returns why that failed, or None."""
    environment = {name: os.environ[name] for name in PASSED if name in os.environ}
    environment |= {"ALERT_RUN": run, "ALERT_KIND": kind, "ALERT_TEXT": text}
    lines = [text, "", *(f"{name}: {value}" for name, value in facts.items())]
    if shutil.which(knobs.command[0], path=environment.get("PATH", os.defpath)) is None:
        return f"{knobs.command[0]}: No such file, or not one that may be executed"
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), *knobs.command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its children end with it
        )
    except (OSError, ValueError) as error:
        return f"{knobs.command[0]}: {error}"
    started(process)
    try:
        process.communicate("\n".join(lines).encode() + b"\n", timeout=knobs.timeout_s)
    except subprocess.TimeoutExpired:
        kill(process)
        process.wait()
        return f"{knobs.command[0]} did not end within {knobs.timeout_s} s and was killed"
    except OSError as error:
        process.wait()
        return f"{knobs.command[0]}: {error}"
    if process.returncode:
        return f"{knobs.command[0]} ended with status {process.returncode}"
    return None
