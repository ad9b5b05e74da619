"""`make matrix`: trains every layout of at most eight ranks and compares it with a plain loop.

    python -m benchmarks.matrix [--world 4] [--find "t2 bf16"]

Hundreds of short trainings on the CPUs of this machine; the suite trains a pairwise cover of them.
Rule: both use the same worker and the same bounds. Prints a table at the end; exit status 1 where a
case fails or is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from base.paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "workers"))

from layout_cases import BF16_BOUND, Case, every
from layout_worker import EVAL_TOKENS, recipe_of
from parity_worker import STEPS
from plain_loop import plain_loop, relative
from ranks import run_command
from short_documents import write_short_documents

PER_LAUNCH = 16  # cases: a launch costs ten seconds, and one that hangs costs its limit
LIMIT_S = 900


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("--world", type=int, help="only cases of this many ranks")
    parser.add_argument("--find", default="", help="only cases whose names have all these words")
    options = parser.parse_args(arguments)
    words = set(options.find.split())
    cases = [
        case
        for case in every()
        if options.world in (None, case.world) and words <= set(case.name.split())
    ]
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_short_documents(Path(folder) / "corpus")
        rows = list(run(cases, corpus, Path(folder)))
    print("\n".join(["", *summary(rows)]))
    return int(any(problem for _, _, problem in rows))


def run(cases: list[Case], corpus: Path, folder: Path) -> Iterator[tuple[Case, dict, str]]:
    """Train all cases and print each; yields (case, largest relative differences, problem)."""
    expected: dict[bool, dict] = {}
    for case, found in trained(cases, corpus, folder):
        if case.tied not in expected:
            recipe = recipe_of(Case(tied=case.tied, accumulation=4), corpus)
            expected[case.tied] = plain_loop(recipe, STEPS, EVAL_TOKENS)
        differences, problem = judge(case, found, expected[case.tied])
        print(
            case.name,
            *(f"{key} {value:.1e}" for key, value in differences.items()),
            problem,
            flush=True,
        )
        yield case, differences, problem


def trained(cases: list[Case], corpus: Path, folder: Path) -> Iterator[tuple[Case, dict | str]]:
    """Result of each case, or how its launch ended."""
    by_world = defaultdict(list)
    for case in cases:
        by_world[case.world].append(case)
    for world, members in sorted(by_world.items()):
        for start in range(0, len(members), PER_LAUNCH):
            some = members[start : start + PER_LAUNCH]
            out = folder / f"{world}-{start}.json"
            ending = launch(world, out, corpus, ";".join(case.name for case in some))
            seen = json.loads(out.read_text()) if out.is_file() else {}
            for case in some:
                yield case, seen.get(case.name, ending)


def launch(world: int, out: Path, corpus: Path, names: str) -> str:
    """Run some cases in one launch; returns its last lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [
        str(world),
        str(ROOT / "tests" / "workers" / "layout_worker.py"),
        str(out),
        str(corpus),
        names,
    ]
    try:
        done = run_command(command, LIMIT_S)
    except AssertionError as error:  # all its processes were killed
        return str(error).partition(":")[0]
    return " | ".join(done.stdout.strip().splitlines()[-3:])


def judge(case: Case, found: dict | str, expected: dict) -> tuple[dict[str, float], str]:
    """Largest relative differences from the plain loop, and the bound that they break."""
    if isinstance(found, str):
        return {}, f"FAILED: {found}"
    is_fp32 = case.precision == "fp32"
    bounds = {
        "loss": 1e-6 if is_fp32 else BF16_BOUND,
        "norm": 1e-5 if is_fp32 else float("inf"),
        "eval": 1e-6 if is_fp32 else BF16_BOUND,
        "update": 1e-4 if is_fp32 else 2e-3,
    }
    differences = {key: relative(found[key], expected[key]) for key in ("loss", "norm")}
    differences["eval"] = relative([found["eval"]], [expected["eval"]])
    differences["update"] = relative([found["update_norm"]], [0.1])
    wrong = [key for key, bound in bounds.items() if not differences[key] < bound]
    wrong += ["replicas differ"] if found["replicas"] else []
    return differences, f"WRONG: {', '.join(wrong)}" if wrong else ""


def summary(rows: list[tuple[Case, dict, str]]) -> list[str]:
    """Lines of a table by layout and precision: cases, passed cases, largest differences."""
    kinds = defaultdict(list)
    for case, differences, problem in rows:
        axes = case.name.split()[:5] + [case.precision]
        kinds[" ".join(axes)].append((differences, problem))
    lines = [f"{'layout':28s} {'cases':>5s} {'hold':>5s}  largest relative difference"]
    for kind, members in kinds.items():
        hold = sum(not problem for _, problem in members)
        keys = {key: None for differences, _ in members for key in differences}
        worst = [f"{key} {max(d.get(key, 0.0) for d, _ in members):.1e}" for key in keys]
        lines.append(f"{kind:28s} {len(members):5d} {hold:5d}  {', '.join(worst)}")
    failed = sum(bool(problem) for _, _, problem in rows)
    return [*lines, f"{len(rows)} cases, {failed} do not hold"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
