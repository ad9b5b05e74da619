"""`make reproduce`: trains a run again from its record alone and compares every number.

    environment.json  commit and diff -> the code, in a temporary git worktree where it is another
                      recipe, layout -> the same recipe on the same number of ranks
    history.jsonl     rewinds, skips, changes -> replay segments (compare.replay_segments)
    metrics.jsonl, ledger/            -> each loss, norm, rate and batch hash, compared exactly

Rule: the run's folder is only read. The copy is a new run (NAME=, by default RUN-again) and is
kept. Exit status 0: identical, or equal to 1e-5 where equal bits cannot be expected; 1: different,
or it could not be trained again; 93: refused.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from base.command_line import Parser, refuse
from base.errors import UserError
from base.exits import FAILED, FINISHED, REWOUND
from base.paths import ROOT
from base.values import counted
from checkpoint.lineage import Line, read, run_folder
from checkpoint.load.allowed_changes import check_resume
from compare.agreement import compared, numbers_of, verdict_of, why_not_bits
from compare.recorded_code import Code, recorded_code
from compare.replay_segments import ReplaySegment, plan
from compare.runner import interrupted_by_sigterm
from recipes.check import folder_name
from record import environment, history
from record.records import read_metrics

TAIL_LINES = 12


class ReplayError(Exception):
    """The copy could not be trained to its end."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog="make reproduce", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--name", default="", help="name of the copy; default: RUN-again")
    options = parser.parse_args(arguments)
    # Train the copy.
    try:
        folder = run_folder(options.run, ROOT)
        copy = copy_folder(folder, options.name)
        lines, entries = read(folder), environment.read(folder)
        reached = last_steps(folder)
        replays, numbers = plan(lines, entries, reached)
        conditions = [replay.entry for replay in replays]
        print(outline(folder, copy, replays), flush=True)
        with interrupted_by_sigterm(), recorded_code(ROOT, conditions, print) as code:
            train(copy, replays, numbers, code)
    except UserError as error:
        return refuse(error)
    except ReplayError as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"interrupted; runs/{copy.name} holds the steps trained so far", file=sys.stderr)
        return FAILED
    # Compare it with the record.
    found = compared(numbers_of(folder), numbers_of(copy), numbers)
    reasons = why_not_bits(conditions, environment.read(copy), code.notes)
    text, is_good = verdict_of(found, reasons)
    print(text)
    return FINISHED if is_good else FAILED


def copy_folder(folder: Path, name: str) -> Path:
    """Folder of the copy. Raises UserError for a name that exists or is no folder name."""
    try:
        chosen = folder_name(name or f"{folder.name}-again")
    except ValueError as error:
        raise UserError(f"NAME={name} {error}") from None
    copy = ROOT / "runs" / chosen
    if copy.exists():
        raise UserError(f"NAME={chosen}: runs/{chosen} exists; remove it, or give another NAME=")
    return copy


def last_steps(folder: Path) -> dict[int, int]:
    """Map each segment to its last recorded step."""
    reached: dict[int, int] = {}
    for line in read_metrics(folder):
        reached[line["segment"]] = max(line["step"], reached.get(line["segment"], 0))
    return reached


def outline(folder: Path, copy: Path, replays: Sequence[ReplaySegment]) -> str:
    """Text on what will be trained."""
    rows = [f"{folder.name} is trained again as {copy.name}:"]
    for replay in replays:
        back = f" (back to {replay.after})" if replay.opens else ""
        rows.append(
            f"  segment {replay.segment}: steps {replay.after + 1} to {replay.stop}{back},"
            f" {counted(replay.entry['layout']['world'], 'rank')}"
        )
    return "\n".join(rows)


def train(
    copy: Path, replays: Sequence[ReplaySegment], numbers: dict[int, int], code: Code
) -> None:
    """Train all replay segments in order; `numbers` maps recorded segments to those of the copy.

    Raises ReplayError where one of them does not reach its last step.
    """
    recipes = [replay.entry["recipe"] for replay in replays]
    allow = sorted({key for one in recipes for key in differing(recipes[0], one)})
    with tempfile.TemporaryDirectory() as place:
        for number, replay in enumerate(replays):
            if replay.opens is not None:
                open_segment(copy, replay.opens)
            path = Path(place) / f"replay-segment-{number}.yaml"
            # JSON is YAML. The file is not composed here: this version may not know every knob.
            path.write_text(json.dumps(replay.entry["recipe"]), encoding="utf-8")
            command = [
                *entry(replay.entry),
                f"recipe={path}",
                *overrides(copy.name, replay.stop, allow),
            ]
            status, tail = run_one(command, code)
            own = read_metrics(copy, numbers[replay.segment])
            reached = max((line["step"] for line in own), default=0)
            if status not in (FINISHED, REWOUND) and reached < replay.stop:
                raise ReplayError(
                    f"{copy.name} ended at step {reached} with status {status}:\n{tail}"
                )


def entry(conditions: dict[str, Any]) -> list[str]:
    """Command that trains, without its overrides, with the recorded number of threads.

    The supervisor of `make pretrain` is left out: after a rewind by the health policy it would
    start the run again by itself.
    """
    ranks = conditions["layout"]["world"]
    threads = f"OMP_NUM_THREADS={conditions['threads']}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    several = launcher if ranks > 1 else []
    return ["env", threads, "OMP_WAIT_POLICY=PASSIVE", sys.executable, *several, "pretrain.py"]


def overrides(name: str, stop: int, allow: Sequence[str]) -> list[str]:
    """Overrides of a replay segment: another name, a last step, and one save at that step."""
    return [
        f"run={name}", f"stop_after={stop}", "resume=auto", f"allow=[{','.join(allow)}]",
        "checkpoint.interval=0", "checkpoint.at_end=true", "checkpoint.keep=1000",
        "log.wandb=null",
    ]  # fmt: skip


def differing(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """Knobs that a later replay segment changes and `allow` has to name."""
    for change in check_resume(one, other).changes:
        if change.treatment == "deliberate":
            yield change.key


def open_segment(copy: Path, line: Line) -> None:
    """Append a recorded rewind to the copy's history, unless its own policy made the same one."""
    lines = read(copy)
    mine = [one for one in lines if one["kind"] == "segment" and one["segment"] == line["segment"]]
    if not mine:
        history.append(copy, line)
    elif places(mine[0]) != places(line):
        raise ReplayError(
            f"{copy.name}: the policy rewound it to step {mine[0]['parent']['step']}, leaving out"
            f" {places(mine[0])[1]}; recorded: step {line['parent']['step']}, {places(line)[1]}"
        )


def places(line: Line) -> tuple[int, list]:
    """Step after which a segment begins, and the data ranges that it leaves out."""
    return line["parent"]["step"], [skip["range"] for skip in line.get("skips", ())]


def run_one(command: list[str], code: Code) -> tuple[int, str]:
    """Start one replay segment in the recorded code; returns its status and its last lines."""
    last: list[str] = []
    with subprocess.Popen(
        ["env", f"PYTHONPATH={code.root}", *command],
        cwd=code.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            for line in process.stdout:
                last = [*last[-TAIL_LINES:], line]
                if line.startswith(("step ", "going on", "segment ")):
                    print(f"  {line}", end="", flush=True)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            raise
    return process.returncode, "".join(last)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
