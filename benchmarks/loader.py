"""Measures tokens per CPU second of data loaders on one core: this project and its peers.

    python -m benchmarks.loader --rounds 7

One corpus (TOKENS tokens, documents of 800 on average, in the page cache), shuffled sequences of
2,048 tokens, batches of 8, no worker processes. Peers are installed on the first call, each into an
own environment under .cache/peers/; a peer that cannot be installed or run becomes a row with the
reason. Rule: contenders take short turns on the same core, and ratios are taken within a round, so
that a busy machine slows all alike. Writes benchmarks/results/loader.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from base.paths import ROOT
from benchmarks.loader_worker import BATCH, CONTENDERS, CORPUS, EOD, SEQ_LEN, VOCAB
from benchmarks.processes import next_line
from benchmarks.report import quartiles
from benchmarks.step import commit, machine
from data.corpus.corpus_writer import CorpusWriter

CACHE = ROOT / ".cache"
RESULTS = ROOT / "benchmarks" / "results"
TOKENS, MEAN_DOCUMENT = 40_000_000, 800
PEERS = {
    "litdata": "litdata",
    "megatron": "megatron-core",
    "olmo": "ai2-olmo-core",
    "grain": "grain",
    "datasets": None,  # a dependency of this project
}
DELIVERS = {  # content of one batch, as observed
    "ours-plain": "inputs, labels (int64), segments, cumulative lengths, a hash per sample",
    "ours-masks": "the same, cut at documents",
    "litdata-plain": "windows (int32)",
    "megatron-plain": "tokens, labels, positions (int64), loss mask",
    "megatron-masks": "the same, cut at documents",
    "olmo-plain": "inputs (int64), sample numbers",
    "olmo-masks": "inputs (int64), sample numbers, document lengths",
    "grain-plain": "windows (uint16)",
    "datasets-plain": "windows (int64)",
}
GOALS = {
    ("ours-plain", "litdata-plain"): 1.3,
    ("ours-plain", "megatron-plain"): 5,
    ("ours-masks", "megatron-masks"): 5,
    ("ours-masks", "olmo-masks"): 8,
}
START_LIMIT_S, TURN_LIMIT_S = 300, 60


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.loader", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=1.0, help="CPU seconds of one turn")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path, default=RESULTS / "loader")
    options = parser.parse_args(arguments)
    folder = CACHE / f"loader-{options.tokens}"
    make_corpus(folder, options.tokens)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # workers inherit it
    workers, reasons = {}, {}
    for name in options.only:
        try:
            workers[name] = start(name, folder)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            reasons[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr)
    turns: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(options.rounds + 1):
        for name, worker in list(workers.items()):
            try:
                speed = turn(worker, options.turn)
            except (ValueError, KeyError, OSError):
                reasons[name] = f"ended in round {number}"
                del workers[name], turns[name]
                continue
            if number:  # the first round fills caches
                turns[name].append(speed)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait(timeout=60)
    result = summary(turns, reasons) | {"machine": machine(), "commit": commit()}
    result["command"] = f"python -m benchmarks.loader {' '.join(arguments)}".strip()
    text = markdown(result)
    print(text)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text + "\n")
    return 0


def make_corpus(folder: Path, tokens: int) -> None:
    """Write documents of random ids with geometric lengths into one shard, with our writer."""
    if (folder / CORPUS / "manifest.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    writer = CorpusWriter(folder / CORPUS, VOCAB, EOD)
    written = 0
    while written < tokens:
        ids = rng.integers(1, VOCAB, rng.geometric(1 / MEAN_DOCUMENT) + 1)
        ids[-1] = EOD
        writer.add("train", ids)
        written += len(ids)
    writer.close({"name": "loader", "tokenizer": None, "bos_id": None})


def start(name: str, folder: Path) -> subprocess.Popen:
    """Start a worker and wait for its first batch. Raises with the reason where it fails."""
    peer = name.split("-")[0]
    python = sys.executable if PEERS.get(peer) is None else installed(peer)
    worker = subprocess.Popen(
        # -P: else benchmarks/tokenize.py would replace the standard library's tokenize
        [str(python), "-P", str(ROOT / "benchmarks" / "loader_worker.py"), name, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=open(CACHE / f"{name}.log", "w"),  # noqa: SIM115 - the worker keeps it open
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        text=True,
    )
    line = next_line(worker, START_LIMIT_S)
    if line is None:
        worker.kill()
        raise RuntimeError(f"no first batch in {START_LIMIT_S} s")
    if not line:
        worker.wait(timeout=60)
        last = (CACHE / f"{name}.log").read_text().strip().splitlines()[-1:]
        raise RuntimeError(last[0][:200] if last else f"exit status {worker.returncode}")
    return worker


def installed(peer: str) -> Path:
    """Interpreter of a peer's environment, made on first use; it also sees our packages."""
    home = CACHE / "peers" / peer
    python = home / "bin" / "python"
    if (home / "ready").is_file():
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=START_LIMIT_S)
    own = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(own, "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [str(python), "-m", "pip", "install", "-q", PEERS[peer]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"pip install {PEERS[peer]}: {done.stderr.strip()[-200:]}")
    (home / "ready").touch()
    return python


def turn(worker: subprocess.Popen, seconds: float) -> float:
    """Give a worker one turn; returns its tokens per CPU second."""
    worker.stdin.write(f"{seconds}\n")
    worker.stdin.flush()
    line = next_line(worker, seconds + TURN_LIMIT_S)
    if line is None:
        worker.kill()
        raise TimeoutError(f"a worker was silent for {TURN_LIMIT_S} s after its turn")
    answer = json.loads(line)
    return answer["tokens"] / answer["cpu_s"]


def summary(turns: dict[str, list[float]], reasons: dict[str, str]) -> dict[str, Any]:
    """Medians, and ratios to ours within each round."""
    rows, goals = {}, {}
    for name, speeds in turns.items():
        ours = turns.get(f"ours-{name.split('-')[1]}")
        ratios = [a / b for a, b in zip(ours, speeds, strict=True)] if ours else []
        rows[name] = {
            "tokens_per_cpu_s": median(speeds),
            "ours_over_it": quartiles(ratios) if ratios else None,
        }
    for (ours, peer), goal in GOALS.items():
        if rows.get(peer, {}).get("ours_over_it") and ours in turns:
            goals[peer] = {"goal": goal, "reached": rows[peer]["ours_over_it"][1] >= goal}
    return {"rows": rows, "goals": goals, "left_out": reasons, "rounds": turns}


def markdown(result: dict[str, Any]) -> str:
    """Report as Markdown."""
    lines = [
        "# Data loaders on one core",
        "",
        f"`{result['command']}` at commit {result['commit']}; shuffled batches of {BATCH} x"
        f" {SEQ_LEN} tokens, CPU time, turns alternating; quartiles of the ratio per round.",
        "",
        *(f"- {key}: {value}" for key, value in result["machine"].items()),
        "",
        "| loader | delivers | million tokens per CPU second | ours is faster by | goal |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        ratio, goal = row["ours_over_it"], result["goals"].get(name)
        spread = "" if ratio is None else f"{ratio[1]:.2f}x ({ratio[0]:.2f} to {ratio[2]:.2f})"
        target = "" if goal is None else f"{goal['goal']}x {'' if goal['reached'] else 'missed'}"
        lines.append(
            f"| {name} | {DELIVERS[name]} | {row['tokens_per_cpu_s'] / 1e6:.1f} | {spread} |"
            f" {target.strip()} |"
        )
    lines += [f"| {name} | left out: {why} | | | |" for name, why in result["left_out"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
