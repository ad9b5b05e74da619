"""A rank without torch: writes its arguments and variables to FOLDER/<rank>.json, then does ACTION.

    launch_worker.py FOLDER ACTION [argument ...]

ACTION: `end`, or parts joined by `+`: `3@1` = rank 1 ends with status 3, `kill@0` = rank 0 is
killed, `say@1` = rank 1 prints a traceback first, `wait` = waits for a long time, `deaf` = ignores
SIGTERM, `make=FILE` = makes a file and its folder, `child` = starts a process that outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    folder, actions, *rest = sys.argv[1:]
    rank = int(os.environ["RANK"])
    content = {
        "argv": rest,
        "env": dict(os.environ),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
        "parent": os.getppid(),
    }
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(content))
    part.rename(Path(folder) / f"{rank}.json")
    print(f"rank {rank} speaks", flush=True)
    for action in actions.split("+"):
        what, _, who = action.partition("@")
        if who and int(who) != rank:
            continue
        if what == "say":
            print(
                "Traceback (most recent call last):\nValueError: mine", file=sys.stderr, flush=True
            )
        elif what == "refuse":
            print(f"refused: rank {rank}: not like this", file=sys.stderr, flush=True)
            sys.exit(93)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "child":
            subprocess.Popen(["sleep", "1000"])
        elif what == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif what.startswith("make="):
            # As in a run, where all ranks have joined before the first makes the folder.
            world = int(os.environ["WORLD_SIZE"])
            while not all((Path(folder) / f"{other}.json").exists() for other in range(world)):
                time.sleep(0.01)
            made = Path(what.removeprefix("make="))
            made.parent.mkdir(parents=True)
            made.touch()
        elif what == "nap":
            time.sleep(0.3)
        elif what == "wait":
            time.sleep(1000)
        elif what.isdigit():
            sys.exit(int(what))


main()
