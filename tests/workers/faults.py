"""Faults in chosen data steps on chosen ranks, in a clone of the project; for tests.

    FAULTS.json beside pretrain.py: [{"data_steps": [20, 23], "rank": 1, "factor": "nan"}]

The product has no hook for this: `infect` rewrites the clone's own pretrain.py. `rank` null = all
ranks. `factor` multiplies the loss, and so its gradient; `raises` is the text of a RuntimeError,
with `rows_above` only for larger micro-batches; `sleep_s` seconds pass in C code, where no signal
handler of Python runs.
"""

from __future__ import annotations

import ctypes
import json
import signal
from pathlib import Path

ENTRY = 'if __name__ == "__main__":\n'


def infect(clone: Path, *faults: dict) -> None:
    """Give the clone these faults instead of earlier ones; an empty list removes them."""
    (clone / "FAULTS.json").write_text(json.dumps(faults))
    (clone / "faults.py").write_text(Path(__file__).read_text())
    path = clone / "pretrain.py"
    text = path.read_text()
    if "import faults" not in text:
        assert text.count(ENTRY) == 1
        path.write_text(text.replace(ENTRY, f"{ENTRY}    import faults\n\n    faults.install()\n"))


def install() -> None:
    """Change the losses that FAULTS.json names; called in a rank of the clone."""
    from model import loss
    from parallel import sharded_modules
    from runtime.health import health_monitor
    from runtime.process import process

    faults = json.loads(Path(__file__).with_name("FAULTS.json").read_text())
    rank = process.launched_rank()
    begin, plain = health_monitor.HealthMonitor.begin, loss.cross_entropy
    now = {"data_step": -1}

    def noting(self, data):
        now["data_step"] = data.data_step
        begin(self, data)

    def sick(*arguments, **keywords):
        value = plain(*arguments, **keywords)
        for fault in faults:
            first, end = fault["data_steps"]
            if first <= now["data_step"] < end and fault["rank"] in (None, rank):
                if "raises" in fault and len(arguments[0]) > fault.get("rows_above", 0):
                    raise RuntimeError(fault["raises"])
                stand_in_c(fault.get("sleep_s", 0))
                value = value * float(fault.get("factor", 1))
        return value

    health_monitor.HealthMonitor.begin = noting
    loss.cross_entropy = sharded_modules.cross_entropy = sick


def stand_in_c(seconds: float) -> None:
    """Spend `seconds` in one call of C code, in which no signal handler of Python runs.

    Signals go to other threads meanwhile, so they do not end the sleep, as they would not end a
    long kernel; other threads get the interpreter's lock.
    """
    if seconds:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        ctypes.CDLL(None).usleep(int(seconds * 1e6))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
