"""A rank without torch that writes the record of a run like rank 0 and ends as PLAN says.

    attempt_worker.py RUN_FOLDER PLAN      PLAN: JSON, for each attempt
                                           [newest step, saved step, ending]

ENDING: an exit status, `kill`, `oom` (with torch's message), `wait`, `vanish` (before the start),
`stop` (by the health policy, with a bundle of its own).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from base.exits import DO_NOT_RETRY
from base.jsonl import append_line
from base.run_variables import LAUNCH
from record import attempts
from record.records import record_event


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    tries = folder.with_suffix(".tries")
    number = int(tries.read_text()) + 1 if tries.exists() else 1
    tries.write_text(str(number))
    step, saved, ending = plan[number - 1]
    if os.environ["RANK"] == "0" and ending != "vanish":
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text("steps: 9\n")
        before = attempts.progress_of(folder)
        attempt = attempts.next_number(folder)
        launch = os.environ[LAUNCH]
        record_event(folder, "began", attempt=attempt, launch=launch, after_step=before.saved_step)
        for n in range(before.saved_step + 1, step + 1):
            append_line(folder / "metrics.jsonl", {"segment": 0, "step": n, "attempt": attempt})
        if saved:
            (folder / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True, exist_ok=True)
            record_event(folder, "saved", attempt=attempt, step=saved)
        if ending == "stop":
            record_event(folder, "stop", attempt=attempt, bundle="bundles/step-00000004")
        if ending == 0:
            record_event(folder, "finished", attempt=attempt)
    print(f"password={os.environ.get('MY_PASSWORD')}", file=sys.stderr)
    if ending == "oom":
        print("Traceback (most recent call last):", file=sys.stderr)
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to", file=sys.stderr)
        sys.exit(1)
    if ending in ("kill", "vanish"):
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "wait":
        time.sleep(100)
    sys.exit(DO_NOT_RETRY if ending == "stop" else ending)


main()
