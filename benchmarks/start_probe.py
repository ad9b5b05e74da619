"""Starts a run like `python -m commands.pretrain` and reads the clock between the parts.

    python -m benchmarks.start_probe launcher OUT.json recipe=tiny ...   checks, then becomes
    python -m benchmarks.start_probe run OUT.json recipe=tiny ...        pretrain.py's main
    python -m benchmarks.start_probe reference OUT.json                  torch, deepspeed alone

Rule: nothing is done that the untouched command does not do; parts are timed by wrapping the
functions that do them. Each mark takes all time since the mark before, so that the parts add up to
the whole. Started by benchmarks.start. Units: seconds; wall is the clock that all processes of the
host share, cpu is the time that this process used since it was started (exec keeps it).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OTHER = "other code of ours"
LAZY = "torch's own late imports (first optimizer)"
STEPS = "steps until the first line"
# (module, function, part to which its time belongs); wrapped after the import of pretrain.
PROBED = (
    ("pretrain", "compose_command", "compose"),
    ("pretrain", "resolve", "layout and DeepSpeed JSON"),
    ("pretrain", "open_stream", "open the stream"),
    ("pretrain", "standing", "look for a checkpoint"),
    ("pretrain", "evaluation_batches", "held-out batches"),
    ("runtime.process.process", "start", "process group"),
    ("runtime.engine.deepspeed_import", "import_muon_uncompiled", "import DeepSpeed's Muon"),
    ("runtime.engine.build_engine", "build_model", "build and fill the model"),
    ("runtime.engine.engine", "Engine.train_step", STEPS),
    ("runtime.log.rank0_record", "RunRecord.__init__", "open the record (TensorBoard, console)"),
)


class Timeline:
    """Parts of the start in order, kept in a file so that they survive exec."""

    def __init__(self, out: Path):
        self.out = out
        self.marks: list[tuple[str, float, float]] = []
        if out.exists():
            self.marks = [tuple(mark) for mark in json.loads(out.read_text())]

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`."""
        self.marks.append((part, time.monotonic(), time.process_time()))

    def save(self) -> None:
        """Write the marks."""
        self.out.write_text(json.dumps(self.marks))

    def timed(self, module: str, name: str, part: str) -> None:
        """Replace a function by itself with a mark before and after each call."""
        owner, name = find(module, name)
        setattr(owner, name, self.wrap(getattr(owner, name), part))

    def wrap(self, function: Callable, part: str) -> Callable:
        """`function` with a mark before (time of other code) and after."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self.mark(OTHER)
            value = function(*arguments, **named)
            self.mark(part)
            return value

        return call


def launcher(timeline: Timeline, arguments: list[str]) -> int:
    """Call the main of commands.pretrain; its exec starts `run` here instead of pretrain.py."""
    timeline.mark("launcher: interpreter")
    from commands import pretrain

    timeline.mark("launcher: imports")

    def start_here(*_: object) -> int:
        timeline.mark("launcher: compose")
        timeline.save()
        module = ["-m", "benchmarks.start_probe", "run", str(timeline.out)]
        return os.execv(sys.executable, [sys.executable, *module, *arguments])

    pretrain.start_here = start_here
    return pretrain.main(["--nproc", "1", "--", *arguments])


def run(timeline: Timeline, arguments: list[str]) -> int:
    """Call the main of pretrain after timing its imports one after the other."""
    timeline.mark("run: interpreter")
    import torch  # noqa: F401

    timeline.mark("import torch")
    late_imports(timeline)
    import transformers.configuration_utils
    import transformers.modeling_outputs
    import transformers.modeling_utils  # noqa: F401

    timeline.mark("import transformers")
    import pretrain

    timeline.mark("import the rest of ours")
    for module, name, part in PROBED:
        timeline.timed(module, name, part)
    pretrain.build = build_after_deepspeed(timeline, pretrain.build)
    stop_after_first_line(timeline)
    return pretrain.main(arguments)


def build_after_deepspeed(timeline: Timeline, build: Callable) -> Callable:
    """Wrap the engine's build: times its import of deepspeed and deepspeed.initialize."""

    def call(*arguments: Any, **named: Any) -> Any:
        timeline.mark(OTHER)
        import deepspeed  # noqa: F401

        timeline.mark("import deepspeed")
        timeline.timed("deepspeed", "initialize", "DeepSpeed initialize")
        return build(*arguments, **named)

    return call


def stop_after_first_line(timeline: Timeline) -> None:
    """Save the timeline when the first step has been printed."""
    record, name = find("runtime.log.rank0_record", "RunRecord._write")
    write = getattr(record, name)

    def first_write(*arguments: Any) -> None:
        setattr(record, name, write)
        write(*arguments)
        timeline.mark(STEPS)
        timeline.save()

    setattr(record, name, first_write)


def find(module: str, name: str) -> tuple[Any, str]:
    """Owner and attribute of a dotted name in a module; the attribute exists."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, last)
    return owner, last


def reference(timeline: Timeline) -> int:
    """Do only the part that every DeepSpeed program must: import torch and deepspeed."""
    timeline.mark("run: interpreter")
    import torch  # noqa: F401

    timeline.mark("import torch")
    late_imports(timeline)
    import deepspeed  # noqa: F401

    timeline.mark("import deepspeed")
    timeline.save()
    return 0


def late_imports(timeline: Timeline) -> None:
    """Make an optimizer, for which torch 2.13 imports torch._dynamo and sympy in every program."""
    import torch

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    timeline.mark(LAZY)


def main(arguments: list[str]) -> int:
    """Run one of the three forms of the command above."""
    mode, out, *rest = arguments
    timeline = Timeline(Path(out))
    if mode == "reference":
        return reference(timeline)
    return {"launcher": launcher, "run": run}[mode](timeline, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
