"""A rank without torch that sends heartbeats and then hangs: `hang_worker.py PHASE HOW [OTHERS]`.

Rank 1 hangs in PHASE. HOW: stop (SIGSTOP), spin (`while True`), read (a pipe that nobody writes
to), lock (a lock that is never released), gil (in C code that holds the interpreter's lock), freeze
(its agent is stopped too), never (it continues and ends). The other ranks wait in phase OTHERS in a
function whose file looks like that of a collective.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from record.heartbeat import HEART


def main() -> None:
    phase, how, *others = sys.argv[1:]
    if others and os.environ["RANK"] != "1":
        [phase] = others
    if "MARK" in os.environ:
        Path(os.environ["MARK"]).touch()  # the run's folder has come: logs may be written
    HEART.begin()
    if phase != "start":
        HEART.beat("load")
    if phase not in ("start", "load"):
        for step in range(1, 8):
            HEART.beat("step", step, parts=2)
            # The first one long enough to be seen: steps that nobody saw begin do not count.
            time.sleep(0.7 if step == 1 else 0.02)
        HEART.beat(phase)
    if os.environ["RANK"] == "1":
        HANGS[how]()
    elif how != "never":
        wait_for_others()


def wait_for_others() -> None:
    """Wait as in a collective of torch: the file of the innermost frame is one of its."""
    code = compile("import time; time.sleep(1000)", "/x/torch/distributed/c10d.py", "exec")
    exec(code)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def spin() -> None:
    while True:
        pass


def read() -> None:
    os.read(os.pipe()[0], 1)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


def freeze() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    stop()


HANGS = {
    "stop": stop,
    "spin": spin,
    "read": read,
    "lock": lock,
    "gil": gil,
    "freeze": freeze,
    "never": lambda: None,
}

main()
