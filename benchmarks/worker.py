"""Runs one contender in a process that trains only on command.

    parent   {"steps": 3}\n                       ->  stdin
    worker   {"losses": [..], "seconds": [..]..}\n ->  stdout

Rule: between two commands the process waits in a read and its threads sleep, so that contenders can
take turns on the same cores. Started by benchmarks.processes; replies go to the first stdout, the
output of libraries goes to stderr. Units: seconds; `cpu_s` is the CPU time of all threads of the
process, which other programs on the machine change far less than the wall time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from benchmarks.workload import Workload

TOP_OPS = 12


class Pipe:
    """Turns of a contender (benchmarks.contenders.Turns): reads commands, writes replies."""

    def __init__(self, commands: TextIO, replies: TextIO):
        self.commands, self.replies = commands, replies
        self.is_started = False
        self.profiler: Any = None
        self.left = 0
        self.reply: dict[str, Any] = {}

    def begin(self) -> bool:
        """Report that the model is built and wait for a command; False at the end."""
        self.send({"ready": True})
        self.is_started = True
        return self.wait()

    def after_step(self, loss: float, times: Any = None) -> bool:
        """Count a step; at the end of a turn reply and wait. False at the end of the loop."""
        now, cpu = time.perf_counter(), time.process_time()
        self.reply["losses"].append(loss)
        self.reply["seconds"].append(now - self.began)
        self.reply["cpu_s"].append(cpu - self.cpu_began)
        if times is not None:
            self.reply["phases"].append(asdict(times))
        self.left -= 1
        if self.left == 0:
            self.finish_turn()
            return self.wait()
        self.began, self.cpu_began = now, cpu
        return True

    def wait(self) -> bool:
        """Read the next command; at an end of file the parent has ended."""
        command = json.loads(self.commands.readline() or "{}")
        self.left = command.get("steps", 0)
        if self.left == 0:
            return False
        if command.get("profile"):
            from torch.profiler import ProfilerActivity, profile

            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.start()
        self.reply = {"losses": [], "seconds": [], "cpu_s": [], "phases": []}
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        return True

    def finish_turn(self) -> None:
        """Send the results of the turn's steps."""
        from runtime.engine.memory import peak_host_gib

        if self.profiler:
            self.profiler.stop()
            self.reply["ops"] = top_ops(self.profiler, len(self.reply["losses"]))
            self.profiler = None
        self.reply["peak_host_gib"] = peak_host_gib()
        self.send(self.reply)

    def send(self, reply: dict[str, Any]) -> None:
        """Send one line to the parent."""
        self.replies.write(json.dumps(reply) + "\n")
        self.replies.flush()


def top_ops(profiler: Any, steps: int) -> dict[str, float]:
    """Seconds per step in each of the costliest operators, without the operators they call."""
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
    seconds = {event.key: event.self_cpu_time_total / 1e6 / steps for event in events}
    top = dict(list(seconds.items())[:TOP_OPS])
    return top | {"everything else": sum(seconds.values()) - sum(top.values())}


def main(name: str, workload: str) -> int:
    """Train as contender `name` until the last command; an early failure is sent as a reply."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pipe = Pipe(sys.stdin, replies)
    try:
        from benchmarks.contenders import CONTENDERS

        CONTENDERS[name](Workload.from_json(workload), pipe)
    except ImportError as error:
        if pipe.is_started or error.name != "accelerate":
            raise
        pipe.send({"missing": error.name})
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        from runtime.process import process

        process.finish()
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    from runtime.process import process

    process.leave(status)
