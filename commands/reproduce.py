"""`make reproduce`: train a run again from its record alone, and compare every number.

    environment.json  commit and diff -> the code, in a temporary git worktree where it is not this
                      recipe, layout -> the same arguments, the same number of ranks
    history.jsonl     rewinds, skips, changes -> replay segments, one start after the other
    (compare.replay_segments)
    metrics.jsonl, ledger/            -> each loss, norm, rate and batch hash, compared exactly

The one rule: the run's folder is only read. The copy is a run of its own (NAME=, by default
RUN-again) and stays to be looked at. Exit status 0: identical, or equal to 1e-5 where bits cannot
be expected; 1: different, or it could not be trained again; 93: refused.
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
from checkpoint.lineage import Line, read, run_folder
from checkpoint.load.allowed_changes import check_resume
from compare.agreement import compared, numbers_of, told, why_not_bits
from compare.recorded_code import Code, recorded_code
from compare.replay_segments import ReplaySegment, plan
from compare.runner import interrupted_by_sigterm
from recipes.check import folder_name
from record import environment, history
from record.records import read_metrics

TAIL_LINES = 12


class Broken(Exception):
    """The copy could not be trained to its end."""


def main(arguments: list[str]) -> int:
    """Entry of `python -m commands.reproduce RUN`; returns the exit status."""
    parser = Parser(prog="make reproduce", description=__doc__)
    parser.add_argument("run", help="run folder, or its name under runs/")
    parser.add_argument("--name", default="", help="of the copy; default: RUN-again")
    options = parser.parse_args(arguments)
    try:
        folder = run_folder(options.run, ROOT)
        copy = copy_folder(folder, options.name)
        lines, entries = read(folder), environment.read(folder)
        reached = last_steps(folder)
        replay_segments, numbers = plan(lines, entries, reached)
        print(outline(folder, copy, replay_segments), flush=True)
        with (
            interrupted_by_sigterm(),
            recorded_code(
                ROOT, [replay_segment.entry for replay_segment in replay_segments], print
            ) as code,
        ):
            train(copy, replay_segments, numbers, code)
    except UserError as error:
        return refuse(error)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"interrupted; runs/{copy.name} holds what was trained", file=sys.stderr)
        return FAILED
    found = compared(numbers_of(folder), numbers_of(copy), numbers)
    reasons = why_not_bits(
        [replay_segment.entry for replay_segment in replay_segments],
        environment.read(copy),
        code.notes,
    )
    text, is_good = told(found, reasons)
    print(text)
    return FINISHED if is_good else FAILED


def copy_folder(folder: Path, name: str) -> Path:
    """Where the copy is trained. Raises UserError for a name that is taken or none."""
    try:
        chosen = folder_name(name or f"{folder.name}-again")
    except ValueError as error:
        raise UserError(f"NAME={name} {error}") from None
    copy = ROOT / "runs" / chosen
    if copy.exists():
        raise UserError(f"NAME={chosen}: runs/{chosen} exists; remove it, or give another NAME=")
    return copy


def last_steps(folder: Path) -> dict[int, int]:
    """The last step on record of each segment."""
    reached: dict[int, int] = {}
    for line in read_metrics(folder):
        reached[line["segment"]] = max(line["step"], reached.get(line["segment"], 0))
    return reached


def outline(folder: Path, copy: Path, replay_segments: Sequence[ReplaySegment]) -> str:
    """What is about to happen, for a person."""
    rows = [f"{folder.name} is trained again as {copy.name}:"]
    for replay_segment in replay_segments:
        ranks = replay_segment.entry["layout"]["world"]
        back = f" (back to {replay_segment.after})" if replay_segment.opens else ""
        steps = f"{replay_segment.after + 1} to {replay_segment.stop}"
        rows.append(f"  segment {replay_segment.segment}: steps {steps}{back},"
                    f" {ranks} rank{'s' * (ranks != 1)}")  # fmt: skip
    return "\n".join(rows)


def train(
    copy: Path, replay_segments: Sequence[ReplaySegment], numbers: dict[int, int], code: Code
) -> None:
    """Every replay segment, in order; `numbers`: recorded segment -> the copy's. Raises Broken."""
    recipes = [replay_segment.entry["recipe"] for replay_segment in replay_segments]
    allow = sorted({key for one in recipes for key in differing(recipes[0], one)})
    with tempfile.TemporaryDirectory() as place:
        for number, replay_segment in enumerate(replay_segments):
            if replay_segment.opens is not None:
                open_segment(copy, replay_segment.opens)
            path = Path(place) / f"replay-segment-{number}.yaml"
            # JSON is YAML; this version of the project need not understand every knob in it.
            path.write_text(json.dumps(replay_segment.entry["recipe"]), encoding="utf-8")
            command = [
                *entry(replay_segment.entry),
                f"recipe={path}",
                *arguments_of_copy(copy.name, replay_segment.stop, allow),
            ]
            status, tail = run_one(command, code)
            own = read_metrics(copy, numbers[replay_segment.segment])
            reached = max((line["step"] for line in own), default=0)
            if status not in (FINISHED, REWOUND) and reached < replay_segment.stop:
                raise Broken(f"{copy.name} ended at step {reached} with status {status}:\n{tail}")


def entry(conditions: dict[str, Any]) -> list[str]:
    """The command that trains, up to its arguments, without the supervisor, which would
    start again by itself what the policy took back; with as many threads as then.
    """
    ranks = conditions["layout"]["world"]
    threads = f"OMP_NUM_THREADS={conditions['threads']}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    several = launcher if ranks > 1 else []
    return ["env", threads, "OMP_WAIT_POLICY=PASSIVE", sys.executable, *several, "pretrain.py"]


def arguments_of_copy(name: str, stop: int, allow: Sequence[str]) -> list[str]:
    """What a replay segment adds to its recipe: another name, an end, saves there and nowhere
    else.
    """
    return [
        f"run={name}", f"stop_after={stop}", "resume=auto", f"allow=[{','.join(allow)}]",
        "checkpoint.interval=0", "checkpoint.at_end=true", "checkpoint.keep=1000",
        "log.wandb=null",
    ]  # fmt: skip


def differing(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """The knobs that a later replay segment needs to have allowed."""
    for change in check_resume(one, other).changes:
        if change.treatment == "deliberate":
            yield change.key


def open_segment(copy: Path, line: Line) -> None:
    """Put a rewind into the copy's history, unless its own policy has come to the same one."""
    lines = read(copy)
    mine = [one for one in lines if one["kind"] == "segment" and one["segment"] == line["segment"]]
    if not mine:
        history.append(copy, line)
    elif places(mine[0]) != places(line):
        raise Broken(
            f"{copy.name}: the policy took it back to step {mine[0]['parent']['step']}, leaving out"
            f" {places(mine[0])[1]}; on record: step {line['parent']['step']}, {places(line)[1]}"
        )


def places(line: Line) -> tuple[int, list]:
    """Where a segment begins and what it leaves out."""
    return line["parent"]["step"], [skip["range"] for skip in line.get("skips", ())]


def run_one(command: list[str], code: Code) -> tuple[int, str]:
    """Start one replay segment in the recorded code; its status and the end of what it said."""
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
